"""Export backbones as ONNX files, which onnxruntime runs without PyTorch."""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mivhead._util.files import replacing
from mivhead._util.onnx_check import EXTRA
from mivhead._util.optional import need
from mivhead.backbones import load_backbone
from mivhead.backbones.base import Backbone, LazyBackbone
from mivhead.backbones.efficientnet_lite import WEIGHTS
from mivhead.backbones.module import ModuleBackbone
from mivhead.backbones.onnx_model import (
    OnnxBackbone,
    add_outputs,
    parse_graph,
    read_graph,
    read_metadata,
    write_graph,
    write_metadata,
)
from mivhead.backbones.preset import Preprocessing, Preset
from mivhead.errors import InputError
from mivhead.features import Features

OPSET = 18


def export_onnx(
    spec: str,
    path: str | Path,
    *,
    weights: str | Path | None = None,
    preset: Preset | None = None,
) -> float:
    """Export a PyTorch backbone to an ONNX file with its taps as outputs.

    The preprocessing, the preset and the hash of the weights are stored in the metadata, so that
    `load_backbone(path)` needs no options. The batch size is dynamic. Returns the largest
    difference between the features of the two on random images, relative to the largest feature (or
    to 1, if that is larger).
    """
    for package in ("onnx", "onnxscript", "onnxruntime"):  # fail before the work, not after it
        need(package, EXTRA)
    backbone = load_backbone(spec, weights=weights, preset=preset, device="cpu", dtype="float32")
    if isinstance(backbone, LazyBackbone):
        backbone = backbone.loaded()
    if isinstance(backbone, ModuleBackbone):
        model = module_graph(backbone)
    elif isinstance(backbone, OnnxBackbone) and spec in WEIGHTS:
        model = parse_graph(backbone.content(), spec)
    else:
        raise InputError(f"{spec} is not a PyTorch model: only PyTorch models can be exported.")
    write_metadata(model, backbone.preset, backbone.identity.name, backbone.identity.weights)
    write_graph(model, path)
    return _difference(backbone, load_backbone(path, device="cpu", dtype="float32"))


def module_graph(backbone: ModuleBackbone) -> Any:
    """Return the ONNX model of a PyTorch backbone, whose outputs are named `block{i}.map|token`."""
    size = backbone.preset.preprocessing.size
    with torch.no_grad():
        blocks = backbone.run(torch.zeros(1, 3, size, size))
    names = [f"block{i}.{part}" for i, parts in enumerate(blocks) for part in parts]
    return trace(_Flat(backbone), size, names)


def trace(module: nn.Module, size: int, outputs: Sequence[str]) -> Any:
    """Export a module that takes a normalised batch (n, 3, R, R) of any number of images."""
    need("onnxscript", EXTRA)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own deprecations
        file = Path(folder, "model.onnx")
        torch.onnx.export(
            module,
            (torch.zeros(2, 3, size, size),),
            file,
            input_names=["images"],
            output_names=list(outputs),
            opset_version=OPSET,
            dynamo=True,
            dynamic_shapes=({0: torch.export.Dim("n", min=1, max=2**16)},),
            external_data=False,
            verbose=False,
        )
        model, _ = read_graph(file)
    return model


def tap_onnx(
    source: str | Path,
    path: str | Path,
    outputs: Sequence[str],
    *,
    preprocessing: Preprocessing | None = None,
) -> Backbone:
    """Copy an ONNX file, storing taps and preprocessing in the copy, and load that.

    `outputs` are tensors to tap, shallow to deep, as listed by `miv backbones inspect`; the
    preprocessing is by default the file's own, or ImageNet's.
    """
    backbone = load_backbone(source, outputs=outputs, preprocessing=preprocessing, device="cpu")
    model, _ = read_graph(source)
    add_outputs(model, outputs, source)
    write_metadata(model, backbone.preset, backbone.identity.name, backbone.identity.weights)
    write_graph(model, path)
    return load_backbone(path, device="cpu")


def describe_folder(folder: Path) -> None:
    """Write the settings that belong to `onnx/model.onnx`, in the layout of transformers.js."""
    model, _ = read_graph(folder / "onnx" / "model.onnx")
    preset = read_metadata(model, folder)
    assert preset is not None, "an exported file describes itself"
    preprocessing = preset.preprocessing
    side = {"height": preprocessing.size, "width": preprocessing.size}
    config = {"model_type": "mivhead", "taps": list(preset.taps)}
    processor = {
        "do_resize": True,
        "size": side,
        "resample": 3,  # bicubic
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(preprocessing.mean),
        "image_std": list(preprocessing.std),
    }
    for name, document in (("config.json", config), ("preprocessor_config.json", processor)):
        with replacing(folder / name) as part:
            part.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


class _Flat(nn.Module):
    """Returns the parts of all blocks as one flat tuple, as an ONNX graph needs them."""

    def __init__(self, backbone: ModuleBackbone) -> None:
        super().__init__()
        self.model = backbone.model
        self._run = backbone.run

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Return every part for a batch `(n, 3, R, R)`."""
        return tuple(part for parts in self._run(images) for part in parts.values())


def _difference(first: Backbone, second: Backbone) -> float:
    rng = np.random.default_rng(0)
    images = list(rng.integers(0, 256, (3, 64, 64, 3), dtype=np.uint8))
    mine, theirs = first.extract(images), second.extract(images)
    return max(_relative(mine, theirs))


def _relative(mine: Features, theirs: Features) -> list[float]:
    pairs = zip(mine.tensors.values(), theirs.tensors.values(), strict=True)
    return [float(np.abs(a - b).max() / max(np.abs(a).max(), 1)) for a, b in pairs]
