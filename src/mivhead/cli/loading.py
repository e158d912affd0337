"""What commands read: model files, features files and database tables."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mivhead._util.files import METADATA_KEY, is_exported
from mivhead._util.schema import parse_json
from mivhead.cli import options
from mivhead.errors import InputError

if TYPE_CHECKING:
    from mivhead.model.exported import ExportedClassifier
    from mivhead.model.fewshot import FewShotClassifier


FEATURES = (".safetensors", ".npz", ".npy", ".parquet")  # suffixes of files of features
MAX_HEADER = 100_000_000  # bytes; the limit of safetensors


def kind_of(path: str | Path) -> str | None:
    """Return `"model"`, `"features"` or `"exported"` for a file that mivhead wrote, else None.

    Only the header is read; the file is checked completely when it is loaded.
    """
    if not Path(path).is_file():
        return None
    if is_exported(path):
        from mivhead.model.exported import ExportedClassifier

        try:
            ExportedClassifier(path)
        except InputError:
            return None
        return "exported"
    document = _safetensors_document(Path(path))
    if document is None:
        return None
    return "features" if document.get("kind") == "features" else "model"


def _safetensors_document(path: Path) -> dict[str, Any] | None:
    """Read mivhead's JSON document from a safetensors file; without the library, which is large."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = parse_json(file.read(length)) if length <= MAX_HEADER else None
        document = parse_json(header["__metadata__"][METADATA_KEY]) if header else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return document if isinstance(document, dict) else None


def is_features(path: str | Path) -> bool:
    """Return whether a path names a features file, corrupted or not, or a database table."""
    if "://" in str(path):
        from mivhead.images.decoding import check_local

        check_local(path)
        return True
    path = Path(path)
    if path.is_dir():  # of `miv extract --job`
        return any(path.glob("part-*.parquet"))
    return path.suffix.lower() in FEATURES or kind_of(path) == "features"


def load_model(path: str, args: argparse.Namespace) -> FewShotClassifier:
    """Read a model file; its backbone is loaded with the first image."""
    from mivhead.model.file import load

    loaded = load(path, backbone=args.backbone, weights=args.weights, device=args.device)
    loaded.verbose = not args.quiet
    return loaded


def load_any_model(path: str, args: argparse.Namespace) -> FewShotClassifier | ExportedClassifier:
    """Read a model file, or an exported model."""
    if not check_exported_options(path, args):
        options.prepare(args)
        return load_model(path, args)
    from mivhead.model.exported import ExportedClassifier

    return ExportedClassifier(path, threads=args.threads, verbose=not args.quiet)


def check_exported_options(path: str, args: argparse.Namespace) -> bool:
    """Return whether a model is exported; raise an error for options that it cannot follow."""
    if not is_exported(path):
        return False
    for name in ("backbone", "weights"):
        if getattr(args, name) is not None:
            raise InputError(f"{path} contains its backbone: omit --{name}.")
    if args.device not in (None, "cpu"):
        raise InputError(f"{path} is an exported model, which runs on the CPU: omit --device.")
    return True
