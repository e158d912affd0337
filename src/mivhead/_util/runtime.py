"""ONNX files of unknown origin: checked, and run in onnxruntime within limits of memory and time.

A small file can name other files as its weights, loop forever, or ask for all memory there is. A
forked child has none of the threads of its parent, so that sessions start again there.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from mivhead.errors import InputError, reason_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
MAX_MEMORY = 3 * 2**30  # bytes of all tensors of a run, in addition to the weights
MAX_SECONDS = 300.0  # of a run, which is a few images
TICK = 1.0  # seconds between two looks for runs whose time is over
SETTINGS = {
    "session.intra_op.allow_spinning": "0",  # see `_util.threads`
    "session.load_model_format": "ONNX",  # not onnxruntime's own
    "session.use_env_allocators": "1",
    "session.use_device_allocator_for_initializers": "1",
    "optimization.constant_folding_max_output_size_in_bytes": str(64 * 2**20),
}


def parse_graph(content: bytes, name: object) -> Any:
    """Parse an ONNX file, which errors call by its name, without running it."""
    import onnx

    try:
        model = onnx.load_model_from_string(content)
    except Exception:  # protobuf's own
        model = None
    if model is None or not model.graph.node:
        raise InputError(f"{name} is not an ONNX file, or is corrupted.")
    return model


def check_self_contained(content: bytes, name: object) -> None:
    """Refuse a file that stores weights in other files: it could name any file of this machine."""
    if b"location" in content:  # the key of every reference to another file
        for tensor in tensors_of(parse_graph(content, name)):
            if tensor.external_data or tensor.data_location:
                raise InputError(f"{name} stores weights in other files, which are not read.")


def tensors_of(message: Any) -> list[Any]:
    """Return the constants in an ONNX model or a part of it, wherever they are."""
    if message.DESCRIPTOR.name == "TensorProto":
        return [message]
    tensors = []
    for field, value in message.ListFields():
        if field.message_type is not None:
            for part in value if hasattr(value, "append") else [value]:
                tensors += tensors_of(part)
    return tensors


class Session:
    """A graph in onnxruntime.

    `content` returns the ONNX file; it is called again in a forked child. `name` is its name in
    errors. `providers` say where it runs, by preference. Weights that the file leaves to others are
    looked for in `folder` alone, by default nowhere.
    """

    def __init__(
        self,
        content: Callable[[], bytes],
        name: str,
        *,
        threads: int,
        providers: Sequence[str] = (CPU,),
        folder: str = os.devnull,
    ) -> None:
        self._content, self._name, self._threads = content, name, threads
        self._providers, self._folder = providers, folder
        self._lock = threading.Lock()
        self._session = self._start()
        _sessions.add(self)

    def run(self, names: Sequence[str], feed: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
        """Return the named tensors; several threads may call this at the same time."""
        import onnxruntime  # type: ignore[import-untyped]

        if self._session is None:
            with self._lock:
                self._session = self._session or self._start()
        options = onnxruntime.RunOptions()
        _watch(os.getpid())
        _running[id(options)] = time.monotonic() + MAX_SECONDS, options
        try:
            arrays: list[NDArray[Any]] = self._session.run(list(names), dict(feed), options)
        # Exceptions of onnxruntime have no common base class.
        except Exception as error:
            raise InputError(f"onnxruntime cannot run {self._name}: {reason_of(error)}.") from error
        finally:
            del _running[id(options)]
        return arrays

    def _start(self) -> Any:
        import onnxruntime

        _limit_memory()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self._threads
        options.log_severity_level = 4  # errors are raised, not printed
        external = {"session.model_external_initializers_file_folder_path": self._folder}
        for key, value in (SETTINGS | external).items():
            options.add_session_config_entry(key, value)
        available = onnxruntime.get_available_providers()
        providers = [provider for provider in self._providers if provider in available]
        content = self._content()
        quiet = {"enable_fallback": 0}  # a fallback would print to the standard output
        try:
            session = onnxruntime.InferenceSession(content, options, providers=providers, **quiet)
            self.inputs: list[str] = [tensor.name for tensor in session.get_inputs()]
            self.outputs: list[str] = [tensor.name for tensor in session.get_outputs()]
            self.metadata: dict[str, str] = session.get_modelmeta().custom_metadata_map
        except Exception as error:
            raise InputError(
                f"onnxruntime cannot load {self._name}, which may be corrupted: {reason_of(error)}."
            ) from error
        return session

    def _forget(self) -> None:
        """Start again on the next run, in a child whose parent's threads do not exist."""
        # Deleting a session waits for its threads to end, which would take forever: keep it.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._session))
        self._session, self._lock = None, threading.Lock()


_running: dict[int, tuple[float, Any]] = {}  # when a run has to end, and its options
_sessions: WeakSet[Session] = WeakSet()


@cache
def _watch(_process: int) -> None:
    """Start the thread that ends late runs, once in every process: a timer per run costs more."""

    def end_late_runs() -> None:
        while True:
            time.sleep(TICK)
            for end, options in list(_running.values()):
                if time.monotonic() > end:
                    options.terminate = True

    threading.Thread(target=end_late_runs, name="deadlines", daemon=True).start()


@cache
def _limit_memory() -> None:
    """Give all sessions of this process one allocator, which refuses more than `MAX_MEMORY`."""
    import onnxruntime

    kind = onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR
    where = onnxruntime.OrtMemoryInfo("Cpu", kind, 0, onnxruntime.OrtMemType.DEFAULT)
    limits = onnxruntime.OrtArenaCfg({"max_mem": MAX_MEMORY})
    onnxruntime.create_and_register_allocator(where, limits)


def _after_fork() -> None:
    """Prepare a child of a process that has run graphs."""
    if not _sessions:
        return
    for session in list(_sessions):
        session._forget()
    # onnxruntime 1.31 waits for a thread of its own at the very end of a process: in a child,
    # forever. Python has cleaned up by then, so that a child can end before.
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):  # not on macOS
        libc.on_exit(libc._exit, None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
