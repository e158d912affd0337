"""The head agrees with the authors' implementation, from the same initial weights."""

from dataclasses import replace

import numpy as np
import pytest

from mivhead.features import SupportSet
from mivhead.head.components import bag_starts
from mivhead.head.formulas import combine
from mivhead.head.recipe import resolve_blocks
from mivhead.head.train import HeadTask, Trainer, train
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
        blocks = resolve_blocks(support.features, self.presets)
        self.head = Trainer(support, blocks, replace(self.recipe, steps=0), 0).fit()[0].head
        for number, name, value in self.initial():
            params = self.head.layers[number].params
            assert params[name].shape == value.shape
            params[name] = value.copy()
        self.task = HeadTask.of(support, self.recipe, None)
        self.starts = bag_starts(support.shots)
        pairs = zip(self.head.layers, support.everything.blocks, strict=True)
        self.support, self.candidates = support, [layer.prepare(block) for layer, block in pairs]

    def train(self) -> list[float]:
        return train(self.head.layers, self.candidates, self.task, self.recipe)


@pytest.fixture(params=["cnn", "vit"])
def run(request: pytest.FixtureRequest) -> Run:
    return Run(request.param)


def test_golden_training(run: Run) -> None:
    np.testing.assert_allclose(run.train(), run.tensors["losses"], atol=1e-5, rtol=0)
    embedded = run.head.embed(run.support.features)
    cosines = run.head.cosines(embedded, run.starts, run.features("query"))
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
    query = run.head.embed(run.features("query"))
    support = run.head.embed(run.support.features)
    for i, layer in enumerate(run.head.layers):
        found = layer.comparison(query[i], support[i], run.starts).attention()
        for c, (first, last) in enumerate(zip(run.starts, run.starts[1:], strict=False)):
            ours = found[:, :, first:last].transpose(1, 0, 2)  # (query, head, shot)
            expected = run.tensors[f"final.block{i}.class{c}.attention"]
            np.testing.assert_allclose(ours, expected, atol=1e-4)


def test_golden_in_small_chunks(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mivhead.head.formulas.CHUNK_VALUES", 300)
    np.testing.assert_allclose(run.train(), run.tensors["losses"], atol=1e-5, rtol=0)
