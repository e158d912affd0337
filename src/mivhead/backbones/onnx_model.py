"""ONNX files as backbones, run by onnxruntime.

Taps are names of tensors, inner ones included: they are made outputs in memory. A file that
`mivhead.backbones.onnx_export` wrote names its taps and preprocessing itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mivhead.backbones.base import Identity
from mivhead.backbones.images import ImageLike, preprocess
from mivhead.backbones.onnx_graph import (
    EXTRA,
    Input,
    add_outputs,
    candidates,
    described_preset,
    image_input,
    read_graph,
)
from mivhead.backbones.outputs import Parts, join, read_output
from mivhead.errors import InputError
from mivhead.extras import need
from mivhead.features import Features
from mivhead.head.config import derive_presets
from mivhead.preset import BlockPreset, Preprocessing, Preset

_CHUNK = 8  # images per run on a CPU: enough to share work, few enough for the memory


class OnnxBackbone:
    """A frozen ONNX model whose tapped tensors give the features.

    Parameters
    ----------
    identity
        What it is.
    preset
        Its taps and its preprocessing.
    session
        The model in onnxruntime.
    source
        Its image input.
    names
        Outputs that make each block: one tensor, or `block{i}.map` and `block{i}.token`.
    dtype
        The type that features are rounded to.
    """

    def __init__(
        self,
        identity: Identity,
        preset: Preset,
        session: Any,
        source: Input,
        names: Sequence[tuple[str, ...]],
        dtype: torch.dtype,
    ) -> None:
        self.identity = identity
        self.preset = preset
        self.dtype = dtype
        self._source = source
        self._session = session
        self._names = names

    def extract(self, images: Sequence[ImageLike]) -> Features:
        """Features of one batch of decoded images, on the CPU, in their order."""
        x = preprocess(images, self.preset.preprocessing)  # (n, 3, R, R)
        chunks = x.split(self._source.batch or _CHUNK)
        return join([self._run(chunk) for chunk in chunks], self.dtype)

    def _run(self, x: Tensor) -> list[Parts]:
        count = len(x)
        if self._source.batch:  # the last chunk may be smaller than the graph demands
            x = torch.cat([x, x.new_zeros(self._source.batch - count, *x.shape[1:])])
        x = x.permute(0, 2, 3, 1) if self._source.channels_last else x
        x = (x.half() if self._source.half else x).contiguous()
        names = [name for block in self._names for name in block]
        arrays = _run(self._session, names, {self._source.name: x.numpy()}, self.identity.name)
        tensors = {k: torch.from_numpy(v)[:count] for k, v in zip(names, arrays, strict=True)}
        return [
            read_output(tensors[block[0]], tap)
            if block == (tap,)
            else {name.partition(".")[2]: tensors[name] for name in block}
            for block, tap in zip(self._names, self.preset.taps, strict=True)
        ]


def load(
    spec: str,
    *,
    weights: str | Path | None,
    preset: Preset | None,
    device: torch.device,
    dtype: torch.dtype,
    outputs: Sequence[str] | None = None,
    preprocessing: Preprocessing | None = None,
    blocks: Sequence[BlockPreset] | None = None,
) -> OnnxBackbone:
    """Load an ONNX file; see `mivhead.backbones.load_backbone`.

    Parameters
    ----------
    spec
        Path of the file.
    weights
        Must be None: the file holds them.
    preset, device, dtype
        As for `mivhead.backbones.load_backbone`.
    outputs
        Tensors to tap, shallow to deep; None for the ones that the file names itself, or its
        outputs that are maps.
    preprocessing
        Size, mean and standard deviation; None for the file's own, or ImageNet's.
    blocks
        How the head treats each tap; None for the file's own, or the rule.
    """
    if weights is not None:
        raise InputError(f"{spec} holds its weights: leave out weights={str(weights)!r}.")
    model, sha256 = read_graph(spec)
    source = image_input(model, spec)
    described = described_preset(model, spec)
    chosen = preset or (described if outputs is None else None)
    derive = chosen is None and blocks is None
    if chosen is None:
        taps = tuple(outputs or _spatial_outputs(model, source, spec))
        usual = Preprocessing(size=source.size or Preprocessing().size)
        chosen = Preset(
            taps,
            (BlockPreset(),) * len(taps),
            described.preprocessing if described else usual,
        )
    chosen = replace(
        chosen,
        preprocessing=preprocessing or chosen.preprocessing,
        blocks=chosen.blocks if blocks is None else tuple(blocks),
    )
    if source.size not in (None, chosen.preprocessing.size):
        raise InputError(
            f"{spec} takes images of {source.size} px, "
            f"the preprocessing gives {chosen.preprocessing.size}."
        )
    names = None if described is None or chosen.taps != described.taps else _part_names(model)
    if names is None:
        names = [(tap,) for tap in chosen.taps]
        add_outputs(model, chosen.taps, spec)
    name = Path(spec).name
    identity = Identity(name, sha256, chosen.preprocessing, chosen.taps)
    backbone = OnnxBackbone(identity, chosen, _session(model, device, name), source, names, dtype)
    if derive:
        black = [np.zeros((8, 8, 3), np.uint8)]
        backbone.preset = replace(chosen, blocks=derive_presets(backbone.extract(black)))
    return backbone


def _spatial_outputs(model: Any, source: Input, path: str) -> tuple[str, ...]:
    """Take the outputs that are maps or tokens; a classifier has none."""
    size = source.size or Preprocessing().size
    found = [each for each in candidates(model, source, size) if each.is_output]
    maps = tuple(each.name for each in found if len(each.shape) > 1)
    if not maps:
        raise InputError(
            f"{path} has no spatial output (a map or tokens): name inner tensors to tap with "
            f"outputs=[...]; `miv backbones inspect {path}` lists them."
        )
    return maps


def _part_names(model: Any) -> list[tuple[str, ...]] | None:
    """Names of the outputs of an exported file, block by block; None for other files."""
    outputs = {each.name for each in model.graph.output}
    blocks = [
        tuple(part for part in (f"block{i}.map", f"block{i}.token") if part in outputs)
        for i in range(len(outputs))
    ]
    return [block for block in blocks if block] or None


def _session(model: Any, device: torch.device, name: str) -> Any:
    runtime = need("onnxruntime", EXTRA)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors only
    wanted = ["CUDAExecutionProvider"] if device.type == "cuda" else []
    available = runtime.get_available_providers()
    providers = [each for each in (*wanted, "CPUExecutionProvider") if each in available]
    content = model.SerializeToString()
    try:
        return runtime.InferenceSession(content, options, providers=providers)
    except _errors() as error:
        raise InputError(f"onnxruntime cannot load {name}: {_reason(error)}.") from error


def _run(session: Any, names: list[str], feed: dict[str, Any], name: str) -> list[Any]:
    try:
        arrays: list[Any] = session.run(names, feed)
    except _errors() as error:
        raise InputError(f"onnxruntime cannot run {name}: {_reason(error)}.") from error
    return arrays


def _errors() -> tuple[type[Exception], ...]:
    """Collect what onnxruntime raises for models it cannot use; they share no base class."""
    states = need("onnxruntime.capi.onnxruntime_pybind11_state", EXTRA)
    names = ("Fail", "InvalidArgument", "InvalidGraph", "InvalidProtobuf", "NotImplemented")
    return tuple(getattr(states, name) for name in (*names, "RuntimeException"))


def _reason(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")
