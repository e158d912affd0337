"""The backbones that measurements use, and the layers that can be tapped in each.

EfficientNet-Lite0, Lite1 and Lite2 have the weights that pip packages contain. ResNet-50 has the
weights of a file that the user gives: a network trained with Keras, in torchvision's names. It is
the "v1" network, with strides in the first convolution of a stage and its own preprocessing, which
neither torchvision nor timm builds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from mivhead import Preprocessing, Preset
from mivhead.backbones import from_module, load_backbone
from mivhead.backbones.base import Backbone
from mivhead.backbones.checkpoints import load_exactly, read_tensors
from mivhead.backbones.efficientnet_lite_network import fold_batchnorm
from mivhead.backbones.presets import PRESETS

RANDOM = "random"


@dataclass(frozen=True)
class Subject:
    """A backbone under measurement.

    Parameters
    ----------
    name
        Its name in result files.
    shapes
        The layers that can be tapped, in the order of execution: name to channels and side.
    preprocessing
        How images are prepared.
    load
        Loads it with a preset.
    """

    name: str
    shapes: Mapping[str, tuple[int, int]]
    preprocessing: Preprocessing
    load: Callable[[Preset], Backbone]


def efficientnet_lite(name: str = "efficientnet_lite0") -> Subject:
    """EfficientNet-Lite0, Lite1 (deeper, 240 px) or Lite2 (deeper, wider, 260 px)."""
    preprocessing = PRESETS[name].preprocessing
    # Every stride of 2 rounds the side up: 224 px become 28, 14, 7 and 260 px become 33, 17, 9.
    eighth, sixteenth, last = (-(-preprocessing.size // stride) for stride in (8, 16, 32))
    stages = (48, 88, 120, 208, 352) if name == "efficientnet_lite2" else (40, 80, 112, 192, 320)
    two, three, four, five, six = stages  # channels; a block expands its input to six times as many
    shapes = {
        "blocks.2": (two, eighth),
        "blocks.3.0.bn1": (6 * two, eighth),
        "blocks.4.0.bn1": (6 * three, sixteenth),
        "blocks.4.2.bn2": (6 * four, sixteenth),
        "blocks.4": (four, sixteenth),
        "blocks.5.0.bn1": (6 * four, sixteenth),
        "blocks.5": (five, last),
        "blocks.6.0.bn2": (6 * five, last),
        "blocks.6": (six, last),
        "bn2": (1280, last),
    }
    return Subject(name, shapes, preprocessing, partial(_load_lite, name))


def _load_lite(name: str, preset: Preset) -> Backbone:
    return load_backbone(name, preset=preset)


def keras_resnet50(weights: Path) -> Subject:
    """ResNet-50 with the weights of a file, or untrained if the file is named "random"."""
    random = str(weights) == RANDOM
    name = "resnet50 (random weights)" if random else "resnet50"
    preprocessing = Preprocessing(
        224,
        mean=(123.68 / 255, 116.779 / 255, 103.939 / 255),
        std=(1 / 255, 1 / 255, 1 / 255),
    )
    shapes = {"layer2": (512, 28), "layer3": (1024, 14), "layer4": (2048, 7)}
    load = partial(_load_resnet50, name, None if random else weights)
    return Subject(name, shapes, preprocessing, load)


def _load_resnet50(name: str, weights: Path | None, preset: Preset) -> Backbone:
    model = build_resnet50(weights)
    fold_batchnorm(model)  # the same maps, faster
    return from_module(
        model,
        preset.taps,
        name=name,
        preprocessing=preset.preprocessing,
        blocks=preset.blocks,
    )


def build_resnet50(weights: Path | None) -> nn.Module:
    """Build the whole classifier as it was trained; None for untrained weights."""
    from torchvision.models import resnet50

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = resnet50(weights=None)
    for stage in ("layer2", "layer3", "layer4"):
        first = model.get_submodule(f"{stage}.0")
        first.conv1.stride, first.conv2.stride = (2, 2), (1, 1)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eps = 1e-3
    if weights is not None:
        tensors = {key: tensor.float() for key, tensor in read_tensors(weights).items()}
        load_exactly(model, tensors, "resnet50", str(weights))
    return model.eval()
