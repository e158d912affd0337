"""Vision towers of transformers: CLIP, SigLIP, ViT, DINOv2 and DINOv3, from a folder or the hub.

Taps are named `blocks.0`, `blocks.1`, ... after the layers, whatever the library calls them, or
`stages.0`, ... after the stages of a ConvNeXt. The map of a block holds its patches, the token is
[CLS]; registers are dropped, and SigLIP has no [CLS]. The model's final norm is applied to every
block, except for CLIP, whose norm is for [CLS] only: there the tap `pooled`, after all others, is
the normed [CLS] (`pooler_output`). A model with a text tower also has the tap `embedding`: the
image's vector in the space that it shares with texts (`mivhead.backbones.text`).

Only safetensors files are read, and no code from a folder or the hub is run.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor, nn

from mivhead._util.optional import need
from mivhead._util.text import reason_of
from mivhead.backbones import hub
from mivhead.backbones.base import default_device
from mivhead.backbones.hub_folders import (
    FAMILIES,
    SIGLIP2,
    Family,
    read_json,
    read_preprocessing,
)
from mivhead.backbones.module import (
    ModuleBackbone,
    Tapped,
    freeze,
    suggest_preset,
)
from mivhead.backbones.preset import (
    Preprocessing,
    Preset,
    near_usual_size,
)
from mivhead.backbones.presets import PAPER
from mivhead.backbones.taps import EMBEDDING, POOLED, Parts, Taps, check_taps
from mivhead.backbones.text import TextTower
from mivhead.errors import InputError, NotAvailableError

SCHEME = "hf:"
_FILES = ["config.json", "preprocessor_config.json", "processor_config.json"]
_WEIGHTS = ["model*.safetensors", "model.safetensors.index.json"]
# Settings that change the features but no tensor; all others determine names and shapes.
_SETTINGS = ("hidden_act", "layer_norm_eps", "num_attention_heads")

# model_type of a folder of transformers -> the class with both towers
TEXT_MODELS = {"clip": "CLIPModel", "siglip": "SiglipModel", "siglip2": "Siglip2Model"}
_PADDING = {"clip": True, "siglip": "max_length", "siglip2": "max_length"}  # as in training


class Tower(nn.Module):
    """A vision tower whose layers can be tapped; `size` is the side of its input."""

    def __init__(self, model: Any, family: Family, size: int) -> None:
        super().__init__()
        self.model = model
        self._family = family
        config = model.config
        modules = dict(self.named_modules())
        if family.model == "DINOv3ConvNextModel":
            self.is_vit = False
            kind, depth = "stages", len(config.hidden_sizes)
        else:
            self.is_vit = True
            kind, depth = "blocks", config.num_hidden_layers
            if size < config.patch_size or size % config.patch_size:
                raise InputError(
                    f"The input size must be a multiple of the patch size {config.patch_size}, "
                    f"got {size}."
                )
            self._side = size // config.patch_size
        self._prefix = int(family.token) + getattr(config, "num_register_tokens", 0)
        resized = not family.any_size and size != config.image_size
        self._settings = {"interpolate_pos_encoding": True} if resized else {}
        lists = (k for k, m in modules.items() if isinstance(m, nn.ModuleList) and len(m) == depth)
        self._layers = next(lists)  # the outermost
        by_name = {k.rpartition(".")[2]: modules[k] for k in reversed(modules) if k}  # outermost
        self._norm = by_name.get(family.norm or "", nn.Identity())
        self._pooler = by_name.get(family.pooler or "")
        embeds = family.embeds and getattr(config, "vision_use_head", True)
        self.layers = tuple(f"{kind}.{i}" for i in range(depth))
        self.names = (
            *self.layers,
            *((POOLED,) if self._pooler is not None else ()),
            *((EMBEDDING,) if embeds else ()),
        )

    def forward(self, x: Tensor) -> Any:
        """Run the model on a batch `(n, 3, R, R)`."""
        if self._family.model == SIGLIP2.model:
            return self.model(**self._as_patches(x))
        return self.model(pixel_values=x, **self._settings)

    def _as_patches(self, x: Tensor) -> dict[str, Tensor]:
        """Cut images into patches, which the towers for any aspect ratio expect."""
        n, side, patch = len(x), self._side, self.model.config.patch_size
        cut = x.reshape(n, 3, side, patch, side, patch).permute(0, 2, 4, 3, 5, 1)
        return {
            "pixel_values": cut.reshape(n, side * side, -1),  # (n, patches, values)
            "pixel_attention_mask": torch.ones(n, side * side, dtype=torch.int64, device=x.device),
            "spatial_shapes": torch.full((n, 2), side, dtype=torch.int64, device=x.device),
        }

    def tap(self, taps: Sequence[str]) -> Tapped:
        """Return a function that taps some of `names`."""
        last = self.layers[-1]
        needed = dict.fromkeys(last if tap == POOLED else tap for tap in taps if tap != EMBEDDING)
        layers = [f"{self._layers}.{tap.partition('.')[2]}" for tap in needed]
        outputs = Taps(self, layers)

        def run(x: Tensor) -> list[Parts]:
            tokens, result = outputs.run(x, whole=EMBEDDING in taps)
            found = dict(zip(needed, tokens, strict=True))
            return [self._read(tap, found, result) for tap in taps]

        return run

    def _read(self, tap: str, found: dict[str, Tensor], result: Any) -> Parts:
        if tap == EMBEDDING:
            embedded = getattr(result, "image_embeds", None)
            return {"token": result.pooler_output if embedded is None else embedded}
        if tap == POOLED:
            assert self._pooler is not None, "only then the tap exists"
            return {"token": self._pooler(found[self.layers[-1]][:, 0])}
        if not self.is_vit:
            return {"map": found[tap]}
        tokens = self._norm(found[tap])  # (n, prefix + patches, C)
        patches = tokens[:, self._prefix :].transpose(1, 2)  # (n, C, patches)
        parts = {"map": patches.unflatten(2, (self._side, self._side))}
        return parts | ({"token": tokens[:, 0]} if self._family.token else {})


def load(
    spec: str,
    *,
    weights: str | Path | None,
    preset: Preset | None,
    device: str | torch.device | None,
    dtype: np.dtype[Any],
    image_size: int | None = None,
) -> ModuleBackbone:
    """Load a tower from a folder or the hub; see `mivhead.backbones.load_backbone`."""
    if weights is not None:
        raise InputError(f"{spec} has its own weights: omit weights.")
    transformers = need("transformers", "transformers")
    device = default_device(device)
    folder = find_folder(spec.removeprefix(SCHEME))
    config = read_json(folder / "config.json")
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        raise InputError(
            f"{spec} has the model type {config.get('model_type')!r}; supported are "
            f"{', '.join(FAMILIES)}."
        )
    files = _weight_files(folder)
    preprocessing = preset.preprocessing if preset else read_preprocessing(folder)
    if preset is None and image_size is not None:
        preprocessing = replace(preprocessing, size=image_size)
    model = _read_model(transformers, family, folder)
    if preset is None and image_size is None and hasattr(model.config, "patch_size"):
        usual = near_usual_size(preprocessing.size, model.config.patch_size)
        preprocessing = replace(preprocessing, size=usual)
    tower = Tower(model, family, preprocessing.size)
    freeze(tower, device)
    if preset is None:
        preset = _suggest(tower, preprocessing, device)
    check_taps(spec, preset.taps, tower.names)
    sha256 = _hash(files, model.config, family)
    texts = partial(text_tower, spec, None)
    return ModuleBackbone(
        spec,
        tower,
        sha256,
        preset,
        device=device,
        dtype=dtype,
        tapping=_tapped,
        texts=texts if config["model_type"] in TEXT_MODELS else None,
    )


def _tapped(tower: nn.Module, taps: Sequence[str], _dtype: torch.dtype) -> Tapped:
    if not isinstance(tower, Tower):
        raise TypeError(f"expected a Tower, got {type(tower).__name__}")
    return tower.tap(taps)


def find_folder(name: str, *, with_text: bool = False) -> Path:
    """Return the folder, or the hub's cache folder of a model, downloaded if needed."""
    folder = Path(name).expanduser()
    with suppress(OSError):  # a name that no file can have
        if folder.is_dir():
            return folder
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or name.startswith("."):
        raise InputError(f"{name} is neither a folder nor a valid name of a model on the hub.")
    files = [*_FILES, *_WEIGHTS, *(hub.TOKENIZER if with_text else ())]
    if (own := hub.own_folder() / name).is_dir():
        return own
    client = need("huggingface_hub", "transformers")
    try:
        return Path(client.snapshot_download(name, allow_patterns=files))
    # The hub's library passes on errors of several network libraries.
    except Exception as error:
        reason = reason_of(error)
        raise NotAvailableError(
            f"{name} is not a folder, and it could not be downloaded from the hub ({reason}): "
            f"download it on another machine and give its folder as {SCHEME}FOLDER."
        ) from error


def _weight_files(folder: Path) -> list[Path]:
    if (single := folder / "model.safetensors").is_file():
        return [single]
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        raise NotAvailableError(
            f"{folder} has no model.safetensors; other formats, which may contain code, are not "
            "read: save the model again with `save_pretrained`."
        )
    parts = read_json(index).get("weight_map")
    names = sorted({str(name) for name in parts.values()}) if isinstance(parts, dict) else []
    if not names or not all(Path(n).name == n and (folder / n).is_file() for n in names):
        raise NotAvailableError(f"{folder} lacks files that {index.name} lists: download it again.")
    return [folder / name for name in names]


def _hash(files: list[Path], config: Any, family: Family) -> str:
    """Return the SHA-256 of the relevant settings and of the hash of every file."""
    settings = [getattr(config, name, None) for name in (*_SETTINGS, *family.settings)]
    digest = hashlib.sha256(json.dumps(settings, default=str).encode())
    for path in files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _read_model(transformers: Any, family: Family, folder: Path) -> Any:
    settings: dict[str, Any] = {"add_pooling_layer": False} if family.model == "ViTModel" else {}
    if family.model != "DINOv3ConvNextModel":  # a folder could name one to download from the hub
        settings["attn_implementation"] = "sdpa"
    try:
        with quiet(transformers):
            model, report = getattr(transformers, family.model).from_pretrained(
                folder,
                local_files_only=True,
                use_safetensors=True,
                dtype=torch.float32,  # whatever the folder's settings are
                output_loading_info=True,
                **settings,
            )
    # What the library raises for inconsistent configurations and tensors.
    except (OSError, ValueError, RuntimeError, TypeError, KeyError, SafetensorError) as error:
        reason = reason_of(error)
        raise InputError(f"{folder} cannot be loaded as {family.model}: {reason}.") from error
    if missing := sorted(report["missing_keys"]):
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise InputError(
            f"{folder} is not a complete {family.model}: it lacks {', '.join(missing[:3])}{more}."
        )
    return model


@contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """Hide the library's progress bars, and its report on tensors that are dropped on purpose."""
    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _suggest(tower: Tower, preprocessing: Preprocessing, device: torch.device) -> Preset:
    """Use the paper's settings for CLIP ViT-L/14; derive those of other towers."""
    config = tower.model.config
    names = ("hidden_size", "num_hidden_layers", "patch_size")
    shape = (*(getattr(config, name, None) for name in names), preprocessing.size)
    if POOLED in tower.names and shape == (1024, 24, 14, 224):
        return replace(PAPER["clip_vitl14"].preset, preprocessing=preprocessing)
    last = tower.names[-1:] if len(tower.names) > len(tower.layers) else ()
    return suggest_preset(tower, tower.layers, last, preprocessing, device)


def text_tower(spec: str, weights: str | Path | None) -> TextTower:
    """Load the text tower of a model of transformers, with its tokenizer."""
    if weights is not None:
        raise InputError(f"{spec} has its own weights: omit weights.")
    transformers = need("transformers", "transformers")
    folder = find_folder(spec.removeprefix("hf:"), with_text=True)
    kind = str(read_json(folder / "config.json").get("model_type"))
    if kind not in TEXT_MODELS:
        raise InputError(
            f"{spec} has the model type {kind!r} and no text tower that can be used; supported "
            f"are {', '.join(TEXT_MODELS)}."
        )
    local = {"local_files_only": True}
    try:
        with quiet(transformers):
            # Code that a folder names is refused, without a question to the user.
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                folder, trust_remote_code=False, **local
            )
            model = getattr(transformers, TEXT_MODELS[kind]).from_pretrained(
                folder,
                use_safetensors=True,
                dtype=torch.float32,
                attn_implementation="sdpa",
                **local,
            )
    # What the library raises for missing or inconsistent files.
    except (OSError, ValueError, RuntimeError, TypeError, KeyError) as error:
        reason = reason_of(error)
        raise InputError(f"The text tower of {folder} cannot be loaded: {reason}.") from error
    length = model.config.text_config.max_position_embeddings
    model.eval()

    def embed(sentences: list[str]) -> NDArray[np.float32]:
        tokens = tokenizer(
            sentences,
            padding=_PADDING[kind],
            truncation=True,
            max_length=length,
            return_tensors="pt",
        )
        accepted = {k: tokens[k] for k in ("input_ids", "attention_mask") if k in tokens}
        if kind != "clip":
            accepted.pop("attention_mask", None)  # SigLIP was trained to read its padding
        with torch.inference_mode():
            found = model.get_text_features(**accepted)
        found = getattr(found, "pooler_output", found)  # newer versions return an object
        vectors: NDArray[np.float32] = found.float().numpy()
        return vectors

    return embed
