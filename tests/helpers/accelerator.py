"""A simulated accelerator: what works here works on a GPU, as far as devices are concerned.

Its tensors hold their data on the CPU, but their device is `accel:0`, which PyTorch treats as one
of its own (a `privateuseone` backend written in Python). As on a GPU, an operation on tensors of
both devices is an error, and so is NumPy's view of a tensor that was not copied to the CPU. As on
Apple's GPUs (`mps`), there is no double precision.

Importing this module changes PyTorch for the whole process, so tests that use it run in a process
of their own (`tests/helpers/on_accelerator.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "accel"
_setup_privateuseone_for_python_backend(NAME)
DEVICE = torch.device(NAME, 0)
aten = torch.ops.aten

# Operations that may see both devices, as on a GPU: copies, and indexing by a list on the CPU.
_BETWEEN = {
    aten._to_copy.default,
    aten.copy_.default,
    aten.index.Tensor,
    aten.index_put_.default,
    aten.index_put.default,
    aten._index_put_impl_.default,
}


class OnAccelerator(torch.Tensor):
    """A tensor whose device is the accelerator; `data_` holds its values on the CPU."""

    data_: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, data: Tensor, requires_grad: bool = False) -> OnAccelerator:
        if data.dtype == torch.float64:
            raise TypeError("The device has no float64.")
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            data.size(),
            strides=data.stride(),
            storage_offset=data.storage_offset(),
            dtype=data.dtype,
            device=DEVICE,
            requires_grad=requires_grad,
        )
        made.data_ = data
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:
        return f"OnAccelerator({self.data_})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied: Any = OnAccelerator(self.data_.detach().clone())
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, self.requires_grad)
        memo[id(self)] = copied
        return copied

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError(f"can't convert {DEVICE} device type tensor to numpy.")
        return self.data_.detach().numpy()

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise TypeError(f"can't convert {DEVICE} device type tensor to numpy.")

    def tolist(self) -> Any:
        return self.data_.tolist()


def _compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute on the CPU; the result is where the operands are, or where `device` says."""
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
    ours = [x for x in tensors if isinstance(x, OnAccelerator)]
    others = [x for x in tensors if not isinstance(x, OnAccelerator) and x.dim()]
    if ours and others and func not in _BETWEEN:
        shapes = [tuple(x.shape) for x in others]
        raise RuntimeError(f"Expected all tensors to be on the same device: {func}, {shapes}")

    def unwrap(x: Any) -> Any:
        return x.data_ if isinstance(x, OnAccelerator) else x

    wanted = kwargs.get("device")
    moved = wanted is not None and torch.device(wanted).type == NAME
    here = moved if wanted is not None else bool(ours)
    if func is aten.copy_.default:
        here = isinstance(args[0], OnAccelerator)
    given = tree_map(unwrap, kwargs)
    if wanted is not None:
        given["device"] = torch.device("cpu") if moved else wanted
    result = func(*tree_map(unwrap, args), **given)
    if func is aten._local_scalar_dense.default:
        return result
    wrapped = tree_map(lambda x: OnAccelerator(x) if here and isinstance(x, Tensor) else x, result)
    if not ours or func is aten._to_copy.default:
        return wrapped
    try:
        return return_and_correct_aliasing(func, args, kwargs, wrapped)
    except (RuntimeError, AssertionError):  # it cannot relate every view to its base
        return wrapped


def _empty(size: Any, dtype: Any) -> OnAccelerator:
    return OnAccelerator(torch.empty(size, dtype=dtype or torch.get_default_dtype()))


@torch.library.impl("aten::empty.memory_format", "privateuseone")
def _empty_format(size: Any, *, dtype: Any = None, **_: Any) -> OnAccelerator:
    return _empty(size, dtype)


@torch.library.impl("aten::empty_strided", "privateuseone")
def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> OnAccelerator:
    data = torch.empty_strided(size, stride, dtype=dtype or torch.get_default_dtype())
    return OnAccelerator(data)


_as_tensor, _tensor = torch.as_tensor, torch.tensor


def as_tensor(x: Any, dtype: Any = None, device: Any = None) -> Tensor:
    """`torch.as_tensor`, whose C code does not know the backend."""
    found = x if isinstance(x, OnAccelerator) else _as_tensor(x)
    return found.to(device=device or found.device, dtype=dtype or found.dtype)


def tensor(x: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False) -> Tensor:
    """`torch.tensor`, likewise."""
    found = as_tensor(_tensor(x, dtype=dtype), device=device)
    return found.requires_grad_() if requires_grad else found


def _via_cpu(make: Any) -> Any:
    """Make something on the CPU and move it: the backend has no function of its own for it."""

    def on_device(*sizes: Any, device: Any = None, **settings: Any) -> Tensor:
        return as_tensor(make(*sizes, **settings), device=device)

    return on_device


torch.as_tensor, torch.tensor = as_tensor, tensor  # type: ignore[assignment]
for _name in ("eye", "triu_indices", "tril_indices", "linspace"):
    setattr(torch, _name, _via_cpu(getattr(torch, _name)))
torch.inference_mode = lambda *_, **__: torch.no_grad()  # type: ignore[assignment,misc]  # wrappers cannot enter it
