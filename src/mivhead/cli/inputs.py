"""What commands read: model files, features files and database tables."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from mivhead.errors import InputError

if TYPE_CHECKING:
    from mivhead.features import FeatureTable
    from mivhead.fewshot import FewShotClassifier


def kind_of(path: str | Path) -> str | None:
    """Return `"model"` or `"features"` for a file that mivhead wrote, else None.

    Only the header is read; the file is checked completely when it is loaded.
    """
    from safetensors import SafetensorError, safe_open

    from mivhead._files import METADATA_KEY
    from mivhead._schema import parse_json

    if not Path(path).is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            document = parse_json((file.metadata() or {}).get(METADATA_KEY, "null"))
    except (OSError, SafetensorError, ValueError):
        return None
    if not isinstance(document, dict):
        return None
    return "features" if document.get("kind") == "features" else "model"


def is_features(path: str | Path) -> bool:
    """Return whether a path names a features file, corrupted or not, or a database table."""
    from mivhead.stores import is_store

    named = is_store(path) or Path(path).suffix.lower() == ".safetensors"
    return named or kind_of(path) == "features"


def load_model(path: str, args: argparse.Namespace) -> FewShotClassifier:
    """Read a model file; its backbone is loaded with the first image."""
    from mivhead.model_file import load

    loaded = load(path, backbone=args.backbone, weights=args.weights, device=args.device)
    loaded.verbose = not args.quiet
    return loaded


def check_takes_images(model: FewShotClassifier, path: str) -> None:
    """Raise an error if a model does not know its backbone."""
    if model.identity_ is None:
        raise InputError(
            f"The model {path} was trained on features of unknown origin, not on images: "
            "give it a features file."
        )


def check_takes_features(model: FewShotClassifier, path: str, table: FeatureTable) -> None:
    """Raise an error if features come from another backbone than the model's."""
    from mivhead.backbones.base import Identity

    # A tuned model takes no features at all; its own error says so.
    expected = None if model.needs_images else model.identity_
    if expected and table.backbone and Identity.from_json(table.backbone) != expected:
        raise InputError(
            f"The features come from the backbone {table.backbone.get('name')!r}, but the model "
            f"{path} was trained on {expected.name!r} with its own weights, taps and "
            "preprocessing: extract the features with the model's backbone."
        )
