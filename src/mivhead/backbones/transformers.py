"""Vision towers of transformers: CLIP, SigLIP, ViT and DINOv2, from a folder or the hub.

Taps are named `blocks.0`, `blocks.1`, ... after the layers, whatever the library calls them. The
map of a block holds its patches, the token is [CLS]; registers are dropped, and SigLIP has no
[CLS]. The model's final norm is applied to every block, except for CLIP, whose norm is for [CLS]
only: there the tap `pooled`, after all others, is the normed [CLS] (`pooler_output`).

Only safetensors files are read, and no code from a folder or the hub is run.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from mivhead._util.optional import need
from mivhead._util.schema import parse_json
from mivhead.backbones.base import default_device
from mivhead.backbones.module import ModuleBackbone, Tapped, freeze, suggest_blocks
from mivhead.backbones.preset import BlockPreset, Preprocessing, Preset
from mivhead.backbones.presets import PAPER
from mivhead.backbones.taps import Parts, Taps, check_taps
from mivhead.errors import InputError, NotAvailableError

SCHEME = "hf:"
POOLED = "pooled"  # a tap
_FILES = ["config.json", "preprocessor_config.json", "processor_config.json"]
_WEIGHTS = ["model*.safetensors", "model.safetensors.index.json"]
# Settings that change the features but no tensor; all others determine names and shapes.
_SETTINGS = ("hidden_act", "layer_norm_eps", "num_attention_heads")
_NARROW = 384  # towers up to this width are tapped at four blocks, wider at two, as in the paper


@dataclass(frozen=True)
class _Family:
    """What all towers of one kind have in common."""

    model: str  # the class in transformers
    norm: str | None  # the final norm, if it applies to patches too
    pooler: str | None = None  # the norm that only the last [CLS] passes
    token: bool = True  # whether [CLS] is the first token


_CLIP = _Family("CLIPVisionModel", None, pooler="post_layernorm")
_SIGLIP = _Family("SiglipVisionModel", "post_layernorm", token=False)
_FAMILIES = {
    "clip": _CLIP,
    "clip_vision_model": _CLIP,
    "siglip": _SIGLIP,
    "siglip_vision_model": _SIGLIP,
    "vit": _Family("ViTModel", "layernorm"),
    "dinov2": _Family("Dinov2Model", "layernorm"),
    "dinov2_with_registers": _Family("Dinov2WithRegistersModel", "layernorm"),
}


class Tower(nn.Module):
    """A vision tower whose layers can be tapped.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        The model.
    family : _Family
        Its kind.
    size : int
        Side of its input.
    """

    def __init__(self, model: Any, family: _Family, size: int) -> None:
        super().__init__()
        self.model = model
        config = model.config
        if size < config.patch_size or size % config.patch_size:
            raise InputError(
                f"The input size must be a multiple of the patch size {config.patch_size}, "
                f"got {size}."
            )
        self._side = size // config.patch_size
        self._prefix = int(family.token) + getattr(config, "num_register_tokens", 0)
        self._token = family.token
        # DINOv2 always interpolates its position embeddings, and has no such argument.
        resized = size != config.image_size and not family.model.startswith("Dino")
        self._settings = {"interpolate_pos_encoding": True} if resized else {}
        modules = dict(self.named_modules())
        depth = config.num_hidden_layers
        lists = (k for k, m in modules.items() if isinstance(m, nn.ModuleList) and len(m) == depth)
        self._layers = next(lists)  # the outermost
        by_name = {k.rpartition(".")[2]: modules[k] for k in reversed(modules) if k}  # outermost
        self._norm = by_name.get(family.norm or "", nn.Identity())
        self._pooler = by_name.get(family.pooler or "")
        self.layers = tuple(f"blocks.{i}" for i in range(depth))
        self.names = self.layers + ((POOLED,) if self._pooler is not None else ())

    def forward(self, x: Tensor) -> Any:
        """Run the model on a batch `(n, 3, R, R)`."""
        return self.model(pixel_values=x, **self._settings)

    def tap(self, taps: Sequence[str]) -> Tapped:
        """Return a function that taps some of `names`."""
        last = self.layers[-1]
        needed = dict.fromkeys(last if tap == POOLED else tap for tap in taps)
        outputs = Taps(self, [f"{self._layers}.{tap.removeprefix('blocks.')}" for tap in needed])

        def run(x: Tensor) -> list[Parts]:
            found = dict(zip(needed, outputs(x), strict=True))
            return [self._pool(found[last]) if t == POOLED else self._parts(found[t]) for t in taps]

        return run

    def _pool(self, tokens: Tensor) -> Parts:
        assert self._pooler is not None, "only then the tap exists"
        return {"token": self._pooler(tokens[:, 0])}

    def _parts(self, tokens: Tensor) -> Parts:
        tokens = self._norm(tokens)  # (n, prefix + patches, C)
        patches = tokens[:, self._prefix :].transpose(1, 2)  # (n, C, patches)
        parts = {"map": patches.unflatten(2, (self._side, self._side))}
        return parts | ({"token": tokens[:, 0]} if self._token else {})


def load(
    spec: str,
    *,
    weights: str | Path | None,
    preset: Preset | None,
    device: str | torch.device | None,
    dtype: np.dtype[Any],
) -> ModuleBackbone:
    """Load a tower from a folder or the hub; see `mivhead.backbones.load_backbone`."""
    if weights is not None:
        raise InputError(f"{spec} has its own weights: omit weights.")
    transformers = need("transformers", "transformers")
    device = default_device(device)
    folder = _find_folder(spec.removeprefix(SCHEME))
    config = _read_json(folder / "config.json")
    family = _FAMILIES.get(str(config.get("model_type")))
    if family is None:
        raise InputError(
            f"{spec} has the model type {config.get('model_type')!r}; supported are "
            f"{', '.join(_FAMILIES)}."
        )
    files = _weight_files(folder)
    preprocessing = preset.preprocessing if preset else _read_preprocessing(folder)
    model = _read_model(transformers, family, folder)
    tower = Tower(model, family, preprocessing.size)
    freeze(tower, device)
    if preset is None:
        preset = _suggest(tower, preprocessing, device)
    check_taps(spec, preset.taps, tower.names)
    sha256 = _hash(files, model.config)
    return ModuleBackbone(spec, tower, sha256, preset, device=device, dtype=dtype, tapping=_tapped)


def _tapped(tower: nn.Module, taps: Sequence[str], _dtype: torch.dtype) -> Tapped:
    if not isinstance(tower, Tower):
        raise TypeError(f"expected a Tower, got {type(tower).__name__}")
    return tower.tap(taps)


def _find_folder(name: str) -> Path:
    """Return the folder, or the hub's cache folder of a model, downloaded if needed."""
    folder = Path(name).expanduser()
    with suppress(OSError):  # a name that no file can have
        if folder.is_dir():
            return folder
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or name.startswith("."):
        raise InputError(f"{name} is neither a folder nor a valid name of a model on the hub.")
    hub = need("huggingface_hub", "transformers")
    try:
        return Path(hub.snapshot_download(name, allow_patterns=_FILES + _WEIGHTS))
    # The hub's library passes on errors of several network libraries.
    except Exception as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        raise NotAvailableError(
            f"{name} is not a folder, and it could not be downloaded from the hub ({reason}): "
            f"download it on another machine and give its folder as {SCHEME}FOLDER."
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document = parse_json(path.read_bytes())
    except FileNotFoundError:
        raise InputError(f"{path.parent} has no {path.name}.") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as JSON.") from error
    if not isinstance(document, dict):
        raise InputError(f"{path} does not contain a JSON object.")
    return document


def _weight_files(folder: Path) -> list[Path]:
    if (single := folder / "model.safetensors").is_file():
        return [single]
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        raise NotAvailableError(
            f"{folder} has no model.safetensors; other formats, which may contain code, are not "
            "read: save the model again with `save_pretrained`."
        )
    parts = _read_json(index).get("weight_map")
    names = sorted({str(name) for name in parts.values()}) if isinstance(parts, dict) else []
    if not names or not all(Path(n).name == n and (folder / n).is_file() for n in names):
        raise NotAvailableError(f"{folder} lacks files that {index.name} lists: download it again.")
    return [folder / name for name in names]


def _hash(files: list[Path], config: Any) -> str:
    """Return the SHA-256 of the relevant settings and of the hash of every file."""
    digest = hashlib.sha256(json.dumps([getattr(config, name) for name in _SETTINGS]).encode())
    for path in files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _read_preprocessing(folder: Path) -> Preprocessing:
    """Read size, mean and std; images are resized without a crop, as for all backbones."""
    if (path := folder / "preprocessor_config.json").is_file():
        config = _read_json(path)
    else:
        path = folder / "processor_config.json"
        config = _read_json(path).get("image_processor", {}) if path.is_file() else {}
    cropped = config.get("do_center_crop", "crop_size" in config)
    size = config.get("crop_size" if cropped else "size")
    if isinstance(size, dict):
        sides = {size.get(k) for k in ("height", "width", "shortest_edge") if size.get(k)}
        size = sides.pop() if len(sides) == 1 else None
    plain = config.get("do_normalize") is False
    mean = (0.0,) * 3 if plain else config.get("image_mean")
    std = (1.0,) * 3 if plain else config.get("image_std")
    scale = config.get("rescale_factor", 1 / 255)
    try:
        if abs(float(scale) - 1 / 255) < 1e-6 and type(size) is int and size > 0:
            return Preprocessing(size, _three(mean), _three(std))
    except (TypeError, ValueError):
        pass  # reported below
    raise InputError(
        f"The preprocessor_config.json of {folder} lacks usable settings (one size, image_mean, "
        "image_std, pixels from 0 to 1): give a preset."
    )


def _three(values: Any) -> tuple[float, float, float]:
    first, second, third = map(float, values)
    return first, second, third


def _read_model(transformers: Any, family: _Family, folder: Path) -> Any:
    settings = {"add_pooling_layer": False} if family.model == "ViTModel" else {}
    try:
        with _quiet(transformers):
            model, report = getattr(transformers, family.model).from_pretrained(
                folder,
                local_files_only=True,
                use_safetensors=True,
                dtype=torch.float32,  # whatever the folder's settings are
                attn_implementation="sdpa",  # a folder could name one to be downloaded from the hub
                output_loading_info=True,
                **settings,
            )
    # What the library raises for inconsistent configurations and tensors.
    except (OSError, ValueError, RuntimeError, TypeError, KeyError, SafetensorError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        raise InputError(f"{folder} cannot be loaded as {family.model}: {reason}.") from error
    if missing := sorted(report["missing_keys"]):
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise InputError(
            f"{folder} is not a complete {family.model}: it lacks {', '.join(missing[:3])}{more}."
        )
    return model


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
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
    shape = (config.hidden_size, config.num_hidden_layers, config.patch_size, preprocessing.size)
    if type(tower.model).__name__ == _CLIP.model and shape == (1024, 24, 14, 224):
        return replace(PAPER["clip_vitl14"].preset, preprocessing=preprocessing)
    taps = tower.layers[-4 if config.hidden_size <= _NARROW else -2 :]
    blocks = suggest_blocks(tower.tap(taps), preprocessing.size, device)
    blocks = tuple(replace(block, form="vit", tau=200.0) for block in blocks)  # also without [CLS]
    if POOLED in tower.names:
        taps += (POOLED,)
        blocks += (BlockPreset(form="vit", tau=200.0, pooled=True),)
    return Preset(taps, blocks, preprocessing)
