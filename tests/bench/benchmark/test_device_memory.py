"""Memory of a device: its own peak, and what a failed method leaves behind is given back."""

from __future__ import annotations

import pytest
import torch

from mivhead_bench.benchmark.measuring import describe_failure
from mivhead_bench.benchmark.memory import PeakMemory, available_memory, fitting_workers


class FakeDevice:
    """As much of `torch.cuda` as is used."""

    def __init__(self) -> None:
        self.allocated = self.peak = 100

    def reset_peak_memory_stats(self) -> None:
        self.peak = self.allocated

    def memory_allocated(self) -> int:
        return self.allocated

    def max_memory_allocated(self) -> int:
        return self.peak


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


def test_a_lack_of_memory_is_named() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory.")
    assert describe_failure(error).startswith("memory:")


def test_available_memory(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    2000 kB\n")
    monkeypatch.setattr("mivhead_bench.benchmark.memory._TOTAL", tmp_path / "meminfo")
    monkeypatch.setattr("mivhead_bench.benchmark.memory._GROUP", tmp_path)
    assert available_memory() == 2_048_000
    (tmp_path / "memory.max").write_text("1500000\n")
    (tmp_path / "memory.current").write_text("500000\n")
    assert available_memory() == 1_000_000  # a container's own limit
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory() == 2_048_000
    assert fitting_workers(4, 10**9, 10**8) == 1
