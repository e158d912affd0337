"""Class names as vectors, by the text tower of CLIP, SigLIP and their relatives.

The cosine of an image's embedding (the tap `embedding`) and a class's vector says how well the name
describes the image. A backbone with a text tower has a method `embed_texts`, which maps a list of
sentences to an array of shape (sentences, channels); so may a backbone of your own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from mivhead._util.arrays import unit
from mivhead.backbones.base import Backbone
from mivhead.errors import InputError

TextTower: TypeAlias = Callable[[list[str]], NDArray[np.float32]]  # sentences to vectors

TEMPLATES = ("a photo of a {}.", "a close-up photo of a {}.", "{}")
_BATCH = 64  # texts at a time


def class_vectors(
    backbone: Backbone, names: Sequence[str], templates: Sequence[str] = TEMPLATES
) -> NDArray[np.float32]:
    """Return unit vectors (class, channel): means over sentences in which `{}` is the name."""
    if isinstance(templates, str) or not templates or not all("{}" in text for text in templates):
        raise InputError(f"Templates are a list of sentences with {{}} for the name: {templates}.")
    embed: TextTower | None = getattr(backbone, "embed_texts", None)
    if embed is None:
        raise InputError(f"{backbone.identity.name} has no text tower.")
    sentences = [template.replace("{}", name) for name in names for template in templates]
    batches = [sentences[i : i + _BATCH] for i in range(0, len(sentences), _BATCH)]
    vectors = np.concatenate([embed(batch) for batch in batches])
    means = unit(vectors).reshape(len(names), len(templates), -1).mean(1)  # (class, channel)
    return unit(means).astype(np.float32)
