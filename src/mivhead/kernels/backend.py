"""The seam: the one place where the head's fast path is chosen.

The formulas of the head stand in `mivhead.head`, complete and readable. This docstring is all that
a reader has to know about how they are made fast.

**Which path runs.** Five formulas (`Operations`) have a compiled counterpart in this package. A
head chooses when it is built and again when it is moved or converted (`head.to`, `head.double`,
unpickling): with float32 parameters on a CPU for which the kernels were compiled, it takes the
compiled operations, otherwise (a GPU, float64, no kernels) the formulas. Both compute the same up
to rounding; the golden runs are tested on both.

**Compiled operations** (`functions`, on top of the C files). Candidates are derived, and patches
and candidates pooled, in one pass over the features, which stay in half precision. Component 2 and
the cosines of Component 3 are fused: prototypes, one vector per query and class, are computed a
tile at a time and never written to memory.

**Gradients in flat memory** (`gradients`). LayerNorm and the linear layers of Component 2 are one
operation, whose backward pass adds gradients to those of the matrices in place. Comparing queries
with bags needs memory proportional to queries x shots, so it runs in chunks (`chunks`): the graph
is cut at the projections, every chunk adds its gradient there, and the backward pass is restarted
from the sums.

**Rounding.** PyTorch's vectorised functions round the last few numbers of a tensor differently
from the others, so that a prediction would depend on an image's place in its batch. Outside of
training, `sigmoid` and `softmax` therefore compute in double precision and round once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mivhead.kernels import functions, gradients
from mivhead.kernels.library import library

CHUNK_VALUES = 2**20  # attention weights, or values of prototypes, at once: 4 MB in float32
# The same on a GPU, where small chunks are a million small kernels: 512 MB.
DEVICE_VALUES = 2**27


class Operations(NamedTuple):
    """The operations that have a fast path; `mivhead.head.head.FORMULAS` defines their meaning."""

    derive_candidates: Callable[
        [Tensor, Sequence[tuple[int, int]], torch.dtype], tuple[list[Tensor], Tensor]
    ]
    pool_patches: Callable[[Tensor, Sequence[Tensor], Tensor], Tensor]
    pool_candidates: Callable[[Tensor, Tensor, float, float | None], Tensor]
    project: Callable[[nn.LayerNorm, Sequence[nn.Linear], Tensor], list[Tensor]]
    compare: Callable[[Any, Any, Any, Any, Tensor | None], Tensor]
    keeps_prototypes: bool  # whether `compare` writes prototypes to memory


COMPILED = Operations(
    functions.derive_candidates,
    functions.pool_patches,
    functions.pool_candidates,
    gradients.project,
    functions.compare,
    keeps_prototypes=False,
)


def choose(formulas: Operations, device: torch.device, dtype: torch.dtype) -> Operations:
    """Choose the operations of a head whose parameters have this device and type."""
    compiled = device.type == "cpu" and dtype == torch.float32 and library() is not None
    return COMPILED if compiled else formulas


def chunks(queries: int, values: int, device: str = "cpu") -> Iterator[slice]:
    """Split queries into slices; each query needs memory for this many values.

    >>> list(chunks(5, CHUNK_VALUES // 2))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 6, None)]
    """
    size = max(1, (CHUNK_VALUES if device == "cpu" else DEVICE_VALUES) // values)
    if size >= queries:
        return iter([slice(None)])
    return (slice(start, start + size) for start in range(0, queries, size))


def sigmoid(x: Tensor) -> Tensor:
    """Sigmoid, rounded alike everywhere outside of training."""
    return x.sigmoid() if _rounds_once(x) else x.double().sigmoid().to(x.dtype)


def softmax(x: Tensor, dim: int) -> Tensor:
    """Softmax, rounded alike everywhere outside of training."""
    return x.softmax(dim) if _rounds_once(x) else x.double().softmax(dim).to(x.dtype)


def _rounds_once(x: Tensor) -> bool:
    """Whether no double precision is needed: in training, and on Apple's GPUs, which have none."""
    return torch.is_grad_enabled() or x.device.type == "mps"
