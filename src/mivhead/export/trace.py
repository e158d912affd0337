"""PyTorch modules as ONNX graphs."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mivhead._util.imports import need
from mivhead.backbones.module import ModuleBackbone

OPSET = 18


def module_graph(backbone: ModuleBackbone) -> Any:
    """Return the ONNX model of a PyTorch backbone, whose outputs are named `block{i}.map|token`.

    It takes a normalised batch (n, 3, R, R) of any number of images.
    """
    import onnx

    need("onnxscript")
    size = backbone.preset.preprocessing.size
    device = next(backbone.model.parameters()).device
    images = torch.zeros(2, 3, size, size, device=device)
    with torch.no_grad():
        blocks = backbone.run(images)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own deprecations
        file = Path(folder, "model.onnx")
        torch.onnx.export(
            _Flat(backbone),
            (images,),
            file,
            input_names=["images"],
            output_names=[f"block{i}.{part}" for i, parts in enumerate(blocks) for part in parts],
            opset_version=OPSET,
            dynamo=True,
            dynamic_shapes=({0: torch.export.Dim("n", min=1, max=2**16)},),
            external_data=False,
            verbose=False,
        )
        return onnx.load(file)


class _Flat(nn.Module):
    """Returns the parts of all blocks as one flat tuple, as an ONNX graph needs them."""

    def __init__(self, backbone: ModuleBackbone) -> None:
        super().__init__()
        self.model, self._run = backbone.model, backbone.run

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        return tuple(part for parts in self._run(images) for part in parts.values())
