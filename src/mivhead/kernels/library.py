"""The compiled library: where it is, whether it fits this machine, and how functions are called.

It is built from the C files in this folder when the package is installed (`hatch_build.py`).
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import sys
import warnings
from ctypes import c_char_p, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from mivhead.kernels.fingerprint import fingerprint

PATH = Path(__file__).with_name("libkernels.so")
SWITCH = "MIVHEAD_KERNELS"  # environment variable; "off" computes as on machines without kernels
PROCESSORS = {"x86_64": ("AVX2", "AVX512")}  # capabilities they need, as PyTorch names them


@functools.cache
def library() -> ctypes.CDLL | None:
    """Load the compiled functions; None if there are none for this machine, or they are off."""
    if os.environ.get(SWITCH, "").lower() == "off":
        return None
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
        warnings.warn(
            "The compiled kernels of mivhead belong to another version, so training runs without "
            "them and is slower. Install mivhead again (`pip install -e .` in a clone).",
            stacklevel=2,
        )
    return compiled if right else None


@functools.cache
def _fork() -> c_void_p:
    """Find the OpenMP function with which PyTorch runs work in several threads.

    PyTorch's threads wait for work in a busy loop and would compete with threads of our own. If
    the function is not found, work runs in one thread.
    """
    everything = None if sys.platform == "win32" else ctypes.CDLL(None)
    found = getattr(everything, "GOMP_parallel", None)
    return ctypes.cast(found, c_void_p) if found else c_void_p()


def call(name: str, task: ctypes.Structure) -> None:
    """Run a function on as many threads as PyTorch has."""
    compiled = library()
    assert compiled is not None, "the backend chooses compiled operations only if there are any"
    getattr(compiled, name)(_fork(), c_int64(torch.get_num_threads()), ctypes.byref(task))


def empty(*shape: int) -> Tensor:
    """Allocate a float32 tensor on the CPU, whatever PyTorch's defaults are."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def address(tensor: Tensor | None) -> int | None:
    """Address of a tensor's first value; the tensor must be contiguous."""
    assert tensor is None or tensor.is_contiguous()
    return None if tensor is None else tensor.data_ptr()
