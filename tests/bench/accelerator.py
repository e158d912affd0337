"""A simulated accelerator: what works here works on a GPU, as far as devices are concerned.

Its tensors hold their data on the CPU, but their device is `accel:0`, a `privateuseone` backend of
PyTorch. As on a GPU, an operation on tensors of both devices is an error, and as on Apple's GPUs,
there is no double precision. It changes PyTorch for the whole process:
`python -m tests.bench.accelerator METHOD...` runs methods on both devices in a process of its own.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("accel")
DEVICE = torch.device("accel", 0)
aten = torch.ops.aten
# Operations that may see both devices: copies, and indexing by a list on the CPU.
BETWEEN = (aten._to_copy, aten.copy_, aten.index, aten.index_put_, aten.index_put)
BETWEEN += (aten._index_put_impl_,)


class OnAccelerator(torch.Tensor):
    """A tensor whose device is the accelerator; `data_` holds its values on the CPU."""

    data_: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, data: Tensor) -> OnAccelerator:
        assert data.dtype != torch.float64, "The device has no float64."
        layout = {"strides": data.stride(), "storage_offset": data.storage_offset()}
        made = torch.Tensor._make_wrapper_subclass(
            cls, data.size(), dtype=data.dtype, device=DEVICE, **layout
        )
        made.data_ = data
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})

    def numpy(self, *, force: bool = False) -> Any:
        assert force, "It must be copied to the CPU."
        return self.data_.detach().numpy()


def compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute on the CPU; the result is where the operands are, or where `device` says."""
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
    here = [x for x in tensors if isinstance(x, OnAccelerator)]
    others = [x for x in tensors if not isinstance(x, OnAccelerator) and x.dim()]
    mixed = here and others and func.overloadpacket not in BETWEEN
    assert not mixed, f"{func} got tensors on both devices: {[tuple(x.shape) for x in others]}"
    given = tree_map(lambda x: x.data_ if isinstance(x, OnAccelerator) else x, kwargs)
    stays = bool(here)
    if (wanted := kwargs.get("device")) is not None:
        stays = torch.device(wanted).type == "accel"
        given["device"] = torch.device("cpu") if stays else wanted
    if func is aten.copy_.default:
        stays = isinstance(args[0], OnAccelerator)
    plain = tree_map(lambda x: x.data_ if isinstance(x, OnAccelerator) else x, args)
    result = func(*plain, **given)
    if func is aten._local_scalar_dense.default:
        return result
    wrap = lambda x: OnAccelerator(x) if stays and isinstance(x, Tensor) else x  # noqa: E731
    wrapped = tree_map(wrap, result)
    if not here or func is aten._to_copy.default:
        return wrapped
    try:
        return return_and_correct_aliasing(func, args, kwargs, wrapped)
    except (RuntimeError, AssertionError):  # it cannot relate every view to its base
        return wrapped


@torch.library.impl("aten::empty.memory_format", "privateuseone")
def _empty(size: Any, *, dtype: Any = None, **_: Any) -> OnAccelerator:
    return OnAccelerator(torch.empty(size, dtype=dtype or torch.float32))


@torch.library.impl("aten::empty_strided", "privateuseone")
def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> OnAccelerator:
    return OnAccelerator(torch.empty_strided(size, stride, dtype=dtype or torch.float32))


def via_cpu(make: Any) -> Any:
    """Make something on the CPU and move it: the backend has no function of its own for it."""

    def on_device(x: Any, *rest: Any, device: Any = None, **given: Any) -> Tensor:
        made = x if isinstance(x, OnAccelerator) else make(x, *rest, **given)
        return made if device is None else made.to(device)

    return on_device


for name in ("as_tensor", "tensor", "eye"):
    setattr(torch, name, via_cpu(getattr(torch, name)))
torch.inference_mode = torch.no_grad  # type: ignore[assignment,misc]  # wrappers cannot enter it


def difference(method: str) -> float:
    """Fit a method on both devices; return the largest difference of their probabilities."""
    from mivhead_bench.methods import get_method, make_method
    from tests.helpers.few_shots import maps
    from tests.helpers.small_networks import digits, network, resnet, vit

    answers = []
    for device in ("cpu", str(DEVICE)):
        made = make_method(method, random_state=0, steps=3, device=device)
        if get_method(method).needs == "images":
            (X, y), (queries, _) = digits(3), digits(2, skip=20)
            made.attach(network(vit() if method in ("ett", "ln-tune") else resnet()))
        else:
            y = np.repeat([0, 1, 2], [4, 1, 3])
            X, queries = (maps(y, seed, token=True) for seed in (0, 1))
        answers.append(made.fit(X, y).predict_proba(queries))
    return float(np.abs(answers[0] - answers[1]).max())


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(name, difference(name))
