"""The compiled library: where it is, when it serves, and how its functions are called.

It is built from the C files beside this one when the package is installed (`hatch_build.py`).
Without it, on a GPU, and for numbers that are not in single precision, the head computes the same
with PyTorch's operations.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
import warnings
from ctypes import c_char_p, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from mivhead.kernels.fingerprint import fingerprint

PATH = Path(__file__).with_name("libkernels.so")
PROCESSORS = {"x86_64": ("AVX2", "AVX512")}  # what they must be capable of, in PyTorch's words

AGAIN = "training is slower without them. Install mivhead again (`pip install -e .` in a clone)."


@functools.cache
def library() -> ctypes.CDLL | None:
    """Load the compiled functions; None where there are none for this machine."""
    capable = PROCESSORS.get(platform.machine())
    if capable and torch.backends.cpu.get_cpu_capability() not in capable:
        return None
    if not PATH.is_file():
        return None
    try:
        compiled = ctypes.CDLL(str(PATH))
        compiled.fingerprint.restype = c_char_p
        right = compiled.fingerprint().decode() == fingerprint(PATH.parent)
    except (OSError, AttributeError):
        right = False
    if not right:
        warnings.warn(f"The kernels of mivhead are not of this version; {AGAIN}", stacklevel=2)
    return compiled if right else None


@functools.cache
def _fork() -> c_void_p:
    """Find OpenMP's function that runs work in several threads, as PyTorch has it.

    With threads of our own, those of PyTorch, which wait for work in a busy loop, would be in the
    way. Where it is not found, work runs in one thread.
    """
    everything = None if sys.platform == "win32" else ctypes.CDLL(None)
    found = getattr(everything, "GOMP_parallel", None)
    return ctypes.cast(found, c_void_p) if found else c_void_p()


def serves(*tensors: Tensor) -> bool:
    """Whether the compiled functions take such tensors."""
    fitting = (t.dtype == torch.float32 and t.device.type == "cpu" for t in tensors)
    return library() is not None and all(fitting)


def call(name: str, task: ctypes.Structure) -> None:
    """Run a function on as many threads as PyTorch has."""
    compiled = library()
    assert compiled is not None, "ask `serves` first"
    getattr(compiled, name)(_fork(), c_int64(torch.get_num_threads()), ctypes.byref(task))


def empty(*shape: int) -> Tensor:
    """Make a tensor for numbers in single precision, whatever PyTorch's defaults are."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def address(tensor: Tensor | None) -> int | None:
    """Where the numbers of a tensor start; they have to lie in order."""
    assert tensor is None or tensor.is_contiguous()
    return None if tensor is None else tensor.data_ptr()
