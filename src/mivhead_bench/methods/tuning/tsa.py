"""TSA: task-specific adapters, parallel to the 3x3 convolutions of a ResNet.

A residual 1x1 convolution `alpha` with the stride of its 3x3 convolution adds to the centre of the
kernel, so the two are one convolution: W + centre(alpha). A BatchNorm that follows, in evaluation
mode, is a scale and a shift of its output, folded in too: the adapted network costs what the plain
one does, and each convolution leaves one tensor less behind for the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch.optim import Adadelta, Optimizer

from mivhead.errors import InputError
from mivhead_bench.methods.tuning.base import TuningClassifier
from mivhead_bench.methods.tuning.network import Network, Pixels

LAYERS = ("layer1", "layer2", "layer3", "layer4")
START = 1e-4  # alpha is this times the identity
BETA = "beta"


@dataclass(kw_only=True, eq=False, repr=False)
class TSA(TuningClassifier):
    """Adapters parallel to the 3x3 convolutions of a ResNet.

    A linear map of the pooled features is trained as well.
    """

    paper: ClassVar = (
        "Li et al. 2022, Cross-domain Few-shot Learning with Task-specific Adapters, "
        "arXiv 2107.00358"
    )
    optimiser: ClassVar = "Adadelta"

    steps: int = 40
    learning_rate: float = 0.5  # of the adapters
    map_rate: float = 1.0  # of the linear map
    rho: float = 0.9

    def check(self, network: Network) -> None:
        """Raise an error unless this is a ResNet of plain 3x3 convolutions."""
        places = _places(network.model)
        if not places:
            raise InputError(
                f"tsa adapts the 3x3 convolutions of a ResNet; {network.name} has none in layer1 "
                "to layer4."
            )
        for name, conv in places.items():
            if conv.groups > 1 or conv.padding != conv.dilation:
                raise InputError(
                    f"tsa adapts plain 3x3 convolutions; {network.name} has another one at {name}."
                )

    def _attach(
        self, network: Network, _pixels: Pixels, _labels: Tensor
    ) -> Mapping[str, nn.Parameter]:
        scales = _fold(network)
        adapters = {}
        for name, conv in _places(network.model).items():
            adapted = AdaptedConv(conv, scales.get(name))
            network.model.set_submodule(name, adapted)
            adapters[f"{name}.alpha"] = adapted.alpha
        return {**adapters, BETA: network.map_features()}

    def _optimiser(self, parameters: Mapping[str, nn.Parameter]) -> Optimizer:
        groups: list[dict[str, Any]] = [
            {"params": [parameter], "lr": self.map_rate if name == BETA else self.learning_rate}
            for name, parameter in parameters.items()
        ]
        return Adadelta(groups, rho=self.rho)


class AdaptedConv(nn.Module):
    """A frozen 3x3 convolution with a trained 1x1 one added, computed as one convolution.

    If a BatchNorm is folded into it, `scale` is its factor per output channel, which the adapter's
    output is subject to, too.
    """

    scale: Tensor

    def __init__(self, conv: nn.Conv2d, scale: Tensor | None = None) -> None:
        super().__init__()
        self.conv = conv
        one = conv.weight.new_ones(conv.out_channels)
        self.register_buffer("scale", (one if scale is None else scale)[:, None])  # (out, 1)
        start = START * torch.eye(conv.out_channels, conv.in_channels)
        self.alpha = nn.Parameter(start.to(conv.weight))  # (out, in)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve a map (n, in, H, W)."""
        result: Tensor = _Adapted.apply(x, self.scale * self.alpha, self.conv)
        return result


class _Adapted(torch.autograd.Function):
    """The adapted convolution, without the gradient of the frozen kernel.

    That gradient would cost nine times as much as the gradient of alpha.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: Tensor, conv: nn.Conv2d) -> Tensor:
        kernel = conv.weight.clone()
        kernel[:, :, 1, 1] += alpha
        ctx.save_for_backward(x, kernel)
        ctx.conv = conv
        return F.conv2d(x, kernel, conv.bias, conv.stride, conv.padding, conv.dilation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, kernel = ctx.saved_tensors
        conv: nn.Conv2d = ctx.conv
        of_input, of_alpha = None, None
        if ctx.needs_input_grad[0]:
            settings = (conv.stride, conv.padding, conv.dilation, False, (0, 0), 1)
            wanted = (True, False, False)
            of_input, *_ = torch.ops.aten.convolution_backward(
                grad, x, kernel, None, *settings, wanted
            )
        if ctx.needs_input_grad[1]:
            seen = x[:, :, :: conv.stride[0], :: conv.stride[1]]  # under the kernel's centre
            of_alpha = _rows(grad).T @ _rows(seen)  # (out, in)
        return of_input, of_alpha, None


def _rows(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1).flatten(0, 2)  # (n * H * W, C)


def _places(model: nn.Module) -> dict[str, nn.Conv2d]:
    """Find the 3x3 convolutions of layer1 to layer4, which must be siblings, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv2d)
        and module.kernel_size == (3, 3)
        and any(name.startswith(layer) for layer in _layers(model))
    }


def _layers(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        if set(LAYERS) <= {child for child, _ in module.named_children()}:
            yield from (f"{name}.{layer}.".lstrip(".") for layer in LAYERS)


def _fold(network: Network) -> dict[str, Tensor]:
    """Fold BatchNorms into the convolutions before them; return their factors, by name.

    Modules are usually listed in the order in which they run. Where they are not, one image shows
    it, and everything stays as it was.
    """
    children = {
        (f"{name}." if name else "", module): list(module.named_children())
        for name, module in network.model.named_modules()
    }
    noise = torch.randn(network.blank().shape, generator=torch.Generator().manual_seed(0))
    image = noise.to(network.device)
    with torch.no_grad():
        before = network(image)
    scales: dict[str, Tensor] = {}
    originals: dict[str, nn.Module] = {}
    for (prefix, _), named in children.items():
        for (first, conv), (second, norm) in pairwise(named):
            if isinstance(conv, nn.Conv2d) and type(norm) is nn.BatchNorm2d and _is_fixed(norm):
                originals[prefix + first], originals[prefix + second] = conv, norm
                scales[prefix + first] = _scale(norm)
                network.model.set_submodule(prefix + first, fuse_conv_bn_eval(conv, norm))
                network.model.set_submodule(prefix + second, nn.Identity())
    with torch.no_grad():
        after = network(image)
    if torch.allclose(before, after, rtol=1e-2, atol=1e-3 * float(before.abs().max())):
        return scales
    for name, module in originals.items():
        network.model.set_submodule(name, module)
    return {}


def _is_fixed(norm: nn.BatchNorm2d) -> bool:
    return norm.running_mean is not None and norm.running_var is not None


def _scale(norm: nn.BatchNorm2d) -> Tensor:
    deviation = torch.sqrt(torch.as_tensor(norm.running_var) + norm.eps)
    return (norm.weight.detach() if norm.affine else 1.0) / deviation  # (channel,)
