"""Memory of a device: its own peak, and what a failed method leaves behind is given back."""

from __future__ import annotations

import pytest
import torch

from mivhead.benchmark import measuring
from mivhead.benchmark.measuring import PeakMemory, release_memory
from mivhead.benchmark.memory import available_memory, fitting_workers
from mivhead.methods.tuning import base


class FakeDevice:
    """As much of `torch.cuda` as is used."""

    def __init__(self) -> None:
        self.allocated = self.peak = 100
        self.emptied = 0

    def reset_peak_memory_stats(self) -> None:
        self.peak = self.allocated

    def memory_allocated(self) -> int:
        return self.allocated

    def max_memory_allocated(self) -> int:
        return self.peak

    def empty_cache(self) -> None:
        self.emptied += 1


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    fake = FakeDevice()
    monkeypatch.setattr(torch, "get_device_module", lambda _: fake)
    return fake


def test_the_peak_is_the_devices(device: FakeDevice) -> None:
    device.peak = 900  # of an earlier method
    memory = PeakMemory("cuda")
    device.peak = 350
    assert memory.bytes() == 250
    assert PeakMemory("cpu")._device is None


def test_memory_of_a_failed_method_is_given_back(device: FakeDevice) -> None:
    release_memory("cuda")
    assert device.emptied == 1
    release_memory("cpu")
    release_memory(None)
    assert device.emptied == 1
    assert measuring.describe_failure(torch.OutOfMemoryError("CUDA out of memory.")).startswith(
        "memory:"
    )


def test_a_gpu_takes_as_many_images_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    class Network:
        size = 224
        device = torch.device("cuda")

    assert base.chunk_size(Network(), 7) == 7  # type: ignore[arg-type]
    for free, expected in ((40e9, 239), (1e9, 32), (None, 32)):
        monkeypatch.setattr(base, "free_memory", lambda _, free=free: free)
        assert base.chunk_size(Network(), None) == expected  # type: ignore[arg-type]
        assert base.predicted_at_once(Network()) == expected  # type: ignore[arg-type]
    Network.device = torch.device("cpu")
    assert base.predicted_at_once(Network()) == base.PREDICTED  # type: ignore[arg-type]


def test_available_memory(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    2000 kB\n")
    monkeypatch.setattr("mivhead.benchmark.memory._MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr("mivhead.benchmark.memory._GROUP", tmp_path)
    assert available_memory() == 2_048_000
    (tmp_path / "memory.max").write_text("1500000\n")
    (tmp_path / "memory.current").write_text("500000\n")
    assert available_memory() == 1_000_000  # a container's own limit
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory() == 2_048_000
    assert fitting_workers(4, 10**9, 10**8) == 1
