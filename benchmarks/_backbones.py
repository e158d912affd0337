"""The backbones that measurements are made on, and what can be tapped in each.

EfficientNet-Lite0, Lite1 and Lite2 have the weights that pip packages carry. ResNet-50 has those of
a file that the user gives: a network trained with Keras, in torchvision's names. It is the "v1"
network, with its strides in the first convolution of a stage, and has a preprocessing of its own,
so that neither torchvision nor timm builds it as it is.
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
from mivhead.backbones.fast import fold_batchnorm
from mivhead.backbones.presets import PRESETS

RANDOM = "random"


@dataclass(frozen=True)
class Subject:
    """A backbone under measurement; every worker loads its own.

    Parameters
    ----------
    name
        What it is called in result files.
    channels
        What can be tapped, in the order in which the model runs: name to channels.
    sides
        The side of each map.
    plain
        The tap whose average is the feature of the plain heads.
    preprocessing
        How images are prepared.
    load
        Loads it with a preset.
    """

    name: str
    channels: Mapping[str, int]
    sides: Mapping[str, int]
    plain: str
    preprocessing: Preprocessing
    load: Callable[[Preset], Backbone]

    def shape(self, tap: str) -> str:
        """Shape of a tap's map, such as 1280x7x7."""
        return "x".join(str(n) for n in (self.channels[tap], self.sides[tap], self.sides[tap]))


def efficientnet_lite(name: str = "efficientnet_lite0") -> Subject:
    """EfficientNet-Lite0, Lite1 or Lite2: equal widths, other sizes and depths."""
    preprocessing = PRESETS[name].preprocessing
    # Every stride of 2 rounds the side up: 224 px become 28, 14, 7 and 260 px become 33, 17, 9.
    eighth, sixteenth, last = (-(-preprocessing.size // stride) for stride in (8, 16, 32))
    channels = {"blocks.2": 40, "blocks.3.0.bn1": 240, "blocks.4.0.bn1": 480}
    channels |= {"blocks.4.2.bn2": 672, "blocks.4": 112, "blocks.5.0.bn1": 672, "blocks.5": 192}
    channels |= {"blocks.6.0.bn2": 1152, "blocks.6": 320, "bn2": 1280}
    sides = dict.fromkeys(channels, last)
    sides |= dict.fromkeys(("blocks.2", "blocks.3.0.bn1"), eighth)
    sides |= dict.fromkeys(
        ("blocks.4.0.bn1", "blocks.4.2.bn2", "blocks.4", "blocks.5.0.bn1"), sixteenth
    )
    return Subject(name, channels, sides, "bn2", preprocessing, partial(_load_lite, name))


def _load_lite(name: str, preset: Preset) -> Backbone:
    return load_backbone(name, preset=preset)


def keras_resnet50(weights: Path) -> Subject:
    """ResNet-50 with the weights of a file, or untrained ones if it is called "random"."""
    random = str(weights) == RANDOM
    name = "resnet50 (random weights)" if random else "resnet50"
    preprocessing = Preprocessing(
        224,
        mean=(123.68 / 255, 116.779 / 255, 103.939 / 255),
        std=(1 / 255, 1 / 255, 1 / 255),
    )
    channels = {"layer2": 512, "layer3": 1024, "layer4": 2048}
    sides = {"layer2": 28, "layer3": 14, "layer4": 7}
    load = partial(_load_resnet50, name, None if random else weights)
    return Subject(name, channels, sides, "layer4", preprocessing, load)


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
