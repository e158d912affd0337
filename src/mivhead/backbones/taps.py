"""Tapping a PyTorch module: the outputs of named submodules from one forward pass."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from mivhead.errors import InputError


class _AllFound(Exception):  # noqa: N818  # control flow, not an error
    """The deepest tap has been reached: the rest of the forward pass is not needed."""


class Taps:
    """Runs a model up to its deepest tap and returns copies of the tapped outputs.

    Parameters
    ----------
    model
        Any module.
    names
        Submodules, as in `model.named_modules()`, in the order in which they run.
    dtype
        The type of the copies; taken at once, so that later in-place layers cannot change them.

    Examples
    --------
    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(inplace=True))
    >>> [out.shape for out in Taps(model, ["0", "1"])(torch.ones(2, 3))]
    [torch.Size([2, 4]), torch.Size([2, 4])]
    """

    def __init__(
        self, model: nn.Module, names: Sequence[str], dtype: torch.dtype = torch.float32
    ) -> None:
        self._model = model
        self._names = tuple(names)
        self._dtype = dtype
        self._lock = Lock()  # hooks are the model's, one pass at a time; PyTorch is parallel inside

    def __call__(self, x: Tensor) -> list[Tensor]:
        """Return the outputs of the taps for one batch, in the order of their names."""
        found: dict[str, Tensor] = {}

        def keep(name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
            if isinstance(output, tuple) and output:
                output = output[0]  # layers of transformers give their tokens first
            if not isinstance(output, Tensor):
                kind = type(output).__name__
                raise InputError(f"The tap {name!r} gives a {kind}, not a tensor: tap another.")
            found[name] = output.to(self._dtype, copy=True, memory_format=torch.contiguous_format)
            # An exported graph is cut behind its outputs anyway; an exception would break it.
            if len(found) == len(self._names) and not torch.compiler.is_compiling():
                raise _AllFound

        with self._lock, ExitStack() as hooks:
            for name in self._names:
                module = self._model.get_submodule(name)
                hooks.enter_context(module.register_forward_hook(partial(keep, name)))
            with suppress(_AllFound):
                self._model(x)
        if tuple(found) != self._names:
            raise InputError(
                "Taps must be named in the order in which they run, each once: "
                f"asked were {', '.join(self._names)}, found {', '.join(found)}."
            )
        return list(found.values())


def check_taps(backbone: str, taps: Iterable[str], valid: Sequence[str]) -> None:
    """Raise an error that names the first unknown tap and some near it."""
    for tap in taps:
        if tap not in valid:
            nearest = difflib.get_close_matches(tap, valid, n=3) or valid[-3:]
            raise InputError(f"{backbone} has no tap {tap!r}; near it are {', '.join(nearest)}.")
