"""Folders as the Hugging Face hub publishes models: their kinds, settings and preprocessing.

What `mivhead.backbones.transformers` (PyTorch) and `mivhead.backbones.onnx_folder` (onnxruntime)
both need to know. This module imports neither.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mivhead._util.schema import parse_json
from mivhead.backbones.preset import Preprocessing
from mivhead.errors import InputError

MAX_BYTES = 64 * 2**20  # of a JSON file


@dataclass(frozen=True)
class Family:
    """What all towers of one kind have in common."""

    model: str  # the class in transformers
    norm: str | None  # the final norm, if it applies to patches too
    pooler: str | None = None  # the norm that only the last [CLS] passes
    token: bool = True  # whether [CLS] is the first token
    embeds: bool = False  # whether its output is a vector in a space shared with texts
    any_size: bool = False  # whether it accepts other input sizes without being told
    settings: tuple[str, ...] = ()  # more settings that change the features but no tensor


CLIP = Family("CLIPVisionModel", None, pooler="post_layernorm")
SIGLIP = Family("SiglipVisionModel", "post_layernorm", token=False, embeds=True)
SIGLIP2 = replace(SIGLIP, model="Siglip2VisionModel", any_size=True)
_DINOV3 = ("rope_theta", "num_register_tokens", "use_gated_mlp", "key_bias")
FAMILIES = {
    "clip": replace(CLIP, model="CLIPVisionModelWithProjection", embeds=True),
    "clip_vision_model": CLIP,
    "siglip": SIGLIP,
    "siglip_vision_model": SIGLIP,
    "siglip2": SIGLIP2,
    "siglip2_vision_model": SIGLIP2,
    "vit": Family("ViTModel", "layernorm"),
    "dinov2": Family("Dinov2Model", "layernorm", any_size=True),
    "dinov2_with_registers": Family("Dinov2WithRegistersModel", "layernorm", any_size=True),
    "dinov3_vit": Family("DINOv3ViTModel", "norm", any_size=True, settings=_DINOV3),
    "dinov3_convnext": Family("DINOv3ConvNextModel", None, token=False, any_size=True),
}


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of unknown origin."""
    try:
        if path.exists() and not path.is_file():
            raise InputError(f"{path} is not a regular file.")  # reading a pipe could block
        if path.stat().st_size > MAX_BYTES:
            raise InputError(f"{path} is larger than {MAX_BYTES // 2**20} MiB.")
        document = parse_json(path.read_bytes())
    except FileNotFoundError:
        raise InputError(f"{path.parent} has no {path.name}.") from None
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} cannot be read as JSON.") from error
    if not isinstance(document, dict):
        raise InputError(f"{path} does not contain a JSON object.")
    return document


def read_preprocessing(folder: Path) -> Preprocessing:
    """Read size, mean and std; images are resized without a crop, as for all backbones."""
    if (path := folder / "preprocessor_config.json").is_file():
        config = read_json(path)
    else:
        path = folder / "processor_config.json"
        config = read_json(path).get("image_processor", {}) if path.is_file() else {}
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
            return Preprocessing(size, three(mean), three(std))
    except (TypeError, ValueError):
        pass  # reported below
    raise InputError(
        f"The preprocessor_config.json of {folder} lacks usable settings (one size, image_mean, "
        "image_std, pixels from 0 to 1): give a preset."
    )


def three(values: Any) -> tuple[float, float, float]:
    """Read three numbers, one per colour channel."""
    first, second, third = map(float, values)
    return first, second, third
