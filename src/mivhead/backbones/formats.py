"""Checkpoints of other projects, in the names that timm's architectures have.

torchvision's ResNets, DINO and DeiT use timm's names already. Original Swin checkpoints (SimMIM's)
are renamed by timm's own converter, CLIP's of the Hugging Face hub here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

_CLIP = "vision_model."
_CLIP_NAMES = {
    "embeddings.patch_embedding": "patch_embed.proj",
    "pre_layrnorm": "norm_pre",
    "post_layernorm": "norm",
    "encoder.layers": "blocks",
    "self_attn.out_proj": "attn.proj",
    "layer_norm1": "norm1",
    "layer_norm2": "norm2",
}


def to_timm(tensors: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Rename the tensors of a checkpoint for a model of timm, and leave its classifier out."""
    if f"{_CLIP}embeddings.class_embedding" in tensors:
        return _clip(tensors)
    renamed = _without_classifier(tensors, model)
    if renamed.keys() != model.state_dict().keys():
        convert: Any = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
        if convert is not None:
            renamed = _without_classifier(convert(dict(renamed), model), model)
    return renamed


def _without_classifier(tensors: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Leave out what belongs to the classifier, which the model does not have."""
    config: dict[str, Any] = model.pretrained_cfg  # type: ignore[assignment]  # timm's own
    named = config.get("classifier") or ()
    heads = ((named,) if isinstance(named, str) else tuple(named)) + ("fc", "head", "cls_fn")
    expected = model.state_dict()
    return {
        name: tensor
        for name, tensor in tensors.items()
        if name in expected or not name.startswith(tuple(f"{head}." for head in heads))
    }


def _clip(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the vision tower of transformers' CLIP; query, key and value become one layer."""
    tower = {k.removeprefix(_CLIP): v for k, v in tensors.items() if k.startswith(_CLIP)}
    tower.pop("embeddings.position_ids", None)  # a plain count
    renamed = {
        "cls_token": tower.pop("embeddings.class_embedding").reshape(1, 1, -1),  # (1, 1, C)
        "pos_embed": tower.pop("embeddings.position_embedding.weight").unsqueeze(0),  # (1, P, C)
    }
    for name, tensor in tower.items():
        for old, new in _CLIP_NAMES.items():
            name = name.replace(old, new)
        if match := re.fullmatch(r"(blocks\.\d+\.)self_attn\.q_proj\.(weight|bias)", name):
            block, kind = match.groups()
            layer = f"encoder.layers.{block.removeprefix('blocks.')}self_attn"
            parts = [tower[f"{layer}.{part}_proj.{kind}"] for part in "qkv"]
            renamed[f"{block}attn.qkv.{kind}"] = torch.cat(parts)  # (3C, C) or (3C)
        elif ".self_attn." not in name:
            renamed[name] = tensor
    return renamed
