"""Count the matrix products that NumPy computes."""

from collections.abc import Callable
from typing import Any

import numpy as np


class Counted(np.ndarray):
    """An array that counts the multiply-adds of its matrix products, and of what follows from it.

    >>> x = np.ones((2, 3)).view(Counted)
    >>> count_products(lambda: np.ones((5, 2)) @ (x + 1))
    30
    """

    total = 0

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **given: Any) -> Any:
        plain = [x.view(np.ndarray) if isinstance(x, Counted) else x for x in inputs]
        if "out" in given:
            given["out"] = tuple(
                x.view(np.ndarray) if isinstance(x, Counted) else x for x in given["out"]
            )
        result = getattr(ufunc, method)(*plain, **given)
        if ufunc is np.matmul:
            Counted.total += np.size(result) * plain[0].shape[-1]
        return _counted(result)

    def __array_function__(self, function: Any, types: Any, args: Any, given: Any) -> Any:
        return _counted(super().__array_function__(function, types, args, given))


def _counted(result: Any) -> Any:
    if isinstance(result, tuple):
        return tuple(_counted(each) for each in result)
    return result.view(Counted) if isinstance(result, np.ndarray) else result


def count_products(function: Callable[[], object]) -> int:
    """Count the multiply-adds of matrix products with `Counted` arrays in a call."""
    before = Counted.total
    function()
    return Counted.total - before
