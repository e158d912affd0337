"""Making a frozen convolutional network quick on a CPU without changing what it computes."""

from __future__ import annotations

from itertools import pairwise

from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval


def fold_batchnorm(model: nn.Module) -> None:
    """Fold every BatchNorm into the convolution that stands right before it, in place.

    The normalisation's module is replaced by its activation (timm's `BatchNormAct2d` has one) or
    by nothing, under the same name: a tap on it keeps its meaning. For models whose modules are
    listed in the order in which they run, such as timm's EfficientNets.
    """
    for parent in list(model.modules()):
        children = list(parent.named_children())
        for (conv_name, conv), (norm_name, norm) in pairwise(children):
            if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
                setattr(parent, conv_name, fuse_conv_bn_eval(conv, norm))
                setattr(parent, norm_name, getattr(norm, "act", nn.Identity()))
