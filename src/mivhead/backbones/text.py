"""Class names as vectors, by the text tower of CLIP, SigLIP and their relatives.

`class_vectors` embeds names in the space that a text-and-image model shares between texts and
images. The image side is the tap `embedding` of the same model (`mivhead.backbones.transformers`,
`mivhead.backbones.open_clip_models`): the cosine of an image's embedding and a class's vector says
how well the name describes the image.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mivhead._util.optional import need
from mivhead.backbones.presets import NAMED
from mivhead.errors import InputError, NotAvailableError

TEMPLATES = ("a photo of a {}.", "a close-up photo of a {}.", "{}")
MAX_NAME = 200  # characters of a class name
_BATCH = 64  # texts at a time
# model_type of a folder of transformers -> the class with both towers
_MODELS = {"clip": "CLIPModel", "siglip": "SiglipModel", "siglip2": "Siglip2Model"}
_PADDING = {"clip": True, "siglip": "max_length", "siglip2": "max_length"}  # as in training


def has_text_tower(spec: str) -> bool:
    """Return whether a specification may name a text-and-image model, judging by the name alone.

    >>> has_text_tower("siglip2_base"), has_text_tower("dinov2_small")
    (True, False)
    """
    return NAMED.get(spec, spec).startswith(("open_clip:", "hf:"))


def class_vectors(
    spec: str,
    names: Sequence[str],
    templates: Sequence[str] = TEMPLATES,
    *,
    weights: str | Path | None = None,
) -> NDArray[np.float32]:
    """Embed class names with the text tower of a backbone.

    Parameters
    ----------
    spec : str
        A text-and-image backbone: `open_clip:...`, `hf:FOLDER_OR_ID`, or a name of one.
    names : sequence of str
        The classes.
    templates : sequence of str, optional
        Sentences in which `{}` stands for the name. The vectors of all sentences are averaged.
    weights : str or Path, optional
        As for `mivhead.backbones.load_backbone`.

    Returns
    -------
    array of shape (classes, channels)
        Vectors of length 1, in the order of `names`.

    Raises
    ------
    InputError
        If the backbone has no text tower, or a template no `{}`.
    """
    _check(names, templates)
    full = NAMED.get(spec, spec)
    if full.startswith("open_clip:"):
        embed = _open_clip(spec, weights)
    elif full.startswith("hf:"):
        embed = _transformers(full.removeprefix("hf:"), weights)
    else:
        raise InputError(
            f"{spec} has no text tower: use a text-and-image backbone, such as clip_vitb32, "
            "siglip2_base, bioclip2, open_clip:MODEL/TAG or hf:FOLDER_OR_ID of CLIP or SigLIP."
        )
    sentences = [template.replace("{}", name) for name in names for template in templates]
    batches = [sentences[i : i + _BATCH] for i in range(0, len(sentences), _BATCH)]
    vectors = np.concatenate([embed(batch) for batch in batches])  # (class x template, C)
    means = _unit(vectors).reshape(len(names), len(templates), -1).mean(1)  # (class, C)
    return _unit(means)


def _check(names: Sequence[str], templates: Sequence[str]) -> None:
    if isinstance(names, str) or not len(names):
        raise InputError("names must be a list of at least one class name.")
    for name in names:
        if not isinstance(name, str) or not name.strip() or len(name) > MAX_NAME:
            raise InputError(
                f"A class name must have 1 to {MAX_NAME} characters, got {str(name)[:40]!r}."
            )
    if isinstance(templates, str) or not len(templates):
        raise InputError("templates must be a list of at least one sentence.")
    for template in templates:
        if "{}" not in template:
            raise InputError(
                f"The template {template!r} does not say where the name goes: write {{}} there, "
                'as in "a photo of a {}, a bird".'
            )


def _unit(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    if not np.isfinite(lengths).all() or not (lengths > 0).all():
        raise InputError("The text tower returns vectors without a direction: are its weights OK?")
    unit: NDArray[np.float32] = (vectors / lengths).astype(np.float32)
    return unit


def _open_clip(spec: str, weights: str | Path | None) -> Any:
    import torch

    from mivhead.backbones import hub
    from mivhead.backbones.open_clip_models import (
        CONFIG,
        EXTRA,
        SCHEME,
        architecture,
        hub_files,
        read_model,
    )

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
        reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        raise NotAvailableError(f"The tokenizer of {spec} is not available: {reason}.") from error

    def embed(sentences: list[str]) -> NDArray[np.float32]:
        with torch.inference_mode():
            found: NDArray[np.float32] = model.encode_text(tokenizer(sentences)).float().numpy()
        return found

    return embed


def _transformers(name: str, weights: str | Path | None) -> Any:
    import torch

    from mivhead.backbones.hub_folders import read_json
    from mivhead.backbones.transformers import find_folder, quiet

    if weights is not None:
        raise InputError(f"hf:{name} has its own weights: omit weights.")
    transformers = need("transformers", "transformers")
    folder = find_folder(name, with_text=True)
    kind = str(read_json(folder / "config.json").get("model_type"))
    if kind not in _MODELS:
        raise InputError(
            f"hf:{name} has the model type {kind!r} and no text tower that can be used; supported "
            f"are {', '.join(_MODELS)}."
        )
    local = {"local_files_only": True}
    try:
        with quiet(transformers):
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **local)
            model = getattr(transformers, _MODELS[kind]).from_pretrained(
                folder,
                use_safetensors=True,
                dtype=torch.float32,
                attn_implementation="sdpa",
                **local,
            )
    # What the library raises for missing or inconsistent files.
    except (OSError, ValueError, RuntimeError, TypeError, KeyError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
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
