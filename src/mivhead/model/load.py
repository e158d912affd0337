"""`mivhead.load`: a fitted model or an exported one, from its file or from the Hugging Face hub."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mivhead._util.files import HUB, is_exported
from mivhead.backbones import hub
from mivhead.errors import InputError, NotAvailableError
from mivhead.model.exported import ExportedClassifier

if TYPE_CHECKING:
    from mivhead.backbones.base import Backbone
    from mivhead.model.fewshot import FewShotClassifier

NAMES = ("model.miv", "model.onnx")  # of a model on the hub: not exported, exported


def load(
    path: str | Path,
    *,
    backbone: str | Backbone | Sequence[str | Backbone] | None = None,
    weights: str | Path | None = None,
    device: str | None = None,
    method: type[Any] | None = None,
) -> FewShotClassifier | ExportedClassifier:
    """Read a model file, or an exported model.

    Parameters
    ----------
    path : str or Path
        A file of `miv fit` or `FewShotClassifier.save`; or an `.onnx` file of `miv export`, for
        which PyTorch is not needed. `hf://OWNER/NAME` is a model that `miv push` published.
    backbone : str, Backbone, sequence of them or None, default=None
        The backbone of a model that was trained on one of your own. A backbone that mivhead knows
        by name is loaded with the first image. The address of a service is never taken from the
        file: give it here. An exported model contains its backbone.
    weights : str, Path or None, default=None
        The checkpoint of a model that was trained with a checkpoint of your own.
    device : str or None, default=None
        Where to predict; an exported model predicts on the CPU.
    method : type or None, default=None
        The class of a model that was trained with a method of your own. A registered method is
        found by its name; code is never taken from the file. An exported model needs none.

    Returns
    -------
    FewShotClassifier or ExportedClassifier
        Both predict with `classify`, `predict` and `predict_proba`.
    """
    path = fetch(path)
    if is_exported(path):
        if any(given is not None for given in (backbone, weights, method)):
            raise InputError(f"{path} contains all it needs: omit backbone, weights and method.")
        if device not in (None, "cpu"):
            raise InputError(f"{path} is an exported model, which runs on the CPU: omit device.")
        return ExportedClassifier(path)
    from mivhead.model.file import load as load_model_file

    return load_model_file(path, backbone=backbone, weights=weights, device=device, method=method)


def fetch(path: str | Path) -> str | Path:
    """Download a model of the hub, unless it is on this computer already; return its path.

    Parameters
    ----------
    path : str or Path
        `hf://OWNER/NAME`, or `hf://OWNER/NAME/FILE`; anything else is returned as it is.

    Returns
    -------
    str or Path
        The file. If the hub cannot be reached, the copy of an earlier download.
    """
    if not str(path).startswith(HUB):
        return path
    owner, _, rest = str(path).removeprefix(HUB).partition("/")
    name, _, file = rest.partition("/")
    repository, wanted = f"{owner}/{name}", (file,) if file else NAMES
    if not hub.is_repository(repository) or not all(map(hub.is_file_name, wanted)):
        raise InputError(f"{path!r:.200} is not an address like {HUB}me/birds.")
    try:
        return hub.download_first(repository, wanted)
    except NotAvailableError as error:
        copies = [found for each in wanted if (found := hub.find(repository, each))]
        if not copies:
            raise
        warnings.warn(f"{error} An earlier download is used.", stacklevel=2)
        return max(copies, key=lambda copy: copy.stat().st_mtime)
