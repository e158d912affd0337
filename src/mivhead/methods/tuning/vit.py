"""What methods for ViTs need to know of one, told by its parts and not by its class."""

from __future__ import annotations

from typing import Any

from torch import nn

from mivhead.errors import InputError
from mivhead.methods.tuning.base import Network

_BLOCK = {"norm1", "attn", "norm2", "mlp"}
_ATTENTION = {"qkv", "proj", "q_norm", "k_norm"}


def check_is_vit(network: Network, method: str, reason: str) -> None:
    """Raise an error if the network has no LayerNorms, or convolutions that do not cut patches."""
    modules = list(network.model.modules())
    convolutional = any(isinstance(m, nn.Conv2d) and m.kernel_size != m.stride for m in modules)
    if convolutional or not any(isinstance(m, nn.LayerNorm) for m in modules):
        raise InputError(
            f"{method} {reason} of a vision transformer; {network.name} is none: take a ViT, or "
            "another method, such as finetune."
        )


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
        "ett adds keys and values to every block of a vision transformer with timm's standard "
        f"blocks; {network.name} has others: take another ViT, or another method, such as ln-tune."
    )


def _is_plain(attention: Any) -> bool:
    """Whether it is self-attention with nothing but the usual steps."""
    return (
        set(dict(attention.named_children())) >= _ATTENTION
        and getattr(attention, "gate", None) is None
        and hasattr(attention, "num_heads")
    )
