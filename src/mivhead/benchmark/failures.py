"""Why a task failed, in one line that begins with its kind."""

from __future__ import annotations

import numpy as np
import torch

MEMORY = "memory"
NUMERICAL = "numerical"
_NO_MEMORY = ("allocate memory", "not enough memory", "out of memory")
_NO_NUMBER = ("nan", "infinity", "not finite", "singular")


class NotFiniteError(ArithmeticError):
    """Probabilities that are no numbers."""


def describe_failure(error: Exception) -> str:
    """Name what happened; `memory:` and `numerical:` come first where they apply.

    >>> describe_failure(MemoryError())
    'memory: MemoryError'
    >>> describe_failure(ValueError("Input contains NaN."))
    'numerical: Input contains NaN.'
    >>> describe_failure(KeyError("x"))
    "KeyError: 'x'"
    """
    text = " ".join(str(error).split())[:300]
    lower = text.lower()
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(words in lower for words in _NO_MEMORY)
    ):
        return f"{MEMORY}: {text or type(error).__name__}"
    if isinstance(error, ArithmeticError | np.linalg.LinAlgError) or (
        isinstance(error, ValueError | RuntimeError) and any(words in lower for words in _NO_NUMBER)
    ):
        return f"{NUMERICAL}: {text or type(error).__name__}"
    return f"{type(error).__name__}: {text}"
