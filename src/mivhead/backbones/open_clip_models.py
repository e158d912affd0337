"""Image towers of OpenCLIP: CLIP, SigLIP 2, Perception Encoder, MobileCLIP, BioCLIP and others.

A specification is `open_clip:MODEL/TAG` (a pair of `open_clip.list_pretrained()`),
`open_clip:OWNER/NAME` (a model of the hub in OpenCLIP's format) or `open_clip:FOLDER`.

Taps are `blocks.0`, `blocks.1`, ... (layers of a ViT) or `stages.0`, ... (stages of a CNN). The tap
`embedding`, after all others, is the image's vector in the space that it shares with texts
(`mivhead.backbones.text`); it is the one that heads on one vector per image use. The final norm is
applied to every block, except in CLIP's own ViT, whose norm is for [CLS] only.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mivhead._util.optional import need
from mivhead._util.text import reason_of
from mivhead.backbones import hub
from mivhead.backbones.base import default_device
from mivhead.backbones.checkpoints import state_hash
from mivhead.backbones.hub_folders import three
from mivhead.backbones.module import ModuleBackbone, Tapped, freeze, suggest_preset
from mivhead.backbones.preset import (
    Preprocessing,
    Preset,
    near_usual_size,
)
from mivhead.backbones.presets import NAMED
from mivhead.backbones.taps import EMBEDDING, Parts, check_taps
from mivhead.backbones.text import TextTower
from mivhead.backbones.timm_models import RANDOM, has_class_token, has_tokens
from mivhead.errors import InputError, NotAvailableError

SCHEME = "open_clip:"
EXTRA = "open-clip"
CONFIG = "open_clip_config.json"
WEIGHTS = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")  # on the hub
# Models of the hub whose architecture and preprocessing are OpenCLIP's own.
_ARCHITECTURES = {"imageomics/bioclip-2": ("ViT-L-14", "openai")}


class ImageTower(nn.Module):
    """The image tower of a model of OpenCLIP, whose blocks can be tapped."""

    def __init__(self, visual: Any, name: str) -> None:
        super().__init__()
        self.visual = visual
        if not hasattr(visual, "forward_intermediates"):
            raise InputError(f"{name} cannot be tapped: OpenCLIP does not return its blocks.")
        trunk = getattr(visual, "trunk", None)
        own = trunk is None and hasattr(visual, "transformer")  # CLIP's ViT
        self.is_vit = own or (trunk is not None and has_tokens(trunk))
        self._token = own or (trunk is not None and has_class_token(trunk))
        self._prefix = own or bool(getattr(trunk, "num_prefix_tokens", 0))
        self._normed = not own
        if own:
            depth = len(visual.transformer.resblocks)
        elif trunk is not None:
            depth = len(list(trunk.feature_info))
        else:
            depth = 4  # of a ResNet, whose stem is not counted
        kind = "blocks" if self.is_vit else "stages"
        self.blocks = tuple(f"{kind}.{i}" for i in range(depth))
        self._first = 0 if own or trunk is not None else 1  # a ResNet's stem comes first

    def forward(self, x: Tensor) -> Tensor:
        """Return the vectors of a batch `(n, 3, R, R)`."""
        found: Tensor = self.visual(x)
        return found

    def tap(self, taps: Sequence[str]) -> Tapped:
        """Return a function that taps some of `blocks` and, after them, `embedding`."""
        with_embedding = EMBEDDING in taps
        blocks = [tap for tap in taps if tap != EMBEDDING]
        wanted = [self.blocks.index(tap) + self._first for tap in blocks]
        settings: dict[str, Any] = {
            "indices": wanted or 1,
            "stop_early": not with_embedding,
            "intermediates_only": not with_embedding,
            "normalize_intermediates": self._normed,
            "output_fmt": "NCHW",
        }
        if self._prefix:
            settings["output_extra_tokens"] = True

        def run(x: Tensor) -> list[Parts]:
            found = self.visual.forward_intermediates(x, **settings)
            maps = found["image_intermediates"]
            tokens = found.get("image_intermediates_prefix") if self._token else None
            parts: list[Parts] = [
                {"map": maps[i]} | ({"token": tokens[i][:, 0]} if tokens is not None else {})
                for i in range(len(blocks))
            ]
            return [*parts, {"token": found["image_features"]}] if with_embedding else parts

        return run


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
    model, usual = read_model(spec, weights, size)
    tower = ImageTower(model.visual, spec)
    sha256 = state_hash(tower.visual)
    freeze(tower, device)
    if preset is None:
        preset = suggest_preset(tower, tower.blocks, (EMBEDDING,), usual, device)
    check_taps(spec, preset.taps, [*tower.blocks, EMBEDDING])
    name = f"{spec} (random weights)" if weights == RANDOM else spec
    return ModuleBackbone(
        name,
        tower,
        sha256,
        preset,
        device=device,
        dtype=dtype,
        tapping=_tapped,
        texts=partial(text_tower, spec, weights),
    )


def _tapped(tower: nn.Module, taps: Sequence[str], _dtype: torch.dtype) -> Tapped:
    if not isinstance(tower, ImageTower):
        raise TypeError(f"expected an ImageTower, got {type(tower).__name__}")
    return tower.tap(taps)


def read_model(
    spec: str, weights: str | Path | None, size: int | None = None
) -> tuple[Any, Preprocessing]:
    """Build a whole model, with both towers and its weights, and its preprocessing.

    `weights` is None for the published ones, a checkpoint, or `"random"`; the size is by default
    the model's own, or near 224 if that is large.
    """
    open_clip = need("open_clip", EXTRA)
    place = NAMED.get(spec, spec).removeprefix(SCHEME)
    name, tag = _architecture(open_clip, place, spec)
    config = open_clip.get_model_config(name)
    if config is None:
        raise InputError(f"OpenCLIP does not know the architecture of {spec}.")
    size = size or _usual_size(config["vision_cfg"])
    settings = {"force_image_size": size, "device": "cpu", "load_weights": False}
    with torch.random.fork_rng(devices=[]), _quiet():
        torch.manual_seed(0)
        model = open_clip.create_model(name, **settings)
    if weights != RANDOM:
        file = Path(weights) if weights is not None else _find_weights(place, spec)
        _read_weights(open_clip, model, file, spec)
    found = open_clip.pretrained.get_pretrained_cfg(name, tag) if tag else {}
    if name.startswith("local-dir:"):
        found = open_clip.get_model_preprocess_cfg(model)
    usual = Preprocessing()
    mean, std = found.get("mean", usual.mean), found.get("std", usual.std)
    return model.eval(), Preprocessing(size, three(mean), three(std))


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the library's warning that a model has no weights yet."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def architecture(spec: str) -> str:
    """Return the name of a model's architecture in OpenCLIP."""
    place = NAMED.get(spec, spec).removeprefix(SCHEME)
    return _architecture(need("open_clip", EXTRA), place, spec)[0]


def _architecture(open_clip: Any, place: str, spec: str) -> tuple[str, str | None]:
    """Return the name of an architecture and the tag of its weights, if it has one."""
    folder = Path(place).expanduser()
    if folder.is_dir():
        if not (folder / CONFIG).is_file():
            raise InputError(f"{folder} has no {CONFIG}: it is not a model in OpenCLIP's format.")
        return f"local-dir:{folder.resolve()}", None
    if place in _ARCHITECTURES:
        return _ARCHITECTURES[place]
    model, _, tag = place.partition("/")
    pairs = open_clip.list_pretrained()
    if (model, tag) in pairs:
        return model, tag
    if tags := [each for name, each in pairs if name == model]:
        raise InputError(
            f"OpenCLIP has no weights {tag!r} of {model}: known are {', '.join(tags)}."
        )
    if hub.is_repository(place) and (found := hub.find(place, CONFIG)):
        return f"local-dir:{found.parent}", None
    near = difflib.get_close_matches(model, {name for name, _ in pairs}, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "see `open_clip.list_pretrained()`."
    if hub.is_repository(place):
        hint = f"{hint} A model of the hub has to be downloaded: `miv backbones download {spec}`."
    raise InputError(f"There is no model {place!r} in OpenCLIP: {hint}")


def _usual_size(vision: dict[str, Any]) -> int:
    own = vision.get("image_size", 224)
    own = int(own if isinstance(own, int) else own[0])
    name = str(vision.get("timm_model_name", ""))
    patch = vision.get("patch_size") or (name.partition("patch")[2].partition("_")[0] or 0)
    return near_usual_size(own, int(patch)) if patch else own


def hub_files(spec: str) -> tuple[str, tuple[str, ...]]:
    """Return the repository of a model's weights, and the names that they may have."""
    open_clip = need("open_clip", EXTRA)
    place = NAMED.get(spec, spec).removeprefix(SCHEME)
    model, _, tag = place.partition("/")
    config = open_clip.pretrained.get_pretrained_cfg(model, tag)
    if not config:
        return place, WEIGHTS
    repository, file = str(config.get("hf_hub") or "").rpartition("/")[::2]
    return repository, (file,) if file else WEIGHTS


def _find_weights(place: str, spec: str) -> Path:
    folder = Path(place).expanduser()
    if folder.is_dir():
        for name in WEIGHTS:
            if (folder / name).is_file():
                return folder / name
        raise NotAvailableError(f"{folder} has none of the files {', '.join(WEIGHTS)}.")
    repository, files = hub_files(spec)
    for file in files:
        if repository and (found := hub.find(repository, file)):
            return found
    if not repository or not hub.resolves():
        reason = f"neither in {hub.own_folder()} nor in {hub.cache_folder()}"
        if repository:
            reason += ", and the hub cannot be reached"
        raise NotAvailableError(
            f"The weights of {spec} are missing ({reason}): run `miv backbones download {spec}`, "
            'or give a checkpoint, with weights="FILE" in Python or --weights FILE on the command '
            "line."
        )
    return hub.download(repository, files[:1]) / files[0]


def _read_weights(open_clip: Any, model: Any, file: Path, spec: str) -> None:
    if not file.is_file():
        raise InputError(f"The checkpoint {file} does not exist.")
    try:
        open_clip.load_checkpoint(model, str(file), strict=True, weights_only=True, device="cpu")
    # What PyTorch, safetensors and OpenCLIP's conversions raise for other files.
    except Exception as error:
        reason = " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__
        raise InputError(f"{file} is not a checkpoint of {spec}: {reason}.") from error


def text_tower(spec: str, weights: str | Path | None) -> TextTower:
    """Load the text tower of a model of OpenCLIP, with its tokenizer."""
    open_clip = need("open_clip", EXTRA)
    model, _ = read_model(spec, weights)
    place = NAMED.get(spec, spec).removeprefix(SCHEME)
    if Path(place).expanduser().is_dir():
        name = f"local-dir:{Path(place).expanduser().resolve()}"
    elif found := hub.find(hub_files(spec)[0], CONFIG):  # with its tokenizer
        name = f"local-dir:{found.parent}"
    else:
        name = architecture(spec)
    try:
        tokenizer = open_clip.get_tokenizer(name)
    # Tokenizers of some models are downloaded from the hub, by several libraries.
    except Exception as error:
        reason = reason_of(error)
        raise NotAvailableError(f"The tokenizer of {spec} is not available: {reason}.") from error

    def embed(sentences: list[str]) -> NDArray[np.float32]:
        with torch.inference_mode():
            found: NDArray[np.float32] = model.encode_text(tokenizer(sentences)).float().numpy()
        return found

    return embed
