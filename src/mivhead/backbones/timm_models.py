"""Any model of timm, and the backbones of the paper, which use timm's architectures.

Taps are the names in the model's `feature_info`, such as `layer4` or `blocks.11`, read with
`forward_intermediates`: CNNs give maps, ViTs give maps and [CLS] with the final norm applied to
every block. The tap `pooled`, after all others, is the vector that the model's own classifier would
see. Names of other submodules work as well; their outputs are used unchanged.
"""

from __future__ import annotations

import difflib
import inspect
import re
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mivhead._util.imports import need
from mivhead.backbones import hub
from mivhead.backbones.base import Parts, check_taps, default_device
from mivhead.backbones.module import ModuleBackbone, Tapped, freeze, hooked, suggest_blocks
from mivhead.backbones.preset import (
    POOLED,
    Preprocessing,
    Preset,
    as_vit,
    near_usual_size,
    spread_taps,
)
from mivhead.backbones.presets import NAMED, PAPER
from mivhead.errors import InputError, NotAvailableError, check_file, reason_of

RANDOM = "random"
SCHEME = "timm:"
_PATCH = re.compile(r"patch(\d+)")  # in the names of ViTs
_CLASSIFIERS = ("fc.", "head", "classifier.", "last_linear.", "cls_fn.")  # in checkpoints


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
    need("timm")
    device = default_device(device)
    known, name = PAPER.get(spec), model_name(spec)
    if known is not None:
        preset = preset or known.preset
    if preset is None:
        image_size = image_size or _usual_size(name, _config(name))
    model = build(spec, weights, preset.preprocessing.size if preset else image_size)
    freeze(model, device)
    preset = preset or _suggest(spec, model, device, image_size)
    if not _are_stages(model, preset.taps):  # the name of a stage is not always that of a module
        check_taps(spec, preset.taps, [name for name, _ in model.named_modules() if name])
    return ModuleBackbone(
        f"{spec} (random weights)" if weights == RANDOM else spec,
        model,
        preset,
        device=device,
        dtype=dtype,
        tapping=partial(_tapped, normed=known is None or known.normed),
    )


def model_name(spec: str) -> str:
    """Return the name in timm of a specification or of a named backbone."""
    known = PAPER.get(spec)
    return known.model if known else NAMED.get(spec, spec).removeprefix(SCHEME)


def feature_names(model: nn.Module) -> list[str]:
    """Return the names of the stages or blocks, in the order of `forward_intermediates`."""
    return [str(info["module"]) for info in getattr(model, "feature_info", ())]


def _are_stages(model: nn.Module, taps: Sequence[str]) -> bool:
    """Return whether `forward_intermediates` gives all taps."""
    return hasattr(model, "forward_intermediates") and {*taps} <= {*feature_names(model), POOLED}


def _tapped(model: nn.Module, taps: Sequence[str], *, normed: bool) -> Tapped:
    if not _are_stages(model, taps):
        return hooked(model, taps)
    names = feature_names(model)
    indices = [names.index(tap) for tap in taps if tap != POOLED]
    return intermediates(model, indices, normed=normed, pooled=POOLED in taps)


def intermediates(
    model: Any, indices: list[int], *, normed: bool = True, pooled: bool = False
) -> Tapped:
    """Return a function that runs a model up to the deepest of some stages and returns their parts.

    With `normed` the final norm is applied to every block of a ViT, otherwise to none.
    """
    settings: dict[str, Any] = {
        "indices": indices or 1,  # the last one, if only the pooled vector is wanted
        "norm": normed,
        "stop_early": not pooled,
        "output_fmt": "NCHW",
        "intermediates_only": not pooled,
    }
    # Some ViTs without prefix tokens fail if they are asked for them.
    if has_tokens(model) and getattr(model, "num_prefix_tokens", True):
        settings["return_prefix_tokens"] = True
    with_token = has_class_token(model)

    def read(output: Any) -> Parts:
        if not isinstance(output, tuple):
            return {"map": output}
        patches, prefix = output  # [CLS] comes first, then registers
        return {"map": patches, "token": prefix[:, 0]} if with_token else {"map": patches}

    def run(x: Tensor) -> list[Parts]:
        if not pooled:
            return [read(output) for output in model.forward_intermediates(x, **settings)]
        final, outputs = model.forward_intermediates(x, **settings)
        vector = model.forward_head(final, pre_logits=True)
        return [*map(read, outputs[: len(indices)]), {"token": vector}]

    return run


def has_tokens(model: nn.Module) -> bool:
    """Return whether the model is a ViT: blocks of one size, possibly with prefix tokens."""
    forward: Any = getattr(model, "forward_intermediates", None)
    return forward is not None and "return_prefix_tokens" in inspect.signature(forward).parameters


def has_class_token(model: nn.Module) -> bool:
    """Return whether the first prefix token is [CLS], and not a register."""
    known: bool | None = getattr(model, "has_class_token", None)
    return getattr(model, "cls_token", None) is not None if known is None else known


def _usual_size(name: str, config: Any) -> int | None:
    """Return the default input size of a ViT; None for other models, which use their own."""
    patch = _PATCH.search(name)
    if patch is None or "swin" in name or config is None or not config.fixed_input_size:
        return None
    return near_usual_size(int(config.input_size[1]), int(patch[1]))


def _suggest(spec: str, model: nn.Module, device: torch.device, size: int | None) -> Preset:
    config: dict[str, Any] = model.pretrained_cfg  # type: ignore[assignment]  # timm's own
    size = size or int(config["input_size"][1])
    names = feature_names(model)
    if len({*names[-2:]}) < 2:
        raise InputError(f"{spec} does not list its stages by name: give a preset with taps.")
    swin = "swin_transformer" in type(model).__module__
    if swin:  # the last stage after patch merging, and after the final norm
        taps: tuple[str, ...] = (f"{names[-1]}.downsample", "norm")
    else:
        taps = spread_taps(names) if has_tokens(model) else tuple(names[-2:])
    try:
        blocks = suggest_blocks(_tapped(model, taps, normed=True), size, device)
    except Exception as error:  # whatever an architecture that we have never seen raises
        reason = reason_of(error)
        raise InputError(f"{spec} cannot be tapped ({reason}): give a preset with taps.") from error
    if has_tokens(model) or swin:
        blocks = as_vit(blocks)
    return Preset(taps, blocks, Preprocessing(size, tuple(config["mean"]), tuple(config["std"])))


def build(spec: str, weights: str | Path | None, size: int | None = None) -> nn.Module:
    """Build a network without its classifier, with pretrained, random or a checkpoint's weights."""
    import timm

    name = model_name(spec)
    config, patch = _config(name), _PATCH.search(name)
    if size is not None and patch and size < int(patch[1]):
        raise InputError(f"image_size={size} is smaller than a patch of {name}.")
    settings: dict[str, Any] = {"num_classes": 0}
    if config is not None and config.fixed_input_size and size not in (None, config.input_size[1]):
        settings["img_size"] = size
    if weights is None:
        return _pretrained(spec, name, settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = timm.create_model(name, pretrained=False, **settings)
        if spec == "sdl_resnet18":  # its stem is 5x5, without pooling (84 px give 41, 21, 11, 6)
            model.conv1 = nn.Conv2d(3, 64, kernel_size=5, stride=2, padding=1, bias=False)
            model.maxpool = nn.Identity()
    if weights != RANDOM:
        try:
            model.load_state_dict(to_timm(read_tensors(weights), model), strict=True)
        except RuntimeError as error:  # a tensor is missing, unexpected or misshapen
            reason = " ".join(str(error).split())[:300]
            raise InputError(f"{weights} is not a checkpoint of {spec}: {reason}.") from error
    return model


def _config(name: str) -> Any:
    """Return timm's facts about a model, or None if it has none; check the name."""
    import timm

    architecture = name.partition(".")[0]
    if not timm.is_model(architecture):
        near = difflib.get_close_matches(architecture, timm.list_models(), n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "see `timm.list_models()`."
        raise InputError(f"timm has no model {architecture!r}: {hint}")
    try:
        return timm.get_pretrained_cfg(name)
    except RuntimeError:
        tags = ", ".join(timm.list_pretrained(f"{architecture}.*"))
        raise InputError(f"timm has no weights {name!r}: it has {tags}.") from None


def _pretrained(spec: str, name: str, settings: dict[str, Any]) -> nn.Module:
    """Build the model with weights from the hub's cache or the hub."""
    import timm

    known = PAPER.get(spec)
    try:
        if known is not None and not known.on_hub:
            raise NotAvailableError("they are not on timm's hub")
        repository, file = hub_file(name)
        overlay = {"file": str(hub.fetch(repository, file))} if repository else {}
        settings |= {"pretrained": True, "pretrained_cfg_overlay": overlay}
        model: nn.Module = timm.create_model(name, **settings)
        return model
    except (OSError, RuntimeError, ValueError) as error:
        origin = f", such as {known.origin}" if known and known.origin else ""
        raise NotAvailableError(
            f"The weights of {spec} are missing ({reason_of(error)}): give a checkpoint{origin}, "
            'as weights="FILE" or --weights FILE.'
        ) from error


def hub_file(name: str) -> tuple[str, str]:
    """Return the repository of a model's weights and the file in it; empty if it has none."""
    config = need("timm").get_pretrained_cfg(name)
    if config is None or not config.hf_hub_id or config.custom_load:
        return "", ""
    return config.hf_hub_id, config.hf_hub_filename or "model.safetensors"


def read_tensors(path: str | Path) -> dict[str, Tensor]:
    """Read the tensors of a `.safetensors` file or a PyTorch checkpoint, without running code."""
    from timm.models import load_state_dict

    # NumPy scalars, which training code often stores as well, under an old name, too
    make_number: Any = np.float64(0).__reduce__()[0]
    kinds: list[Any] = [np.dtype, *(type(np.dtype(kind)) for kind in ("f4", "f8", "i8"))]
    allowed = [make_number, (make_number, "numpy.core.multiarray.scalar"), *kinds]
    check_file(path)
    try:
        with torch.serialization.safe_globals(allowed):
            state = load_state_dict(str(path), use_ema=False, weights_only=True)
    except Exception as error:  # what the readers raise for files that hold anything else
        reason = reason_of(error)
        raise InputError(f"{path} is not a checkpoint of plain tensors: {reason}.") from error
    return {str(name): tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}


def to_timm(tensors: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Rename the tensors of a checkpoint for a model of timm, and drop its classifier.

    torchvision's ResNets, DINO and DeiT already use timm's names; timm itself converts others, such
    as original Swin checkpoints (SimMIM's), and resamples position embeddings of another size.
    """
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}

    def bare(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {k: v for k, v in tensors.items() if k in expected or not k.startswith(_CLASSIFIERS)}

    renamed = bare(tensors)
    convert: Any = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    if convert is not None and {k: v.shape for k, v in renamed.items()} != expected:
        renamed = bare(convert(renamed, model))
    return renamed
