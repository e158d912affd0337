"""Taps: copies in the right order, from one forward pass that stops after the deepest."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mivhead.backbones.taps import Taps
from mivhead.errors import InputError


def test_taps_are_copies_that_later_layers_cannot_change() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 3))
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        before, after = Taps(model, ["0", "1"])(x)
        assert before.min() < 0 <= after.min()
        torch.testing.assert_close(before, model[0](x))
        torch.testing.assert_close(after, before.relu())


def test_taps_stop_after_the_deepest() -> None:
    class Mine(nn.Module):
        def forward(self, _x: torch.Tensor) -> torch.Tensor:
            raise AssertionError("not needed for the taps")

    model = nn.Sequential(nn.ReLU(), Mine())
    assert Taps(model, ["0"])(torch.ones(1))[0] == 1


def test_taps_in_the_wrong_order_are_refused() -> None:
    model = nn.Sequential(nn.ReLU(), nn.ReLU())
    with pytest.raises(InputError, match="order in which they run"):
        Taps(model, ["1", "0"])(torch.ones(1))


def test_taps_of_one_model_do_not_disturb_each_other() -> None:
    model = nn.Sequential(nn.ReLU(), nn.Tanh())
    first, second = Taps(model, ["0"]), Taps(model, ["1"])
    assert second(torch.ones(1))[0] == torch.ones(1).tanh()
    assert first(torch.ones(1))[0] == 1
