"""ONNX files as backbones, run by onnxruntime; taps are names of any tensors of the graph."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mivhead._util.runtime import CPU, CUDA, Session, check_self_contained, parse_graph
from mivhead._util.threads import thread_count
from mivhead.backbones.base import (
    DecodedImage,
    Identity,
    Parts,
    check_taps,
    join,
    normalise,
    read_output,
)
from mivhead.backbones.preset import BlockPreset, Preprocessing, Preset, derive_presets
from mivhead.errors import InputError, check_file, reading

if TYPE_CHECKING:
    from mivhead.features import Features


@dataclass(frozen=True)
class ImageInput:
    """The image input of a graph; None means any number."""

    name: str
    batch: int | None = None
    size: int | None = None
    channels_last: bool = False


class OnnxBackbone:
    """A frozen ONNX model whose tapped tensors give the features.

    `content` returns the ONNX file with the tapped tensors as outputs, from which `mivhead.export`
    takes the graph, too. `tensors` are the tensors of taps that have other names. Without a device
    it runs on a GPU if onnxruntime supports one. `chunk` is how many images run at once.
    """

    def __init__(
        self,
        identity: Identity,
        preset: Preset,
        content: Callable[[], bytes],
        source: ImageInput,
        dtype: np.dtype[Any],
        *,
        tensors: dict[str, str] | None = None,
        device: object = None,
        chunk: int = 8,
        folder: str = os.devnull,
    ) -> None:
        if source.size not in (None, preset.preprocessing.size):
            raise InputError(f"{identity.name} requires images of {source.size} px.")
        self.identity = identity
        self.preset = preset
        self.dtype = dtype
        self.content = content
        self._source = source
        self._tensors = tensors or {}
        self._chunk = source.batch or chunk
        self._session = Session(
            content,
            identity.name,
            threads=thread_count(),
            providers=(CPU,) if str(device) == "cpu" else (CUDA, CPU),
            folder=folder,
        )

    def extract(self, images: Sequence[DecodedImage]) -> Features:
        """Return the features of one batch of decoded images, on the CPU, in the same order."""
        first = not self._source.channels_last
        x = normalise(images, self.preset.preprocessing, channels_first=first)
        chunks = [x[start : start + self._chunk] for start in range(0, len(x), self._chunk)]
        return join([self._read_all(self.run(chunk)) for chunk in chunks], self.dtype)

    def suggest_blocks(self) -> tuple[BlockPreset, ...]:
        """Derive the settings of each tap from the shapes of its output for a blank image."""
        return derive_presets(join([self._read_all(self.run_blank())], np.dtype("float32")))

    def _read_all(self, outputs: dict[str, NDArray[Any]]) -> list[Parts]:
        return [self.read(array, tap) for tap, array in outputs.items()]

    def read(self, output: NDArray[Any], tap: str) -> Parts:
        """Turn a tapped tensor into the parts of a block."""
        return read_output(output, tap)

    def run(self, x: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
        """Return the tapped tensors, by tap, for a normalised batch as the graph takes it."""
        count = len(x)
        if self._source.batch:  # the last chunk may be smaller than the graph's fixed batch
            x = np.concatenate([x, np.zeros((self._source.batch - count, *x.shape[1:]), x.dtype)])
        taps = self.preset.taps
        names = [self._tensors.get(tap, tap) for tap in taps]
        arrays = self._session.run(names, {self._source.name: x})
        for tap, array in zip(taps, arrays, strict=True):
            if not isinstance(array, np.ndarray) or array.shape[:1] != (len(x),):
                raise InputError(
                    f"{self.identity.name} does not return one row per image as {tap!r:.80}."
                )
        return {tap: array[:count] for tap, array in zip(taps, arrays, strict=True)}

    def run_blank(self) -> dict[str, NDArray[Any]]:
        """Return the tapped tensors, by tap, for one blank image."""
        size = self.preset.preprocessing.size
        image = (size, size, 3) if self._source.channels_last else (3, size, size)
        return self.run(np.zeros((1, *image), np.float32))


def load(
    spec: str,
    *,
    preset: Preset | None,
    device: object,
    dtype: np.dtype[Any],
    outputs: Sequence[str] | None = None,
    preprocessing: Preprocessing | None = None,
) -> OnnxBackbone:
    """Load an ONNX file; see `mivhead.backbones.load_backbone`.

    `outputs` are the tensors to tap, shallow to deep, by default the outputs of the file that are
    maps or tokens. The preprocessing is by default ImageNet's.
    """
    content = read_content(spec)
    check_self_contained(content, spec)
    model = parse_graph(content, spec)
    source = image_input(model, spec)
    chosen = preset
    if chosen is None:
        spatial = [o.name for o in model.graph.output if len(o.type.tensor_type.shape.dim) > 2]
        taps = tuple(outputs or spatial)
        if not taps:
            raise InputError(f"{spec} has no spatial output: name tensors with outputs=[...].")
        usual = preprocessing or Preprocessing(size=source.size or Preprocessing().size)
        chosen = Preset(taps, (BlockPreset(),) * len(taps), usual)
    check_taps(spec, chosen.taps, [name for node in model.graph.node for name in node.output])
    sha256 = hashlib.sha256(content).hexdigest()
    identity = Identity(Path(spec).name, sha256, chosen.preprocessing, chosen.taps)
    tapped = partial(read_with_outputs, spec, chosen.taps)
    backbone = OnnxBackbone(identity, chosen, tapped, source, dtype, device=device)
    if preset is None:
        backbone.preset = replace(chosen, blocks=backbone.suggest_blocks())
    return backbone


def read_content(path: str | Path) -> bytes:
    """Read an ONNX file."""
    with reading(str(path)[:200]):
        check_file(path)
        return Path(path).read_bytes()


def read_with_outputs(path: str | Path, names: Sequence[str]) -> bytes:
    """Read an ONNX file and turn some of its tensors into the outputs."""
    from onnx import ValueInfoProto

    model = parse_graph(read_content(path), path)
    known = {output.name: output for output in model.graph.output}
    outputs = [known.get(name) or ValueInfoProto(name=name) for name in dict.fromkeys(names)]
    del model.graph.output[:]
    model.graph.output.extend(outputs)
    content: bytes = model.SerializeToString()
    return content


def image_input(model: Any, path: object) -> ImageInput:
    """Find the one input that takes images."""
    from onnx import TensorProto

    constants = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in constants]
    dims = [value.type.tensor_type.shape.dim for value in inputs]
    shapes = [tuple(d.dim_value if d.dim_value > 0 else None for d in shape) for shape in dims]
    if len(inputs) != 1 or len(shapes[0]) != 4:
        raise InputError(f"{path} must have exactly one input, a batch of images; got {shapes}.")
    batch, *sides = shapes[0]
    channels_last = sides[2] == 3 and sides[0] != 3
    colours, height, width = (sides[2], *sides[:2]) if channels_last else sides
    kind = inputs[0].type.tensor_type.elem_type
    if kind != TensorProto.FLOAT or colours not in (3, None) or height != width:
        raise InputError(
            f"The input of {path} must be a float batch (n, 3, R, R) or (n, R, R, 3), got "
            f"{TensorProto.DataType.Name(kind).lower()} {shapes[0]}."
        )
    return ImageInput(inputs[0].name, batch, height, channels_last)
