"""eTT's parts: keys and values in front of those of every block, and offsets behind its parts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Prefixes:
    """Keys and values for every block, one pair per class: stored, or made while they are trained.

    Parameters
    ----------
    shape
        Blocks, 2, classes, channels.
    device
        Where they are.
    """

    def __init__(self, shape: tuple[int, int, int, int], device: torch.device) -> None:
        self.value = nn.Parameter(torch.zeros(shape, device=device))
        self.maker: PrefixMaker | None = None
        self.enabled = True
        self.current: Tensor | None = None

    def make(self) -> None:
        """Make the keys and values of the next pass; None if it is to have none."""
        made = self.value if self.maker is None else self.maker()
        self.current = made if self.enabled else None

    def keep(self) -> None:
        """Store what the maker makes, and let it go."""
        if self.maker is not None:
            with torch.no_grad():
                self.value.copy_(self.maker())
            self.maker = None


class PrefixMaker(nn.Module):
    """From prefixes (class, channel), which start as prototypes, to keys and values of all blocks.

    Parameters
    ----------
    prototypes
        One vector per class (class, channel).
    depth
        Number of blocks.
    """

    def __init__(self, prototypes: Tensor, depth: int) -> None:
        super().__init__()
        channels = prototypes.shape[1]
        self.depth = depth
        self.prefix = nn.Parameter(prototypes.clone())
        self.project = nn.Sequential(
            nn.Linear(channels, channels // 2),
            nn.Tanh(),
            nn.Linear(channels // 2, depth * 2 * channels),
        ).to(prototypes.device)

    def forward(self) -> Tensor:
        """Make keys and values (depth, 2, class, channel)."""
        made: Tensor = self.project(self.prefix).unflatten(1, (self.depth, 2, -1))
        return made.movedim(0, 2)


class PrefixedAttention(nn.Module):
    """Self-attention of a standard ViT block that sees further keys and values.

    Parameters
    ----------
    attention
        timm's `Attention`.
    prefixes
        Where the keys and values come from.
    block
        Number of the block.
    """

    def __init__(self, attention: Any, prefixes: Prefixes, block: int) -> None:
        super().__init__()
        self.inner = attention
        self._prefixes = prefixes
        self._block = block

    def forward(self, x: Tensor, *_masks: Any, **_settings: Any) -> Tensor:
        """Attend from tokens (n, token, C) to prefixes and tokens."""
        inner, made = self.inner, self._prefixes.current
        if made is None:
            plain: Tensor = inner(x)
            return plain
        n, tokens, _ = x.shape
        qkv = inner.qkv(x).view(n, tokens, 3, inner.num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (n, head, token, d)
        added = made[self._block]  # (2, class, C)
        added = added.unflatten(2, (inner.num_heads, -1)).transpose(1, 2)  # (2, head, class, d)
        more_k, more_v = added[:, None].expand(2, n, -1, -1, -1)
        k = torch.cat([more_k, inner.k_norm(k)], dim=2)
        v = torch.cat([more_v, v], dim=2)
        y = F.scaled_dot_product_attention(inner.q_norm(q), k, v)  # (n, head, token, d)
        y = y.transpose(1, 2).flatten(2)  # (n, token, C)
        result: Tensor = inner.proj(getattr(inner, "norm", nn.Identity())(y))
        return result


class Shifted(nn.Module):
    """A module whose output is moved by a trained vector, zero at first."""

    def __init__(self, inner: nn.Module, channels: int, device: torch.device) -> None:
        super().__init__()
        self.inner = inner
        self.offset = nn.Parameter(torch.zeros(channels, device=device))

    def forward(self, x: Tensor, *given: Any, **settings: Any) -> Tensor:
        """Run the module, and move its output (..., channel)."""
        moved: Tensor = self.inner(x, *given, **settings) + self.offset
        return moved


class Regulariser(nn.Module):
    """Keeps prefixes near the prototypes they started from: self-distillation as in DINO.

    A projector shows both as distributions. The prototypes' is the teacher's: centred, sharper,
    without gradient.
    """

    WIDTH, TEACHER, STUDENT, MOMENTUM = 64, 0.04, 0.1, 0.9
    centre: Tensor

    def __init__(self, prototypes: Tensor) -> None:
        super().__init__()
        self.projector = nn.Linear(prototypes.shape[1], self.WIDTH).to(prototypes.device)
        self.prototypes = prototypes
        self.register_buffer("centre", prototypes.new_zeros(self.WIDTH))

    def forward(self, prefix: Tensor) -> Tensor:
        """Cross-entropy between the distributions of prototypes and prefixes (class, channel)."""
        with torch.no_grad():
            projected = self.projector(self.prototypes)  # (class, 64)
            target = torch.softmax((projected - self.centre) / self.TEACHER, dim=1)
            self.centre.lerp_(projected.mean(dim=0), 1 - self.MOMENTUM)
        return F.cross_entropy(self.projector(prefix) / self.STUDENT, target)
