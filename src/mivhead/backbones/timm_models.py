"""Any model of timm, and the backbones of the paper, which use timm's architectures.

Taps are the names in the model's `feature_info`, such as `layer4`, `stages.3` or `blocks.11`, read
with `forward_intermediates`: CNNs give maps, ViTs give maps and [CLS] with the final norm applied
to every block. The tap `pooled`, after all others, is the vector that the model's own classifier
would see. Names of other submodules work as well; their outputs are used unchanged.

From top to bottom: loading, taps, suggested presets, weights, and checkpoints of other projects.
"""

from __future__ import annotations

import difflib
import inspect
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mivhead._util.optional import need
from mivhead._util.text import reason_of
from mivhead.backbones import hub
from mivhead.backbones.base import default_device
from mivhead.backbones.checkpoints import load_exactly, read_tensors, state_hash
from mivhead.backbones.efficientnet_lite_network import fold_batchnorm
from mivhead.backbones.module import (
    ModuleBackbone,
    Tapped,
    freeze,
    hooked,
    suggest_blocks,
    torch_type,
)
from mivhead.backbones.preset import Preprocessing, Preset, near_usual_size, spread_taps
from mivhead.backbones.presets import NAMED, PAPER
from mivhead.backbones.taps import POOLED, Parts, check_taps
from mivhead.errors import InputError, NotAvailableError

RANDOM = "random"
SCHEME = "timm:"
_PATCH = re.compile(r"patch(\d+)")  # in the names of ViTs


def load(
    spec: str,
    *,
    weights: str | Path | None,
    preset: Preset | None,
    device: str | torch.device | None,
    dtype: np.dtype[Any],
    image_size: int | None = None,
) -> ModuleBackbone:
    """Load a model of timm or of the paper; see `mivhead.backbones.load_backbone`."""
    need("timm", "timm")
    device = default_device(device)
    known = PAPER.get(spec)
    if known is not None:
        preset = preset or known.preset
    if preset is None:
        image_size = image_size or usual_size(model_name(spec))
    model = build(spec, weights, preset.preprocessing.size if preset else image_size)
    sha256 = state_hash(model)
    folded = _fold(model.eval())
    freeze(model, device)
    normed = known is None or known.normed
    if preset is None:
        preset = _suggest(spec, model, device, torch_type(dtype), image_size)
    if not _are_stages(model, preset.taps):  # the name of a stage is not always that of a module
        check_taps(spec, preset.taps, [name for name, _ in model.named_modules() if name])
    return ModuleBackbone(
        f"{spec} (random weights)" if weights == RANDOM else spec,
        model,
        sha256,
        preset,
        device=device,
        dtype=dtype,
        tapping=partial(_tapped, normed=normed),
        rebuild=partial(_rebuild, spec, weights, preset, sha256) if folded else None,
    )


def _rebuild(spec: str, weights: str | Path | None, preset: Preset, sha256: str) -> nn.Module:
    """Build the model again, with its BatchNorms."""
    model = build(spec, weights, preset.preprocessing.size)
    if state_hash(model) != sha256:
        raise NotAvailableError(f"The checkpoint {weights} has changed since it was first read.")
    return model


def _fold(model: nn.Module) -> bool:
    """Fold BatchNorms where they follow their convolutions; return whether any were folded."""
    from timm.models.regnet import RegNet
    from timm.models.resnet import ResNet

    foldable = isinstance(model, ResNet | RegNet)
    if foldable:
        fold_batchnorm(model)
    return foldable


def feature_names(model: nn.Module) -> list[str]:
    """Return the names of the stages or blocks, in the order of `forward_intermediates`."""
    return [str(info["module"]) for info in getattr(model, "feature_info", ())]


def _are_stages(model: nn.Module, taps: Sequence[str]) -> bool:
    """Return whether `forward_intermediates` gives all taps."""
    stages = _without_pooled(taps)
    return hasattr(model, "forward_intermediates") and set(stages) <= set(feature_names(model))


def _without_pooled(taps: Sequence[str]) -> Sequence[str]:
    return taps[:-1] if taps[-1] == POOLED else taps


def _tapped(model: nn.Module, taps: Sequence[str], dtype: torch.dtype, *, normed: bool) -> Tapped:
    if not _are_stages(model, taps):
        return hooked(model, taps, dtype)
    names = feature_names(model)
    indices = [names.index(tap) for tap in _without_pooled(taps)]
    return Intermediates(model, indices, normed=normed, pooled=taps[-1] == POOLED)


class Intermediates(nn.Module):
    """Runs a model up to the deepest of the given stages and returns their parts.

    The model has `forward_intermediates`. With `normed` the final norm is applied to every block of
    a ViT, otherwise to none; with `pooled` the vector that the model's classifier would see
    follows, as a token.
    """

    def __init__(
        self,
        model: nn.Module,
        indices: list[int],
        *,
        normed: bool = True,
        pooled: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self._pooled = pooled
        self._count = len(indices)
        self._forward: Any = model.forward_intermediates
        self._settings: dict[str, Any] = {
            "indices": indices or 1,  # the last one, if only the pooled vector is wanted
            "norm": normed,
            "stop_early": not pooled,
            "output_fmt": "NCHW",
            "intermediates_only": not pooled,
        }
        self._class_token = has_class_token(model)
        # Some ViTs without prefix tokens fail if they are asked for them.
        if has_tokens(model) and getattr(model, "num_prefix_tokens", True):
            self._settings["return_prefix_tokens"] = True

    def forward(self, x: Tensor) -> list[Parts]:
        """Return the parts of every stage for a batch `(n, 3, R, R)`."""
        outputs = self._forward(x, **self._settings)
        if not self._pooled:
            return self._read(outputs)
        final, outputs = outputs
        head: Any = self.model.forward_head
        return [*self._read(outputs)[: self._count], {"token": head(final, pre_logits=True)}]

    def _read(self, outputs: Sequence[Any]) -> list[Parts]:
        return [self._parts(*out) if isinstance(out, tuple) else {"map": out} for out in outputs]

    def _parts(self, patches: Tensor, prefix: Tensor) -> Parts:
        if not self._class_token:
            return {"map": patches}  # the prefix holds registers only
        return {"map": patches, "token": prefix[:, 0]}  # [CLS] comes first, then registers


def has_tokens(model: nn.Module) -> bool:
    """Return whether the model is a ViT: blocks of one size, possibly with prefix tokens."""
    forward: Any = getattr(model, "forward_intermediates", None)
    return forward is not None and "return_prefix_tokens" in inspect.signature(forward).parameters


def has_class_token(model: nn.Module) -> bool:
    """Return whether the first prefix token is [CLS], and not a register."""
    known: bool | None = getattr(model, "has_class_token", None)
    return getattr(model, "cls_token", None) is not None if known is None else known


def default_taps(model: nn.Module, name: str) -> tuple[str, ...]:
    """Choose the taps of a model that is not in the paper."""
    names = feature_names(model)
    if not names or len(set(names[-2:])) < len(names[-2:]):
        raise InputError(
            f"{name} does not list its stages by name: choose another model of timm, or give a "
            "preset with taps."
        )
    if _is_swin(model):  # the last stage after patch merging, and after the final norm
        return (f"{names[-1]}.downsample", "norm")
    return spread_taps(names) if has_tokens(model) else tuple(names[-2:])


def _is_swin(model: nn.Module) -> bool:
    from timm.models.swin_transformer import SwinTransformer
    from timm.models.swin_transformer_v2 import SwinTransformerV2

    return isinstance(model, SwinTransformer | SwinTransformerV2)


def _suggest(
    spec: str, model: nn.Module, device: torch.device, dtype: torch.dtype, size: int | None
) -> Preset:
    """Derive a preset for a model that is not in the paper."""
    config: dict[str, Any] = model.pretrained_cfg  # type: ignore[assignment]  # timm's own
    preprocessing = Preprocessing(
        size or int(config["input_size"][1]), tuple(config["mean"]), tuple(config["std"])
    )
    taps = default_taps(model, spec)
    try:
        tapped = _tapped(model, taps, dtype, normed=True)
        blocks = suggest_blocks(tapped, preprocessing.size, device)
    except Exception as error:  # whatever an architecture that we have never seen raises
        reason = reason_of(error)
        raise InputError(
            f"{spec} cannot be tapped at {' and '.join(taps)} ({reason}): choose another model of "
            "timm, or give a preset whose taps are other layers."
        ) from error
    if has_tokens(model) or _is_swin(model):  # also those without a token
        blocks = tuple(replace(block, form="vit", tau=200.0) for block in blocks)
    return Preset(taps, blocks, preprocessing)


def build(spec: str, weights: str | Path | None, size: int | None = None) -> nn.Module:
    """Build a network without its classifier.

    `spec` is `timm:NAME`, or the name of a backbone of the paper; `weights` is None for the
    pretrained ones, a checkpoint, or `"random"`.
    """
    name = model_name(spec)
    settings = _settings(name, size)
    if weights is None:
        return _pretrained(spec, name, settings)
    model = _untrained(name, settings)
    if spec == "sdl_resnet18":
        _change_stem(model)
    if weights != RANDOM:
        load_exactly(model, to_timm(read_tensors(weights), model), spec, str(weights))
    return model


def model_name(spec: str) -> str:
    """Return the name in timm of a specification or of a named backbone."""
    known = PAPER.get(spec)
    return known.model if known else NAMED.get(spec, spec).removeprefix(SCHEME)


def usual_size(name: str) -> int | None:
    """Return the default input size of a ViT; None for other models, which use their own."""
    import timm

    patch = _PATCH.search(name)
    if patch is None or "swin" in name or not timm.is_model(name.partition(".")[0]):
        return None
    try:
        config = timm.get_pretrained_cfg(name)
    except RuntimeError:  # an unknown tag, which `build` reports
        return None
    if config is None or not config.fixed_input_size:
        return None
    return near_usual_size(int(config.input_size[1]), int(patch[1]))


def _settings(name: str, size: int | None) -> dict[str, Any]:
    """Check the name; return the options for an input size that is not the model's own."""
    import timm

    architecture = name.partition(".")[0]
    if not timm.is_model(architecture):
        near = difflib.get_close_matches(architecture, timm.list_models(), n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "see `timm.list_models()`."
        raise InputError(f"timm has no model {architecture!r}: {hint}")
    try:
        config = timm.get_pretrained_cfg(name)
    except RuntimeError:
        tags = [each.partition(".")[2] for each in timm.list_pretrained(f"{architecture}.*")]
        raise InputError(
            f"timm has no weights {name!r}: known for {architecture} are {', '.join(tags)}."
        ) from None
    patch = _PATCH.search(name)
    if size is not None and patch and size < int(patch[1]):
        raise InputError(
            f"image_size={size} (--image-size) is smaller than a patch of {name}: it must be at "
            f"least {patch[1]}, better a multiple of it."
        )
    usual = config.input_size[1] if config else None
    fixed = config is not None and config.fixed_input_size
    return {"img_size": size} if fixed and size not in (None, usual) else {}


def _pretrained(spec: str, name: str, settings: dict[str, Any]) -> nn.Module:
    """Build the model with weights from timm's cache or its hub."""
    import timm

    known = PAPER.get(spec)
    if known is not None and not known.on_hub:
        raise _missing(spec, "they are not on timm's hub")
    cached = _cached(name)
    if cached is None and not hub.resolves():
        raise _missing(spec, f"not in {hub.cache_folder()}, and the hub cannot be reached")
    try:
        model: nn.Module = timm.create_model(
            name, pretrained=True, pretrained_cfg_overlay={"file": cached}, **settings
        )
    except (OSError, RuntimeError, ValueError) as error:
        reason = reason_of(error)
        raise _missing(spec, f"not in {hub.cache_folder()}, nor from the hub: {reason}") from error
    model.reset_classifier(0)  # type: ignore[operator]  # timm's models have it
    return model


def _missing(spec: str, reason: str) -> NotAvailableError:
    known = PAPER.get(spec)
    origin = f", such as {known.origin}" if known else ""
    fetch = f"run `miv backbones download {spec}`, or give" if spec in NAMED else "give"
    return NotAvailableError(
        f"The weights of {spec} are missing ({reason}): {fetch} a checkpoint{origin}, with "
        'weights="FILE" in Python or --weights FILE on the command line (in a benchmark also '
        f"--weights {spec}=FILE); FILE is a .safetensors or .pth file."
    )


def _cached(name: str) -> str | None:
    """Find weights that were downloaded before, which needs no network."""
    import timm

    config = timm.get_pretrained_cfg(name)
    if config is None or not config.hf_hub_id or config.custom_load:
        return None
    found = hub.find(config.hf_hub_id, config.hf_hub_filename or "model.safetensors")
    return None if found is None else str(found)


def _untrained(name: str, settings: dict[str, Any]) -> nn.Module:
    """Build the model with reproducible random weights."""
    import timm

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = timm.create_model(name, pretrained=False, num_classes=0, **settings)
    return model


def _change_stem(model: nn.Module) -> None:
    """Replace the stem by that of SDL-ResNet-18: 5x5, no pooling (84 px give 41, 21, 11, 6)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model.conv1 = nn.Conv2d(3, 64, kernel_size=5, stride=2, padding=1, bias=False)
    model.maxpool = nn.Identity()


# Checkpoints of other projects. torchvision's ResNets, DINO and DeiT already use timm's names, timm
# itself converts original Swin checkpoints (SimMIM's), and CLIP of the Hugging Face hub is renamed
# here, as timm converts only OpenAI's and OpenCLIP's files.

_CLIP = "vision_model."
_CLIP_NAMES = {
    "embeddings.patch_embedding": "patch_embed.proj",
    "pre_layrnorm": "norm_pre",
    "post_layernorm": "norm",
    "encoder.layers": "blocks",
    "self_attn.out_proj": "attn.proj",
    "layer_norm1": "norm1",
    "layer_norm2": "norm2",
}


def to_timm(tensors: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Rename the tensors of a checkpoint for a model of timm, and drop its classifier."""
    if f"{_CLIP}embeddings.class_embedding" in tensors:
        return _clip(tensors)
    renamed = _without_classifier(tensors, model)
    expected = model.state_dict()
    same = renamed.keys() == expected.keys()
    # Position embeddings of another input size are resampled.
    if not same or any(renamed[name].shape != expected[name].shape for name in expected):
        convert: Any = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
        if convert is not None:
            renamed = _without_classifier(convert(dict(renamed), model), model)
    return renamed


def _without_classifier(tensors: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Drop the tensors of the classifier, which the model does not have."""
    config: dict[str, Any] = model.pretrained_cfg  # type: ignore[assignment]  # timm's own
    named = config.get("classifier") or ()
    heads = ((named,) if isinstance(named, str) else tuple(named)) + ("fc", "head", "cls_fn")
    expected = model.state_dict()
    return {
        name: tensor
        for name, tensor in tensors.items()
        if name in expected or not name.startswith(tuple(f"{head}." for head in heads))
    }


def _clip(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the vision tower of transformers' CLIP; merge query, key and value into one layer."""
    tower = {k.removeprefix(_CLIP): v for k, v in tensors.items() if k.startswith(_CLIP)}
    tower.pop("embeddings.position_ids", None)  # 0, 1, 2, ...
    renamed = {
        "cls_token": tower.pop("embeddings.class_embedding").reshape(1, 1, -1),  # (1, 1, C)
        "pos_embed": tower.pop("embeddings.position_embedding.weight").unsqueeze(0),  # (1, P, C)
    }
    for name, tensor in tower.items():
        for old, new in _CLIP_NAMES.items():
            name = name.replace(old, new)
        if match := re.fullmatch(r"(blocks\.\d+\.)self_attn\.q_proj\.(weight|bias)", name):
            block, kind = match.groups()
            layer = f"encoder.layers.{block.removeprefix('blocks.')}self_attn"
            parts = [tower[f"{layer}.{part}_proj.{kind}"] for part in "qkv"]
            renamed[f"{block}attn.qkv.{kind}"] = torch.cat(parts)  # (3C, C) or (3C)
        elif ".self_attn." not in name:
            renamed[name] = tensor
    return renamed
