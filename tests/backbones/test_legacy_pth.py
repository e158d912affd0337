"""Old PyTorch files, read without PyTorch: equal tensors, and nothing but tensors."""

from __future__ import annotations

import io
import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mivhead.backbones.legacy_pth import read_legacy_pth
from mivhead.errors import InputError


def saved(document: Any) -> bytes:
    file = io.BytesIO()
    torch.save(document, file, _use_new_zipfile_serialization=False)
    return file.getvalue()


def tensors() -> OrderedDict[str, torch.Tensor]:
    shared = torch.arange(24.0)
    return OrderedDict(
        {
            "transposed": torch.randn(3, 4, 5).permute(2, 0, 1),
            "part": shared[4:10].view(2, 3),
            "other part": shared[10:],
            "counter": torch.tensor(7),
            "big counter": torch.tensor([2**40, -1]),
        }
    )


def test_equals_pytorch() -> None:
    expected = tensors()
    found = read_legacy_pth(saved(expected))
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found[name], tensor.numpy(), strict=True)


def test_metadata_of_modules_is_left_out() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2))
    assert list(read_legacy_pth(saved(model.state_dict()))) == list(model.state_dict())


@pytest.mark.parametrize(
    "document",
    [
        {"epoch": 3},
        {3: torch.zeros(1)},
        {"nested": {"weight": torch.zeros(1)}},
        {"half": torch.zeros(2).half()},
        {"parameter": torch.nn.Parameter(torch.zeros(2))},
        {"empty": torch.zeros(0)},
        [torch.zeros(1)],
        torch.zeros(1),
        {"path": Path("x")},
    ],
    ids=str,
)
def test_anything_but_named_tensors_is_refused(document: Any) -> None:
    with pytest.raises(InputError, match="not a PyTorch file of plain tensors"):
        read_legacy_pth(saved(document))


class Attack:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._path),)


@pytest.mark.parametrize("place", ["value", "key", "instead"])
def test_code_is_never_run(place: str, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    attack: Any = Attack(trap)
    document = {"value": {"x": attack}, "key": {attack: 1}, "instead": attack}[place]
    with pytest.raises(InputError):
        read_legacy_pth(saved(document))
    with pytest.raises(InputError):
        read_legacy_pth(pickle.dumps(document))
    assert not trap.exists()


def test_truncated_and_changed_files_are_refused_or_read_as_arrays() -> None:
    content = saved(tensors())
    for end in range(0, len(content) - 1, 7):
        with pytest.raises(InputError):
            read_legacy_pth(content[:end])
    with pytest.raises(InputError):
        read_legacy_pth(content + b"x")
    for place in range(0, len(content), 3):
        changed = bytearray(content)
        changed[place] ^= 0x15
        try:
            found = read_legacy_pth(bytes(changed))
        except InputError:
            continue
        assert all(isinstance(array.sum(), np.generic) for array in found.values())


@pytest.mark.parametrize("numbers", [(0, (30,), (1,)), (20, (5,), (1,)), (0, (2,), (-1,))])
def test_views_outside_of_their_storage_are_refused(numbers: tuple[Any, ...]) -> None:
    from mivhead.backbones.legacy_pth import _Reference, _Storage, _view

    storage = _Storage("0", np.dtype("<f4"), 24)
    with pytest.raises(ValueError, match="a tensor"):
        _view(np.zeros(24, np.float32), _Reference(storage, *numbers))
