"""The head agrees with the authors' implementation, from the same initial weights."""

import pytest
import torch

from mivhead.features import Features
from mivhead.head.recipe import resolve_blocks
from mivhead_bench.head.bags import Bags
from mivhead_bench.head.head import MIVHead, rows
from mivhead_bench.head.logits import combine
from mivhead_bench.head.training import CHUNK_VALUES, train
from tests.helpers.golden import GoldenRun


class Run(GoldenRun):
    """One golden file: its tensors, and our head set to its start."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "pt")
        blocks = resolve_blocks(self.features("support"), self.presets)
        self.head = MIVHead(blocks, self.recipe, torch.Generator().manual_seed(0))
        state = self.head.state_dict()
        for number, name, value in self.initial():
            assert f"blocks.{number}.{name}" in state
            state[f"blocks.{number}.{name}"] = value
        self.head.load_state_dict(state)

        self.candidates = self.head.prepare(
            Features.concat([self.features("support"), self.features("views")])
        )
        support, views = self.tensors["support.labels"], self.tensors["views.labels"]
        self.labels = torch.cat([support, views])
        self.bags = Bags.from_labels(support, int(support.max()) + 1)
        self.shots = len(support)

    def pseudo_query_order(self) -> torch.Tensor:
        """The file's order: by class, within a class originals then views."""
        return self.labels.argsort(stable=True)


@pytest.fixture(params=["cnn", "vit"])
def run(request: pytest.FixtureRequest) -> Run:
    return Run(request.param)


def test_golden_start(run: Run) -> None:
    with torch.no_grad():
        for i, layer in enumerate(run.head.layers):
            vectors = layer.pooling(run.candidates[i])[: run.shots]
            expected = run.tensors[f"step0.block{i}.support_vectors"]
            torch.testing.assert_close(vectors, expected, atol=1e-5, rtol=1e-5)
        embedded = run.head.embed(run.candidates)
        cosines = run.head(embedded, rows(embedded, slice(run.shots)), run.bags)
    logits = combine(cosines, run.head.recipe)
    expected = run.tensors["step0.pseudo_query_logits"]
    torch.testing.assert_close(logits[run.pseudo_query_order()], expected, atol=1e-4, rtol=0)


def test_golden_training(run: Run) -> None:
    losses = train(run.head, run.candidates, run.labels, run.bags)
    torch.testing.assert_close(
        torch.tensor(losses, dtype=torch.float64), run.tensors["losses"], atol=1e-5, rtol=0
    )

    with torch.no_grad():
        embedded = run.head.embed(run.candidates)
        support = rows(embedded, slice(run.shots))
        query_candidates = run.head.prepare(run.features("query"))
        query = run.head.embed(query_candidates)
        logits = combine(run.head(query, support, run.bags), run.head.recipe)
        for i, layer in enumerate(run.head.layers):
            vectors = layer.pooling(query_candidates[i])
            expected = run.tensors[f"final.block{i}.query_vectors"]
            torch.testing.assert_close(vectors, expected, atol=1e-4, rtol=1e-4)
            attention = layer.cap.attention(query[i], support[i], run.bags)
            for c, shots in enumerate(run.bags.shots.tolist()):
                ours = attention[:, c, :, :shots].transpose(0, 1)  # (query, head, shot)
                expected = run.tensors[f"final.block{i}.class{c}.attention"]
                torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(logits, run.tensors["final.query_logits"], atol=1e-3, rtol=0)


def test_golden_final_parameters(run: Run) -> None:
    train(run.head, run.candidates, run.labels, run.bags)
    ours, expected = run.head.state_dict(), run.final()
    assert ours.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(ours[key], value, atol=1e-4, rtol=1e-3)


def test_golden_in_small_chunks(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CHUNK_VALUES, "cpu", 3 * 64 * len(run.bags.real))
    losses = train(run.head, run.candidates, run.labels, run.bags)
    torch.testing.assert_close(
        torch.tensor(losses, dtype=torch.float64), run.tensors["losses"], atol=1e-5, rtol=0
    )
