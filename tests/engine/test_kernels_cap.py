"""Compiled cross-attention pooling against the formulas, query by query, in double precision."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mivhead.kernels.functions import KINDS, CapCosine, Setting
from tests.helpers.kernel_numbers import close, drawn

STARTS = torch.tensor([0, 3, 4, 9, 11])  # 3, 1, 5 and 2 shots
SUPPORT, CHANNELS, HEADS = 11, 24, 4


def inputs(queries: int, gated: bool) -> list[Tensor | None]:
    """Keys, values and gates of queries; keys and values of shots."""
    of_queries = [drawn(queries, CHANNELS, seed=s) for s in range(3)]
    of_shots = [drawn(SUPPORT, CHANNELS, seed=s) for s in (3, 4)]
    n = min(queries, SUPPORT)
    of_queries[0][:n] = of_shots[0][:n]  # |x - y| has no slope where a query is a shot itself
    return [*of_queries[:2], of_queries[2].sigmoid() if gated else None, *of_shots]


def hidden_shots(queries: int) -> Tensor:
    return torch.tensor([0, 1, 2, -1, 4, 5, 6, 7, 8, *[-1] * queries][:queries])


def plain_cosines(key, value, gate, shot_key, shot_value, hidden, setting: Setting) -> Tensor:
    """Query by query and class by class."""
    d, rows = CHANNELS // HEADS, []
    for q in range(len(key)):
        prototypes = []
        for start, end in itertools.pairwise(STARTS.tolist()):
            seen = [i for i in range(start, end) if hidden is None or i != int(hidden[q])]
            parts = []
            for part in (slice(h * d, (h + 1) * d) for h in range(HEADS)):
                y, z, w = key[q, part], shot_key[seen][:, part], shot_value[seen][:, part]
                scores = {
                    "uniform": torch.zeros(len(seen), dtype=key.dtype),
                    "l1": (y - z).abs().sum(dim=1),
                    "dot": z @ y,
                }[setting.attention]
                weights = torch.softmax(setting.factor * scores, dim=0)
                pooled = weights @ w
                if gate is not None:
                    pooled = pooled * gate[q, part]
                parts.append(pooled + weights @ z if setting.skip else pooled)
            prototypes.append(torch.cat(parts))
        mean = sum(prototypes) / len(prototypes) if setting.centred else 0
        vector = value[q] if gate is None else value[q] * gate[q]
        vector = (vector + key[q] if setting.skip else vector) - mean
        cosines = [F.cosine_similarity(vector, p - mean, dim=0) for p in prototypes]
        rows.append(torch.stack(cosines))
    return torch.stack(rows)


@pytest.mark.parametrize("attention", KINDS)
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("hiding", [True, False])
def test_cosines_with_prototypes_and_their_gradients(attention, skip, gated, centred, hiding):
    queries = 37  # no multiple of the lanes of a vector
    setting = Setting(HEADS, attention, -0.3 if attention == "l1" else 0.4, skip, centred, 1e-12)
    hidden = hidden_shots(queries) if hiding else None
    given = inputs(queries, gated)
    single = [None if t is None else t.clone().requires_grad_() for t in given]
    double = [None if t is None else t.double().requires_grad_() for t in given]
    ours = CapCosine.apply(*single, STARTS, hidden, setting)
    plain = plain_cosines(*double, hidden, setting)
    close(ours, plain)
    weight = drawn(*ours.shape, seed=5)
    (ours * weight).sum().backward()
    (plain * weight).sum().backward()
    for mine, theirs in zip(single, double, strict=True):
        if mine is not None:
            expected = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
            close(mine.grad, expected)


def test_cosines_on_any_number_of_threads(threads):
    setting = Setting(HEADS, "l1", -0.3, True, True, 1e-12)
    given = [t.requires_grad_() for t in inputs(50, gated=True)]
    ours = CapCosine.apply(*given, STARTS, None, setting)
    close(ours, plain_cosines(*(t.double() for t in given), None, setting))
    gradients = torch.autograd.grad(ours.sum(), given)
    torch.set_num_threads(1)
    alone = CapCosine.apply(*given, STARTS, None, setting)
    assert torch.equal(ours, alone)
    for mine, expected in zip(gradients, torch.autograd.grad(alone.sum(), given), strict=True):
        close(mine, expected.double())


def test_a_query_does_not_see_other_queries():
    setting = Setting(HEADS, "l1", -0.3, True, True, 1e-12)
    *of_queries, shot_key, shot_value = inputs(37, gated=True)
    together = CapCosine.apply(*of_queries, shot_key, shot_value, STARTS, None, setting)
    for q in range(37):
        single = [t[q : q + 1] for t in of_queries]
        alone = CapCosine.apply(*single, shot_key, shot_value, STARTS, None, setting)
        assert torch.equal(alone[0], together[q])
