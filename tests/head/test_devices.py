"""What depends on the device alone: the size of chunks."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from mivhead.head.bags import Bags
from mivhead.head.training import chunks


def test_chunks_are_larger_on_a_gpu():
    """Small chunks would be a million small calls."""
    bags = Bags.from_shots([30] * 50, torch.device("cpu"))
    layer = SimpleNamespace(config=SimpleNamespace(heads=32, channels=2048))

    def count(device: str) -> int:
        anchor = SimpleNamespace(device=SimpleNamespace(type=device))
        return len(list(chunks(SimpleNamespace(anchor=anchor, layers=[layer]), 1500, bags)))

    assert count("cpu") > 50 * count("cuda")
