"""How extraction shares the cores between the backbone and the decoder."""

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from mivhead.extraction import _Cores


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def decode(cores: _Cores, seconds: float) -> None:
    assert list(cores.decode(_slow(seconds))) == [0, 1]


def _slow(seconds: float) -> Iterator[int]:
    for i in range(2):
        time.sleep(seconds)
        yield i


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("decoding", "expected"), [(0.05, [1, 1]), (0.001, [1, 2])])
def test_quick_decoding_leaves_all_cores_to_the_backbone(decoding, expected):
    cores, seen = _Cores(), []
    decode(cores, decoding)
    for _ in range(2):
        with cores.backbone(images=2):
            seen.append(torch.get_num_threads())
            time.sleep(0.06)  # 0.03 for each image, of which a second core saves half
    assert seen == expected
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_nothing_is_decoded_in_the_backbones_turn():
    cores, made = _Cores(), []
    decode(cores, 0.001)
    with cores.backbone(images=1):
        time.sleep(0.02)  # makes a turn worth it
    with cores.backbone(images=1):
        decoder = threading.Thread(target=lambda: made.extend(cores.decode([1, 2])))
        decoder.start()
        time.sleep(0.05)
        assert made == []
    decoder.join()
    assert made == [1, 2]


@pytest.mark.usefixtures("two_threads")
def test_an_error_of_the_backbone_gives_the_cores_back():
    cores = _Cores()
    for _ in range(2):
        with pytest.raises(ValueError, match="broken"), cores.backbone(images=1):
            raise ValueError("broken")
    assert torch.get_num_threads() == 2
    assert list(cores.decode([1])) == [1]
