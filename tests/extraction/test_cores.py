"""How extraction shares the cores between the backbone and the decoder."""

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from mivhead.extraction import pipeline as module
from mivhead.extraction.pipeline import _Cores


class Clock:
    """A clock that moves only when told to."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def decode(cores: _Cores, clock: Clock, seconds: float) -> Iterator[int]:
    """Decode two images; there are more."""

    def items() -> Iterator[int]:
        for i in range(3):
            clock.now += seconds
            yield i

    decoded = cores.decode(items())
    assert [next(decoded), next(decoded)] == [0, 1]
    return decoded


def pass_backbone(cores: _Cores, clock: Clock) -> int:
    """Two images in 6 seconds, of which a second core saves half; the threads that were used."""
    with cores.work("backbone", 2):
        clock.now += 6
        return torch.get_num_threads()


@pytest.mark.parametrize(("decoding", "threads"), [(2.5, [1, 1]), (1.0, [1, 2])])
def test_quick_decoding_leaves_all_cores_to_the_backbone(clock, decoding, threads):
    cores = _Cores()
    decode(cores, clock, decoding)
    assert [pass_backbone(cores, clock) for _ in range(2)] == threads
    assert torch.get_num_threads() == 2


def test_when_all_is_decoded_there_is_nothing_to_leave_a_core_to(clock):
    cores = _Cores()
    left = decode(cores, clock, 5.0)
    assert pass_backbone(cores, clock) == 1
    assert list(left) == [2]
    assert pass_backbone(cores, clock) == 2


def test_each_kind_of_work_is_weighed_by_itself(clock):
    cores = _Cores()
    decode(cores, clock, 1.0)
    assert [pass_backbone(cores, clock) for _ in range(2)] == [1, 2]
    threads = []
    for _ in range(2):  # quick work: a core more saves less than decoding takes
        with cores.work("head", 2):
            clock.now += 1
            threads.append(torch.get_num_threads())
    assert threads == [1, 1]


def test_nothing_is_decoded_in_the_backbones_turn(clock):
    cores, made = _Cores(), []
    decode(cores, clock, 1.0)
    pass_backbone(cores, clock)
    with cores.work("backbone", 1):
        decoder = threading.Thread(target=lambda: made.extend(cores.decode([1, 2])))
        decoder.start()
        time.sleep(0.05)
        assert made == []
    decoder.join()
    assert made == [1, 2]


def test_an_error_of_the_backbone_gives_the_cores_back():
    cores = _Cores()
    for _ in range(2):
        with pytest.raises(ValueError, match="broken"), cores.work("backbone", 1):
            raise ValueError("broken")
    assert torch.get_num_threads() == 2
    assert list(cores.decode([1])) == [1]
