"""What depends on the device alone: the size of chunks, and the memory that they take."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mivhead.head.recipe import BlockConfig, Recipe
from mivhead_bench.head.bags import Bags
from mivhead_bench.head.head import MIVHead
from mivhead_bench.head.pooling import Candidates
from mivhead_bench.head.training import COPIES, chunks


def largest(device: str, shots: list[int], *channels: int) -> int:
    """Queries of the largest chunk."""
    bags = Bags.from_shots(shots, torch.device("cpu"))
    layers = [SimpleNamespace(config=SimpleNamespace(heads=c // 64, channels=c)) for c in channels]
    head = SimpleNamespace(anchor=SimpleNamespace(device=torch.device(device)), layers=layers)
    return max(each.stop - each.start for each in chunks(head, 10_000, bags))


def test_chunks_are_larger_on_a_gpu():
    """Small chunks would be a million small calls."""
    assert largest("cuda", [10] * 50, 1024, 2048) > 30 * largest("cpu", [10] * 50, 1024, 2048)


@pytest.mark.parametrize(
    ("shots", "channels"), [([10] * 50, (1024, 2048)), ([100] * 5, (1024, 2048)), ([2], [384] * 4)]
)
def test_a_chunk_takes_at_most_four_gigabytes_of_a_gpu(shots, channels):
    """CUDA's gradient of L1 distances writes queries x shots x channels, once per block."""
    queries = largest("cuda", shots, *channels)
    prototypes = sum(len(shots) * max(c // 64 * max(shots), c) for c in channels)
    values = COPIES * prototypes + sum(shots) * max(channels)
    assert 4 * queries * values <= 2**32


def test_what_a_step_keeps_of_prototypes():
    """`COPIES` is what autograd saves, plus what is alive at the end of the forward pass."""
    recipe, channels = Recipe.paper(), 64
    blocks = [BlockConfig(channels, 1, None, True, form="vit")]
    head = MIVHead(blocks, recipe, torch.Generator().manual_seed(0))
    bags = Bags.from_shots([2] * 30, torch.device("cpu"))
    tokens = torch.randn(200, channels, generator=torch.Generator().manual_seed(1))
    embedded = head.embed([Candidates((), None, tokens)])
    kept: dict[int, int] = {}

    def note(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() // 4
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        head(embedded, [each.rows(slice(60)) for each in embedded], bags)
    copies = sum(kept.values()) / (200 * 30 * channels)
    assert 2 < copies < COPIES
