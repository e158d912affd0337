"""What depends on the device alone: the size of chunks, and where double precision is used."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from mivhead.kernels import backend


def test_chunks_are_larger_on_a_gpu():
    """Small chunks would be a million small kernels."""
    values = 50 * 32 * 100  # a task of 50 ways
    counts = [len(list(backend.chunks(1500, values, device))) for device in ("cpu", "cuda")]
    assert counts[0] > 100 * counts[1]


def test_apples_gpus_predict_in_single_precision():
    class Mps:
        """As much of a tensor as is needed to choose."""

        device = SimpleNamespace(type="mps")

        def softmax(self, dim):
            return f"single, {dim}"

        def sigmoid(self):
            return "single"

    with torch.no_grad():
        assert backend.softmax(Mps(), 1) == "single, 1"
        assert backend.sigmoid(Mps()) == "single"
        x = torch.tensor([0.1, 0.2, 0.7])
        torch.testing.assert_close(backend.softmax(x, 0), x.double().softmax(0).float())
