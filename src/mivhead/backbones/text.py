"""Class names as vectors, by the text tower of CLIP, SigLIP and their relatives.

`class_vectors` embeds names in the space that a text-and-image model shares between texts and
images. The image side is the tap `embedding` of the same model (`mivhead.backbones.transformers`,
`mivhead.backbones.open_clip_models`): the cosine of an image's embedding and a class's vector says
how well the name describes the image (`mivhead.ensemble.names`).

A backbone with a text tower has a method `embed_texts`, which maps a list of sentences to an array
of shape (sentences, channels); so may a backbone of your own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mivhead.backbones import check_name, known_module, load_backbone
from mivhead.backbones.base import Backbone
from mivhead.backbones.presets import NAMED
from mivhead.errors import InputError

TextTower: TypeAlias = Callable[[list[str]], NDArray[np.float32]]  # sentences to vectors

TEMPLATES = ("a photo of a {}.", "a close-up photo of a {}.", "{}")
MAX_NAME = 200  # characters of a class name
_BATCH = 64  # texts at a time


def class_vectors(
    spec: str | Backbone,
    names: Sequence[str],
    templates: Sequence[str] = TEMPLATES,
    *,
    weights: str | Path | None = None,
) -> NDArray[np.float32]:
    """Embed class names with the text tower of a backbone.

    Parameters
    ----------
    spec : str or Backbone
        A text-and-image backbone: `open_clip:...`, `hf:FOLDER_OR_ID`, a name of one, the address of
        a server of one, or a loaded backbone.
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
    embed = _find_tower(spec, weights)
    sentences = [template.replace("{}", name) for name in names for template in templates]
    batches = [sentences[i : i + _BATCH] for i in range(0, len(sentences), _BATCH)]
    vectors = np.concatenate([embed(batch) for batch in batches])  # (class x template, C)
    means = _unit(vectors).reshape(len(names), len(templates), -1).mean(1)  # (class, C)
    return _unit(means)


def _find_tower(spec: str | Backbone, weights: str | Path | None) -> TextTower:
    """Return the text tower of a backbone; of one given by name, the image tower is not loaded."""
    if isinstance(spec, str):
        check_name(spec)
        adapter: Any = import_module(known_module(spec) or __name__)
        if hasattr(adapter, "text_tower"):
            tower: TextTower = adapter.text_tower(NAMED.get(spec, spec), weights)
            return tower
        if spec.startswith(("http://", "https://")):
            spec = load_backbone(spec)
    embed: TextTower | None = getattr(spec, "embed_texts", None)
    if embed is None:
        name = spec if isinstance(spec, str) else spec.identity.name
        raise InputError(
            f"{name} has no text tower: use a text-and-image backbone, such as clip_vitb32, "
            "siglip2_base, bioclip2, open_clip:MODEL/TAG or hf:FOLDER_OR_ID of CLIP or SigLIP."
        )
    return embed


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
    lengths = np.linalg.norm(np.asarray(vectors, np.float64), axis=-1, keepdims=True)
    if not np.isfinite(lengths).all() or not (lengths > 0).all():
        raise InputError("The text tower returns vectors without a direction: check its weights.")
    unit: NDArray[np.float32] = (vectors / lengths).astype(np.float32)
    return unit
