"""The engine agrees with the authors' implementation, from the same initial weights."""

import numpy as np
import pytest

from mivhead.engine.head import Bags, Head, combine
from mivhead.engine.training import HeadTask, train
from mivhead.head.blocks import resolve_blocks
from mivhead.support import SupportSet
from tests.helpers.golden import GoldenRun

pytestmark = pytest.mark.usefixtures("kernels")


class Run(GoldenRun):
    """One golden file: its arrays, and our head set to its start."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "np")
        labels, views = self.tensors["support.labels"], self.tensors["views.labels"]
        order = np.argsort(labels, kind="stable")
        # Which image a view was made from does not matter to the paper's recipe.
        view_rows = np.array([int(np.flatnonzero(labels[order] == c)[0]) for c in views])
        support = SupportSet(
            self.features("support")[order], labels[order], self.features("views"), view_rows
        )
        self.head = Head.initial(
            resolve_blocks(support.features, self.presets), self.recipe, seed=0
        )
        for number, name, value in self.initial():
            params = self.head.layers[number].params
            assert params[name].shape == value.shape
            params[name] = value.copy()
        self.task = HeadTask.of(support, self.recipe, None)
        self.bags = Bags.from_shots(support.shots)
        self.support, self.candidates = support, self.head.prepare(support.everything)

    def train(self) -> list[float]:
        return train(self.head.layers, self.candidates, self.task, self.head.recipe)


@pytest.fixture(params=["cnn", "vit"])
def run(request: pytest.FixtureRequest) -> Run:
    return Run(request.param)


def test_golden_training(run: Run) -> None:
    np.testing.assert_allclose(run.train(), run.tensors["losses"], atol=1e-5, rtol=0)
    embedded = run.head.embed(run.head.prepare(run.support.features))
    cosines = run.head.cosines(embedded, run.bags, run.features("query"))
    logits = combine(cosines, run.head.recipe)
    np.testing.assert_allclose(logits, run.tensors["final.query_logits"], atol=1e-3, rtol=0)


def test_golden_final_parameters(run: Run) -> None:
    run.train()
    ours, expected = run.head.params, run.final()
    assert ours.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(ours[key], value, atol=1e-4, rtol=1e-3, err_msg=key)


def test_golden_attention_over_shots(run: Run) -> None:
    run.train()
    query = run.head.embed(run.head.prepare(run.features("query")))
    support = run.head.embed(run.head.prepare(run.support.features))
    for i, layer in enumerate(run.head.layers):
        found = layer.comparison(query[i], support[i], run.bags).weigh_shots(slice(None))
        for c, (first, last) in enumerate(zip(run.bags.starts, run.bags.starts[1:], strict=False)):
            ours = found[:, :, first:last].transpose(1, 0, 2)  # (query, head, shot)
            expected = run.tensors[f"final.block{i}.class{c}.attention"]
            np.testing.assert_allclose(ours, expected, atol=1e-4)


def test_golden_in_small_chunks(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mivhead.engine.plain.CHUNK_VALUES", 300)
    np.testing.assert_allclose(run.train(), run.tensors["losses"], atol=1e-5, rtol=0)
