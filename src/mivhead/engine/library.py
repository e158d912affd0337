"""The compiled library: where it is, whether it fits this machine, how its functions are called.

It is built from the C files in this folder when the package is installed (`hatch_build.py`).
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import platform
import sys
import warnings
from ctypes import c_char_p, c_int64
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mivhead._util.threads import run_parts
from mivhead.engine.fingerprint import fingerprint

PATH = Path(__file__).with_name("libkernels.so")
SWITCH = "MIVHEAD_KERNELS"  # environment variable; "off" computes as on machines without kernels
NEEDED = {"avx2", "fma", "f16c"}  # of an x86 processor
WINDOWS_AVX2 = 40  # PF_AVX2_INSTRUCTIONS_AVAILABLE
ALIGNMENT = 64  # bytes: the kernels read vectors of 16 numbers


@functools.cache
def library() -> ctypes.CDLL | None:
    """Load the compiled functions; None if there are none for this machine, or they are off."""
    if os.environ.get(SWITCH, "").lower() == "off" or not PATH.is_file() or not _is_capable():
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


def _is_capable() -> bool:
    """Whether the processor has the instructions that the library was compiled for."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    if platform.system() == "Linux":
        flags = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
        return set(flags.split()) >= NEEDED
    if platform.system() == "Darwin":
        found, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
        where = ctypes.byref(found), ctypes.byref(size), None, 0
        ctypes.CDLL(None).sysctlbyname(b"hw.optional.avx2_0", *where)
        return found.value == 1
    if sys.platform == "win32":
        return bool(ctypes.windll.kernel32.IsProcessorFeaturePresent(WINDOWS_AVX2))
    return False


def call(name: str, task: ctypes.Structure, parts: int = 1) -> None:
    """Run a function on all parts of its task."""
    compiled = library()
    assert compiled is not None, "called only if there is a library"
    function, address = getattr(compiled, name), ctypes.byref(task)
    run_parts(lambda part: function(address, c_int64(part), c_int64(parts)), parts)


def empty(*shape: int, dtype: DTypeLike = np.float32) -> NDArray[Any]:
    """Allocate an array that starts at a multiple of 64 bytes.

    >>> empty(3, 5).ctypes.data % 64
    0
    """
    kind = np.dtype(dtype)
    size = math.prod(shape) * kind.itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(kind).reshape(shape)


def address(array: NDArray[Any] | None) -> int | None:
    """Address of an array's first value; the array must be contiguous."""
    assert array is None or array.flags.c_contiguous
    return None if array is None else array.ctypes.data
