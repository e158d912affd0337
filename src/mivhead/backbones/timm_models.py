"""Any model of timm, and the backbones of the paper, which are timm's architectures too.

Taps are the names in the model's `feature_info`, such as `layer4`, `stages.3` or `blocks.11`, read
with `forward_intermediates`: CNNs give maps, ViTs give maps and [CLS] with the final norm applied
to every block. Names of other submodules work as well; their outputs are taken as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mivhead.backbones.checkpoints import state_hash
from mivhead.backbones.fast import fold_batchnorm
from mivhead.backbones.module import ModuleBackbone, Tapped, freeze, hooked, suggest_blocks
from mivhead.backbones.outputs import Parts
from mivhead.backbones.paper import PAPER
from mivhead.backbones.taps import check_taps
from mivhead.backbones.timm_build import RANDOM, build
from mivhead.errors import InputError, NotAvailableError
from mivhead.preset import Preprocessing, Preset

_NARROW = 384  # ViTs up to this width are tapped at four blocks, wider ones at two: the paper's


def load(
    spec: str,
    *,
    weights: str | Path | None,
    preset: Preset | None,
    device: torch.device,
    dtype: torch.dtype,
) -> ModuleBackbone:
    """Load a model of timm or of the paper; see `mivhead.backbones.load_backbone`."""
    known = PAPER.get(spec)
    if known is not None:
        preset = preset or known.preset
    model = build(spec, weights, preset.preprocessing.size if preset else None)
    sha256 = state_hash(model)
    quick = _quicken(model.eval())
    freeze(model, device)
    normed = known is None or known.normed
    if preset is None:
        preset = _suggest(spec, model, device, dtype)
    check_taps(spec, preset.taps, [name for name, _ in model.named_modules() if name])
    return ModuleBackbone(
        f"{spec} (random weights)" if weights == RANDOM else spec,
        model,
        sha256,
        preset,
        device=device,
        dtype=dtype,
        tapping=partial(_tapped, normed=normed),
        rebuild=partial(_rebuild, spec, weights, preset, sha256) if quick else None,
    )


def _rebuild(spec: str, weights: str | Path | None, preset: Preset, sha256: str) -> nn.Module:
    """Build the model again, with its BatchNorms."""
    model = build(spec, weights, preset.preprocessing.size)
    if state_hash(model) != sha256:
        raise NotAvailableError(f"The checkpoint {weights} has changed since it was first read.")
    return model


def _quicken(model: nn.Module) -> bool:
    """Fold BatchNorms where they follow their convolutions; return whether anything was done."""
    from timm.models.regnet import RegNet
    from timm.models.resnet import ResNet

    foldable = isinstance(model, ResNet | RegNet)
    if foldable:
        fold_batchnorm(model)
    return foldable


def feature_names(model: nn.Module) -> list[str]:
    """Names of the model's stages or blocks, in the order of `forward_intermediates`."""
    return [str(info["module"]) for info in _feature_info(model)]


def _feature_info(model: nn.Module) -> list[dict[str, Any]]:
    return list(getattr(model, "feature_info", ()))


def _tapped(model: nn.Module, taps: Sequence[str], dtype: torch.dtype, *, normed: bool) -> Tapped:
    names = feature_names(model)
    if hasattr(model, "forward_intermediates") and set(taps) <= set(names):
        return Intermediates(model, [names.index(tap) for tap in taps], normed=normed)
    return hooked(model, taps, dtype)


class Intermediates(nn.Module):
    """Runs a model up to the deepest of some stages and gives their parts.

    Parameters
    ----------
    model
        A model with `forward_intermediates`.
    indices
        Positions of the stages.
    normed
        Whether the final norm is applied to every block of a ViT, or to none.
    """

    def __init__(self, model: nn.Module, indices: list[int], *, normed: bool = True) -> None:
        super().__init__()
        self.model = model
        self._forward: Any = model.forward_intermediates
        self._settings: dict[str, Any] = {
            "indices": indices,
            "norm": normed,
            "stop_early": True,
            "output_fmt": "NCHW",
            "intermediates_only": True,
        }
        if has_tokens(model):
            self._settings["return_prefix_tokens"] = True

    def forward(self, x: Tensor) -> list[Parts]:
        """Give the parts of every stage for a batch `(n, 3, R, R)`."""
        outputs = self._forward(x, **self._settings)
        return [_parts(*out) if isinstance(out, tuple) else {"map": out} for out in outputs]


def _parts(patches: Tensor, prefix: Tensor) -> Parts:
    if not prefix.shape[1]:
        return {"map": patches}
    return {"map": patches, "token": prefix[:, 0]}  # [CLS] comes first, then registers


def has_tokens(model: nn.Module) -> bool:
    """Whether the model is a ViT: blocks of one size, perhaps with prefix tokens."""
    forward: Any = getattr(model, "forward_intermediates", None)
    return forward is not None and "return_prefix_tokens" in inspect.signature(forward).parameters


def default_taps(model: nn.Module, name: str) -> tuple[str, ...]:
    """Name what to tap in a model that the paper does not name, by the paper's habits."""
    names = feature_names(model)
    if not names:
        raise InputError(f"{name} does not say what can be tapped: give a preset with taps.")
    if _is_swin(model):  # the last stage after patch merging, and after the final norm
        return (f"{names[-1]}.downsample", "norm")
    if has_tokens(model) and int(_feature_info(model)[-1]["num_chs"]) <= _NARROW:
        return tuple(names[-4:])
    return tuple(names[-2:])


def _is_swin(model: nn.Module) -> bool:
    from timm.models.swin_transformer import SwinTransformer
    from timm.models.swin_transformer_v2 import SwinTransformerV2

    return isinstance(model, SwinTransformer | SwinTransformerV2)


def _suggest(spec: str, model: nn.Module, device: torch.device, dtype: torch.dtype) -> Preset:
    """Derive a preset for a model that the paper does not name."""
    config: dict[str, Any] = model.pretrained_cfg  # type: ignore[assignment]  # timm's own
    preprocessing = Preprocessing(
        int(config["input_size"][1]), tuple(config["mean"]), tuple(config["std"])
    )
    taps = default_taps(model, spec)
    tapped = _tapped(model, taps, dtype, normed=True)
    blocks = suggest_blocks(tapped, preprocessing.size, device)
    if has_tokens(model) or _is_swin(model):  # also those without a token
        blocks = tuple(replace(block, form="vit", tau=200.0) for block in blocks)
    return Preset(taps, blocks, preprocessing)
