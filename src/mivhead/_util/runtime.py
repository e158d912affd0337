"""Run ONNX graphs in onnxruntime: threads sleep while they wait, and a forked child can go on."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any
from weakref import WeakSet

from numpy.typing import NDArray

from mivhead._util.onnx_check import EXTRA, make_session, run_session
from mivhead._util.optional import need
from mivhead.errors import InputError

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


class Session:
    """A graph in onnxruntime.

    Parameters
    ----------
    content : callable
        Returns the ONNX file. It is called again in a forked child, which has none of the threads
        of its parent and therefore needs a session of its own.
    name : str
        Its name in errors.
    threads : int
        Number of CPU threads.
    providers : sequence of str, default=("CPUExecutionProvider",)
        Where it runs, by preference; those that onnxruntime lacks are left out.
    folder : str, default=os.devnull
        Where weights are that the file leaves to others; by default nowhere.

    Attributes
    ----------
    inputs, outputs : list of str
        Names of its tensors.
    metadata : dict of str to str
        What else the file says.

    Examples
    --------
    >>> import numpy as np
    >>> from mivhead._util.onnx_file import Node, Tensor, encode_model
    >>> x = Tensor("float32", ["n"])
    >>> double = encode_model([Node("Add", ["x", "x"], ["y"])], {}, {"x": x}, {"y": x}, opset=13)
    >>> session = Session(lambda: double, "double.onnx", threads=1)
    >>> session.run(["y"], {"x": np.float32([1, 2])})[0].tolist()
    [2.0, 4.0]
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
        self._lock = Lock()
        session = self._session = self._start()
        try:
            self.inputs: list[str] = [each.name for each in session.get_inputs()]
            self.outputs: list[str] = [each.name for each in session.get_outputs()]
            self.metadata: dict[str, str] = session.get_modelmeta().custom_metadata_map
        except UnicodeDecodeError:
            raise InputError(f"{name} is corrupted: its names are not valid text.") from None
        _sessions.add(self)

    def run(self, names: Sequence[str], feed: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
        """Return the named tensors; several threads may call this at the same time."""
        if self._session is None:
            with self._lock:
                self._session = self._session or self._start()
        try:
            arrays: list[NDArray[Any]] = run_session(self._session, list(names), feed)
        # Exceptions of onnxruntime have no common base class.
        except Exception as error:
            raise InputError(f"onnxruntime cannot run {self._name}: {_reason(error)}.") from error
        return arrays

    def _start(self) -> Any:
        available = need("onnxruntime", EXTRA).get_available_providers()
        providers = [each for each in self._providers if each in available]
        content = self._content()
        try:
            return make_session(content, self._threads, providers, self._folder)
        except Exception as error:
            raise InputError(f"onnxruntime cannot load {self._name}: {_reason(error)}.") from error

    def _restart(self) -> None:
        """Start again on the next run, in a child whose parent's threads do not exist."""
        # Deleting a session waits for its threads to end, which would take forever: keep it.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._session))
        self._session, self._lock = None, Lock()


_sessions: WeakSet[Session] = WeakSet()


def _after_fork() -> None:
    """Prepare a child of a process that has run graphs."""
    if not _sessions:
        return
    for session in list(_sessions):
        session._restart()
    # onnxruntime 1.31 has a thread of its own, and waits for it in the destructors that run at the
    # very end of a process: in a child, forever (github.com/microsoft/onnxruntime/pull/31961 is
    # about other threads). Python has cleaned up by then, so that a child can end before them.
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):  # not on macOS
        libc.on_exit(libc._exit, None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _reason(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")
