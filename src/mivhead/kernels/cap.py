"""Cross-attention pooling and the cosines with its prototypes (`cap_forward.c` and beside)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mivhead.kernels.library import address, call

LANES = 16  # queries at a time
KINDS = ("uniform", "l1", "dot")
TENSORS = (  # gate, hidden and weights may be None
    *("y", "v", "gate", "z", "w", "starts", "hidden", "weights", "cosines"),
    *("d_cosines", "d_y", "d_v", "d_gate", "d_shots"),
)


class _Task(ctypes.Structure):
    _fields_ = (
        *((n, c_int64) for n in ("queries", "channels", "heads", "classes", "support")),
        *((n, c_int64) for n in ("attention", "skip", "centred")),
        *((n, c_float) for n in ("factor", "eps")),
        *((n, c_void_p) for n in TENSORS),
        ("scratch", c_void_p),
        ("scratch_size", c_int64),
    )


@dataclass(frozen=True)
class Setting:
    """How queries are compared with the bags."""

    heads: int
    attention: str  # one of KINDS
    factor: float  # scores are so many times the distance or the dot product
    skip: bool
    centred: bool
    eps: float  # norms are at least so long


class CapCosine(torch.autograd.Function):
    """Cosines of v^Q with the prototypes v^P of all classes."""

    @staticmethod
    def forward(
        ctx: Any,
        key: Tensor,  # of queries: (query, channel)
        value: Tensor,
        gate: Tensor | None,
        shot_key: Tensor,  # of shots, class after class: (shot, channel)
        shot_value: Tensor,
        starts: Tensor,  # (class + 1,): where the shots of each class start
        hidden: Tensor | None,  # (query,): the shot that a query does not see, or -1
        setting: Setting,
    ) -> Tensor:
        """Cosines (query, class)."""
        y, v = key.contiguous(), value.contiguous()
        gate = None if gate is None else gate.contiguous()
        z, w = shot_key.T.contiguous(), shot_value.T.contiguous()  # (channel, shot)
        cosines = y.new_empty(len(y), len(starts) - 1)
        weights = None
        if any(ctx.needs_input_grad):
            tiles = -(-len(y) // LANES)
            weights = y.new_empty(tiles, setting.heads, len(shot_key), LANES)
        given = y, v, gate, z, w, starts, hidden, weights, cosines
        _run("cap_forward", setting, given)
        ctx.setting = setting
        ctx.save_for_backward(*given)
        return cosines

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of keys, values and gates."""
        y, v, gate, z, *_ = ctx.saved_tensors
        d_y, d_v = torch.empty_like(y), torch.empty_like(v)
        d_gate = None if gate is None else torch.empty_like(gate)
        d_shots = z.new_empty(torch.get_num_threads(), *z.shape, 2)  # keys and values side by side
        grads = grad.contiguous(), d_y, d_v, d_gate, d_shots
        _run("cap_backward", ctx.setting, (*ctx.saved_tensors, *grads))
        d_z, d_w = d_shots.sum(dim=0).permute(2, 1, 0)  # (shot, channel) each
        return d_y, d_v, d_gate, d_z, d_w, None, None, None


def _run(name: str, setting: Setting, tensors: Sequence[Any]) -> None:
    """Call a function with tensors in the order of TENSORS; forward, without gradients."""
    y, _, _, z, _, starts, *_ = tensors
    (queries, channels), support, classes = y.shape, z.shape[1], len(starts) - 1
    # of a part: prototypes, vectors of channels, classes, shots, weights, classes of the shots, and
    # what alignment takes
    kept = channels if len(tensors) == len(TENSORS) else 1  # channels whose prototypes are kept
    vectors = 2 * kept * classes + 7 * channels + 4 * classes
    vectors += support + setting.heads * support + -(-support // 8) + 1
    scratch = y.new_empty(torch.get_num_threads(), LANES * vectors)
    task = _Task(
        queries=queries,
        channels=channels,
        heads=setting.heads,
        classes=classes,
        support=support,
        attention=KINDS.index(setting.attention),
        skip=setting.skip,
        centred=setting.centred,
        factor=setting.factor,
        eps=setting.eps,
        scratch=address(scratch),
        scratch_size=scratch.shape[1],
        **dict(zip(TENSORS[: len(tensors)], map(address, tensors), strict=True)),
    )
    call(name, task)
