"""eTT: attentive prefixes and domain residual adapters for vision transformers.

Every class has a prefix, which starts as the prototype of its patch embeddings, weighted by the
attention of [CLS] in the last block. A small network turns it into keys and values for every block.
Offsets after the attention and the MLP of every block, and a linear map of the features, are
trained as well.

Where the eTT paper leaves details open, this follows the comparison in the MIV paper: patch
embeddings include their positions, they are weighted by the mean attention of all heads, and the
regularisation compares unit vectors with a centre of the teacher's distributions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from mivhead.errors import InputError
from mivhead_bench.methods.tuning.base import TuningClassifier, class_means, unit
from mivhead_bench.methods.tuning.network import (
    Network,
    Pixels,
    check_is_vit,
    predicted_at_once,
    split,
)

MAP = "map"  # the linear map of the features
WEIGHT_DECAY, EPS = 0.01, 1e-4
PROTOTYPE_LOSS = 0.1  # weight of the regularisation
_BLOCK = {"norm1", "attn", "norm2", "mlp"}  # parts of a standard ViT block
_ATTENTION = {"qkv", "proj", "q_norm", "k_norm"}


@dataclass(kw_only=True, eq=False, repr=False)
class ETT(TuningClassifier):
    """Prefixes of class prototypes, and offsets, in every block of a ViT."""

    paper: ClassVar = (
        "Xu et al. 2022, Exploring Efficient Few-shot Adaptation for Vision Transformers, "
        "arXiv 2301.02419"
    )
    optimiser: ClassVar = f"AdamW (eps {EPS:g}, weight decay {WEIGHT_DECAY:g})"

    steps: int = 40
    learning_rate: float = 1e-3  # of the map of the features; everything else has half of it
    prefixes: bool = True
    offsets: bool = True

    def check(self, network: Network) -> None:
        """Raise an error unless this is a vision transformer of standard blocks with [CLS]."""
        check_is_vit(network, "ett")
        vit = find_vit(network)
        if self.prefixes and getattr(vit, "cls_token", None) is None:
            raise InputError(f"ett makes its prefixes with [CLS], which {network.name} lacks.")

    def _attach(
        self, network: Network, pixels: Pixels, labels: Tensor
    ) -> Mapping[str, nn.Parameter]:
        vit = find_vit(network)
        trained: dict[str, nn.Parameter] = {}
        self._prefixes: Prefixes | None = None
        if self.prefixes:
            prototypes = class_means(attended(network, vit, pixels), labels)  # (class, channel)
            with torch.random.fork_rng(devices=[]):
                seed = np.random.RandomState(self.random_state).randint(2**31 - 1)
                torch.default_generator.manual_seed(seed)
                self._prefixes = Prefixes(prototypes, len(vit.blocks))
                self._regulariser = Regulariser(prototypes)
            network.register_forward_pre_hook(self._prefixes.make)
            trained |= dict(self._prefixes.named_parameters())
            trained |= dict(self._regulariser.named_parameters())
        weight = network.map_features()
        for i, block in enumerate(vit.blocks):
            if self._prefixes is not None:
                block.attn = PrefixedAttention(block.attn, self._prefixes, i)
            if self.offsets:
                block.attn = Shifted(block.attn, len(weight), network.device)
                block.mlp = Shifted(block.mlp, len(weight), network.device)
                trained[f"blocks.{i}.attn.offset"] = block.attn.offset
                trained[f"blocks.{i}.mlp.offset"] = block.mlp.offset
        return {MAP: weight, **trained}

    def _penalty(self) -> Tensor | float:
        if self._prefixes is None:
            return 0.0
        distance: Tensor = self._regulariser(self._prefixes.prefix)
        return PROTOTYPE_LOSS * distance

    def _optimiser(self, parameters: Mapping[str, nn.Parameter]) -> Optimizer:
        groups: list[dict[str, Any]] = [
            {"params": [p], "lr": self.learning_rate * (1.0 if name == MAP else 0.5)}
            for name, p in parameters.items()
        ]
        return AdamW(groups, eps=EPS, weight_decay=WEIGHT_DECAY)


def attended(network: Network, vit: Any, pixels: Pixels) -> Tensor:
    """Patch embeddings of each image, averaged by the last block's attention of [CLS].

    Each head weights whole patch vectors, all channels of them, and the result is the mean over
    heads: so do eTT's public code and the MIV authors' copy.
    """
    attention = vit.blocks[-1].attn
    seen: dict[str, Tensor] = {}

    def keep(name: str, value: Tensor) -> None:
        seen[name] = value

    hooks = [
        vit.patch_embed.register_forward_hook(lambda _m, _x, y: keep("patches", y)),
        vit.blocks[0].register_forward_pre_hook(lambda _m, x: keep("tokens", x[0])),
        attention.qkv.register_forward_hook(lambda _m, _x, y: keep("qkv", y)),
    ]
    parts = []
    try:
        for part in split(pixels, predicted_at_once(network)):
            with torch.no_grad():
                network(network.batch(part))
            count = seen["patches"].flatten(1, -2).shape[1]
            # With positions, without [CLS] and registers, which come first: (n, patch, channel).
            patches = seen["tokens"][:, -count:]
            weights = _cls_attention(attention, seen["qkv"], count).mean(dim=1)  # (n, patch)
            parts.append((weights[:, None] @ patches)[:, 0])
    finally:
        for hook in hooks:
            hook.remove()
    return torch.cat(parts)  # (image, channel)


def _cls_attention(attention: Any, qkv: Tensor, patches: int) -> Tensor:
    """Attention of [CLS] to the patches alone, per head: (n, head, patch), rows sum to 1."""
    n, tokens, _ = qkv.shape
    q, k, _ = qkv.view(n, tokens, 3, attention.num_heads, -1).permute(2, 0, 3, 1, 4)
    q = attention.q_norm(q[:, :, :1])  # (n, head, 1, d)
    k = attention.k_norm(k)[:, :, -patches:]  # (n, head, patch, d)
    scores = (q @ k.transpose(2, 3))[:, :, 0] / q.shape[-1] ** 0.5  # (n, head, patch)
    return torch.softmax(scores, dim=2)


def find_vit(network: Network) -> Any:
    """Find the module with `patch_embed` and standard `blocks`, as in timm's VisionTransformer."""
    for module in network.model.modules():
        blocks = getattr(module, "blocks", None)
        if hasattr(module, "patch_embed") and isinstance(blocks, nn.Module):
            standard = [
                set(dict(block.named_children())) >= _BLOCK and _is_plain(block.attn)
                for block in blocks.children()
            ]
            if standard and all(standard):
                return module
    raise InputError(
        f"ett adds keys and values to timm's standard blocks; {network.name} has others."
    )


def _is_plain(attention: Any) -> bool:
    """Whether it is self-attention with nothing but the usual steps."""
    return (
        set(dict(attention.named_children())) >= _ATTENTION
        and getattr(attention, "gate", None) is None
        and hasattr(attention, "num_heads")
    )


# The modules of eTT: further keys and values in every block, and offsets after its parts.


class Prefixes(nn.Module):
    """From prefixes (class, channel), which start as prototypes, to keys and values of all blocks.

    `made` holds those of the current pass: (depth, 2, class, channel).
    """

    made: Tensor

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

    def make(self, *_: Any) -> None:
        """Make the keys and values of the next pass."""
        self.made = self.project(self.prefix).unflatten(1, (self.depth, 2, -1)).movedim(0, 2)


class PrefixedAttention(nn.Module):
    """timm's `Attention`, in a standard ViT block, that sees further keys and values."""

    def __init__(self, attention: Any, prefixes: Prefixes, block: int) -> None:
        super().__init__()
        self.inner = attention
        self._prefixes = [prefixes]  # in a list: it is not a part of every block
        self._block = block

    def forward(self, x: Tensor, *_masks: Any, **_settings: Any) -> Tensor:
        """Attend from tokens (n, token, C) to prefixes and tokens."""
        inner = self.inner
        n, tokens, _ = x.shape
        qkv = inner.qkv(x).view(n, tokens, 3, inner.num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (n, head, token, d)
        added = self._prefixes[0].made[self._block]  # (2, class, C)
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

    def forward(self, x: Tensor, *masks: Any, **settings: Any) -> Tensor:
        """Run the module, and move its output (..., channel)."""
        moved: Tensor = self.inner(x, *masks, **settings) + self.offset
        return moved


class Regulariser(nn.Module):
    """Keeps prefixes near the prototypes they started from: self-distillation as in DINO.

    With z and s the projections of a class's prototype and prefix, which have length 1 before they
    are projected (not after), the loss is the cross-entropy between the teacher, softmax((z - c) /
    0.04), which has no gradient, and the student, softmax(s / 0.1), averaged over classes. The
    centre c starts at zero; after every call it is 0.9 c + 0.1 times the mean of the teacher's
    distributions.

    The authors of the MIV-head do the same in their comparison: the centre averages outputs of the
    softmax, where DINO averages z, and is subtracted before the softmax, as in DINO.
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
            projected = self.projector(unit(self.prototypes))  # (class, 64)
            target = torch.softmax((projected - self.centre) / self.TEACHER, dim=1)
            self.centre.lerp_(target.mean(dim=0), 1 - self.MOMENTUM)
        return F.cross_entropy(self.projector(unit(prefix)) / self.STUDENT, target)
