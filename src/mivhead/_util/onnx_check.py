"""ONNX files of strangers: looked through before onnxruntime sees them, and run within limits.

A small file can name other files as its weights, loop forever, or ask for all memory there is. So
`check_graph` reads what a file contains without running it (and without the package onnx, which an
exported model does not need), and sessions have limits for memory and time.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from mivhead._util.onnx_reader import BYTES, read_fields, read_text
from mivhead._util.optional import need
from mivhead.errors import InputError

EXTRA = "onnx"
MAX_MEMORY = 3 * 2**30  # bytes of all tensors of a run, in addition to the weights
MAX_FOLDED = 64 * 2**20  # bytes of a constant that is computed when a file is loaded
MAX_SECONDS = 300.0  # of loading a file, and of a run, which is a few images
TICK = 1.0  # seconds between two looks for runs whose time is over
MAX_PARTS = 5_000_000  # of a file: nodes, their inputs, attributes and so on
MAX_DEPTH = 20  # of graphs in graphs

# What the operators of a classifier and its backbone may be: those of ONNX that compute a tensor
# from tensors. Not: loops and branches, sequences, strings, random numbers, images, losses.
_OPERATORS = (
    "Abs Acos Acosh Add AffineGrid And ArgMax ArgMin Asin Asinh Atan Atanh Attention AveragePool "
    "BatchNormalization BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Cast CastLike Ceil "
    "Celu CenterCropPad Clip Col2Im Compress Concat Constant ConstantOfShape Conv ConvInteger "
    "ConvTranspose Cos Cosh CumProd CumSum DeformConv DepthToSpace DequantizeLinear Det Div "
    "Dropout DynamicQuantizeLinear Einsum Elu Equal Erf Exp Expand EyeLike Flatten Floor Gather "
    "GatherElements GatherND Gelu Gemm GlobalAveragePool GlobalLpPool GlobalMaxPool Greater "
    "GreaterOrEqual GridSample GroupNormalization HardSigmoid HardSwish Hardmax Identity "
    "InstanceNormalization IsInf IsNaN LRN LayerNormalization LeakyRelu Less LessOrEqual Log "
    "LogSoftmax LpNormalization LpPool MatMul MatMulInteger Max MaxPool Mean "
    "MeanVarianceNormalization Min Mish Mod Mul Neg NonZero Not OneHot Or PRelu Pad Pow "
    "QLinearConv QLinearMatMul QuantizeLinear RMSNormalization Range Reciprocal ReduceL1 ReduceL2 "
    "ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum "
    "ReduceSumSquare Relu Reshape Resize RotaryEmbedding Round ScatterElements ScatterND Selu "
    "Shape Shrink Sigmoid Sign Sin Sinh Size Slice Softmax Softplus Softsign SpaceToDepth Split "
    "Sqrt Squeeze Sub Sum Swish Tan Tanh ThresholdedRelu Tile TopK Transpose Trilu Unsqueeze "
    "Where Xor"
)
OPERATORS = frozenset(_OPERATORS.split())

# The messages of a file that can contain others, or weights: field number -> message. Everything
# else is skipped. See onnx.proto.
_MESSAGES: dict[str, dict[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {},
}
_OPERATOR, _DOMAIN, _LOCATION = ("node", 4), ("node", 7), ("tensor", 14)
_EXTERNAL = ("tensor", 13)
_OWN_DOMAINS = ("", "ai.onnx")


def check_graph(content: bytes, name: str, *, exported: bool = False) -> None:
    """Refuse a file that is not an ONNX file, or that names other files.

    Of an `exported` file refuse all operators but `OPERATORS`, too: `mivhead` writes no others.
    `name` is for errors.
    """
    if content[4:8] == b"ORTM":  # onnxruntime's own format, which it would recognise
        raise InputError(f"{name} is not an ONNX file.")
    try:
        for place, value in _fields(memoryview(content)):
            if place == _EXTERNAL or (place == _LOCATION and value == 1):
                raise InputError(
                    f"{name} stores weights in other files, which are not read, as an untrusted "
                    "model could name any file on this machine: save the model as a single file."
                )
            if not exported:
                continue
            if place[0] in ("function", "training"):
                raise InputError(f"{name} has its own operators, which `miv export` never writes.")
            if (place == _OPERATOR and read_text(value) not in OPERATORS) or (
                place == _DOMAIN and read_text(value) not in _OWN_DOMAINS
            ):
                raise InputError(
                    f"{name} uses {read_text(value[:80])!r}, which is not among the operators of "
                    "exported models."
                )
    except (IndexError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{name} is not an ONNX file, or is corrupted.") from None


def _fields(content: memoryview) -> Iterator[tuple[tuple[str, int], Any]]:
    """Yield each field of a model and of the messages in it: where it is, and its value."""
    waiting: list[tuple[str, memoryview, int]] = [("model", content, 0)]
    parts = 0
    while waiting:
        kind, data, depth = waiting.pop()
        if depth > 3 * MAX_DEPTH:  # a graph in a graph is three messages deeper
            raise ValueError("nested too deeply")
        inner = _MESSAGES[kind]
        for number, wire, value in read_fields(data):
            parts += 1
            if parts > MAX_PARTS:
                raise ValueError("too many parts")
            yield (kind, number), value
            if number in inner:
                if wire != BYTES:
                    raise ValueError("not a message")
                if kind != "graph" or number != 5 or len(value):  # an empty tensor has no fields
                    waiting.append((inner[number], value, depth + 1))


def make_session(
    content: bytes,
    threads: int,
    providers: Sequence[str] = ("CPUExecutionProvider",),
    folder: str = os.devnull,
) -> Any:
    """Load a checked file into onnxruntime, with limits of memory and time.

    An untrusted file could name any other file as its weights. They are looked for in `folder`
    alone, by default where there are none.
    """
    runtime = need("onnxruntime", EXTRA)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4  # errors are raised, not printed
    _limit_memory()
    for key, value in {
        "session.intra_op.allow_spinning": "0",  # see `_util.threads`
        "session.model_external_initializers_file_folder_path": folder,
        "session.use_env_allocators": "1",
        "session.use_device_allocator_for_initializers": "1",
        "optimization.constant_folding_max_output_size_in_bytes": str(MAX_FOLDED),
    }.items():
        options.add_session_config_entry(key, value)

    def cancel() -> None:
        if hasattr(options, "set_load_cancellation_flag"):  # of onnxruntime 1.21
            options.set_load_cancellation_flag(True)

    with _calling_later(cancel):
        return runtime.InferenceSession(
            content,
            options,
            providers=list(providers),
            enable_fallback=0,  # which would print to the standard output
        )


def run_session(session: Any, outputs: list[str], feed: Mapping[str, Any]) -> list[Any]:
    """Run a graph; stop it after `MAX_SECONDS`, by an error of onnxruntime."""
    options = need("onnxruntime", EXTRA).RunOptions()

    def stop() -> None:
        options.terminate = True

    with _calling_later(stop):
        found: list[Any] = session.run(outputs, dict(feed), options)
    return found


_lock = threading.Lock()
_running: dict[object, tuple[float, Callable[[], None]]] = {}  # when to call which function
_watched = False  # by a thread


@contextmanager
def _calling_later(function: Callable[[], None]) -> Iterator[None]:
    """Call a function after `MAX_SECONDS` if the block has not ended by then.

    One thread watches all blocks, and ends when there are none. A timer per block would start a
    thread per image, and wait for it: in a busy service, a tenth of the backbone's time.
    """
    global _watched
    block = object()
    with _lock:
        _running[block] = time.monotonic() + MAX_SECONDS, function
        if not _watched:
            threading.Thread(target=_watch, name="deadlines", daemon=True).start()
            _watched = True
    try:
        yield
    finally:
        with _lock:
            _running.pop(block, None)


def _watch() -> None:
    global _watched
    while True:
        time.sleep(TICK)
        with _lock:
            if not _running:
                _watched = False
                return
            late = [each for due, each in _running.values() if due < time.monotonic()]
        for function in late:
            function()


def _forget_blocks() -> None:
    """Forget what the threads of the parent did, which a forked process does not have."""
    global _lock, _watched
    _lock, _watched = threading.Lock(), False
    _running.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_blocks)


@cache
def _limit_memory() -> None:
    """Give all sessions of this process one allocator, which refuses more than `MAX_MEMORY`."""
    runtime = need("onnxruntime", EXTRA)
    kinds = runtime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, runtime.OrtMemType.DEFAULT
    runtime.create_and_register_allocator(
        runtime.OrtMemoryInfo("Cpu", *kinds), runtime.OrtArenaCfg({"max_mem": MAX_MEMORY})
    )
