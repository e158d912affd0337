"""Models of OpenCLIP: CLIP, SigLIP 2, Perception Encoder, MobileCLIP, BioCLIP and others.

A specification is `open_clip:MODEL/TAG` (a pair of `open_clip.list_pretrained()`),
`open_clip:OWNER/NAME` (a model of the hub in OpenCLIP's format) or `open_clip:./FOLDER`. Taps are
`blocks.0`, ... (layers of a ViT) or `stages.0`, ... (of a CNN), and after them `embedding`, the
vector in the space that images share with texts, for heads on one vector per image. The final norm
is applied to every block, except in CLIP's own ViT, whose norm is for [CLS] only.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mivhead._util.imports import need
from mivhead.backbones import hub
from mivhead.backbones.base import Parts, check_taps, default_device
from mivhead.backbones.module import ModuleBackbone, Tapped, freeze, suggest_blocks
from mivhead.backbones.preset import (
    EMBEDDING,
    VECTOR,
    Preprocessing,
    Preset,
    as_vit,
    near_usual_size,
    spread_taps,
)
from mivhead.backbones.presets import NAMED
from mivhead.backbones.text import TextTower
from mivhead.backbones.timm_models import RANDOM, has_class_token, has_tokens
from mivhead.errors import InputError, NotAvailableError, reason_of

SCHEME = "open_clip:"
CONFIG = "open_clip_config.json"
WEIGHTS = "open_clip_model.safetensors"  # on the hub
# Models of the hub whose architecture and preprocessing are OpenCLIP's own.
_ARCHITECTURES = {"imageomics/bioclip-2": ("ViT-L-14", "openai")}


class ImageTower(nn.Module):
    """The image tower of a model of OpenCLIP, whose blocks can be tapped."""

    def __init__(self, visual: Any, name: str) -> None:
        super().__init__()
        self.visual = visual
        if not hasattr(visual, "forward_intermediates"):
            raise InputError(f"{name} cannot be tapped: OpenCLIP does not return its blocks.")
        self._first, self._normed = 0, True
        if trunk := getattr(visual, "trunk", None):  # a model of timm
            self.is_vit, self._token = has_tokens(trunk), has_class_token(trunk)
            self._prefix = bool(getattr(trunk, "num_prefix_tokens", 0))
            depth = len(list(trunk.feature_info))
        elif hasattr(visual, "transformer"):  # CLIP's ViT
            self.is_vit = self._token = self._prefix = True
            self._normed, depth = False, len(visual.transformer.resblocks)
        else:  # CLIP's ResNet, whose stem comes first
            self.is_vit = self._token = self._prefix = False
            self._first, depth = 1, 4
        kind = "blocks" if self.is_vit else "stages"
        self.blocks = tuple(f"{kind}.{i}" for i in range(depth))

    def tap(self, taps: Sequence[str]) -> Tapped:
        """Return a function that taps some of `blocks` and, after them, `embedding`."""
        with_embedding = EMBEDDING in taps
        blocks = [tap for tap in taps if tap != EMBEDDING]
        settings: dict[str, Any] = {
            "indices": [self.blocks.index(tap) + self._first for tap in blocks] or 1,
            "stop_early": not with_embedding,
            "intermediates_only": not with_embedding,
            "normalize_intermediates": self._normed,
            "output_fmt": "NCHW",
        }
        if self._prefix:
            settings["output_extra_tokens"] = True

        def run(x: Tensor) -> list[Parts]:
            outputs = self.visual.forward_intermediates(x, **settings)
            maps = outputs["image_intermediates"]
            tokens = outputs.get("image_intermediates_prefix") if self._token else None
            parts: list[Parts] = [
                {"map": maps[i]} | ({"token": tokens[i][:, 0]} if tokens is not None else {})
                for i in range(len(blocks))
            ]
            return [*parts, {"token": outputs["image_features"]}] if with_embedding else parts

        return run

    def suggest_preset(self, preprocessing: Preprocessing, device: torch.device) -> Preset:
        """Tap layers of a ViT over its depth, or the last two stages of a CNN."""
        taps = spread_taps(self.blocks) if self.is_vit else self.blocks[-2:]
        blocks = suggest_blocks(self.tap(taps), preprocessing.size, device)
        if self.is_vit:
            blocks = as_vit(blocks)
        return Preset((*taps, EMBEDDING), (*blocks, VECTOR), preprocessing)


def load(
    spec: str,
    *,
    weights: str | Path | None,
    preset: Preset | None,
    device: str | torch.device | None,
    dtype: np.dtype[Any],
    image_size: int | None = None,
) -> ModuleBackbone:
    """Load the image tower of a model; see `mivhead.backbones.load_backbone`."""
    device = default_device(device)
    size = preset.preprocessing.size if preset else image_size
    model, preprocessing = read_model(spec, weights, size)
    tower = ImageTower(model.visual, spec)
    freeze(tower, device)
    preset = preset or tower.suggest_preset(preprocessing, device)
    check_taps(spec, preset.taps, [*tower.blocks, EMBEDDING])
    backbone = ModuleBackbone(
        f"{spec} (random weights)" if weights == RANDOM else spec,
        tower,
        preset,
        device=device,
        dtype=dtype,
        tapping=ImageTower.tap,
    )
    if preset.taps[-1] == EMBEDDING:
        backbone.embed_texts = text_tower(spec, weights)
    return backbone


def read_model(
    spec: str, weights: str | Path | None, size: int | None = None
) -> tuple[Any, Preprocessing]:
    """Build a whole model, with both towers and its weights, and its preprocessing."""
    open_clip = need("open_clip")
    name, tag = _architecture(spec)
    if weights is None and tag:
        weights = hub.fetch(*hub_file(spec))
    elif weights not in (None, RANDOM) and not tag:
        raise InputError(f"{spec} has its own weights: omit weights={str(weights)!r}.")
    try:
        size = size or _usual_size(open_clip.get_model_config(name)["vision_cfg"])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = open_clip.create_model(
                name,
                pretrained=None if weights in (None, RANDOM) else str(weights),
                load_weights=weights != RANDOM,
                force_image_size=size,
            )
    except Exception as error:  # of PyTorch, safetensors or OpenCLIP's conversions
        reason = reason_of(error)
        raise InputError(f"{weights or name} is not a checkpoint of {spec}: {reason}.") from error
    if tag:
        settings = open_clip.pretrained.get_pretrained_cfg(name, tag)
    else:
        settings = open_clip.get_model_preprocess_cfg(model)
    known = {key: tuple(settings[key]) for key in ("mean", "std") if key in settings}
    return model.eval(), Preprocessing(size, **known)


def _architecture(spec: str) -> tuple[str, str]:
    """Return OpenCLIP's name of an architecture and a tag; of a folder, which has both, no tag."""
    source = NAMED.get(spec, spec).removeprefix(SCHEME)
    if source in _ARCHITECTURES:
        return _ARCHITECTURES[source]
    model, _, tag = source.partition("/")
    pairs = need("open_clip").list_pretrained()
    if (model, tag) in pairs:
        return model, tag
    if hub.is_repository(source):  # which is not looked for in the current folder
        config = hub.find(source, CONFIG)
    else:
        config = Path(source).expanduser().resolve() / CONFIG
    if config is not None and config.is_file():
        return f"local-dir:{config.parent}", ""
    near = difflib.get_close_matches(source, ["/".join(pair) for pair in pairs], n=1)
    hint = f"did you mean {near[0]!r}?" if near else "see `open_clip.list_pretrained()`."
    raise InputError(
        f"OpenCLIP has no model {source!r}: {hint} For one of the hub: `miv backbones download`."
    )


def _usual_size(vision: dict[str, Any]) -> int:
    trained = vision.get("image_size", 224)
    trained = int(trained if isinstance(trained, int) else trained[0])
    name = str(vision.get("timm_model_name", ""))
    patch = vision.get("patch_size") or (name.partition("patch")[2].partition("_")[0] or 0)
    return near_usual_size(trained, int(patch)) if patch else trained


def hub_file(spec: str) -> tuple[str, str]:
    """Return the repository of a model's weights, and the file in it."""
    source = NAMED.get(spec, spec).removeprefix(SCHEME)
    model, _, tag = source.partition("/")
    config = need("open_clip").pretrained.get_pretrained_cfg(model, tag)
    repository, _, file = str(config.get("hf_hub") or "").rpartition("/")
    if config and not repository:
        raise NotAvailableError(f"The weights of {spec} are not on the hub: give a checkpoint.")
    return repository or source, file or WEIGHTS


def text_tower(spec: str, weights: str | Path | None) -> TextTower:
    """Return a function that loads the text tower and its tokenizer with the first sentence."""

    @cache
    def load_tower() -> tuple[Any, Any]:
        name, tag = _architecture(spec)
        if tag and (config := hub.find(hub_file(spec)[0], CONFIG)):
            name = f"local-dir:{config.parent}"  # with its tokenizer
        try:
            tokenizer = need("open_clip").get_tokenizer(name)
        # Tokenizers of some models are downloaded from the hub, by several libraries.
        except Exception as error:
            raise NotAvailableError(
                f"The tokenizer of {spec} is not available: {reason_of(error)}."
            ) from error
        return read_model(spec, weights)[0], tokenizer

    def embed(sentences: list[str]) -> NDArray[np.float32]:
        model, tokenizer = load_tower()
        with torch.inference_mode():
            vectors: NDArray[np.float32] = model.encode_text(tokenizer(sentences)).float().numpy()
        return vectors

    return embed
