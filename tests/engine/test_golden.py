"""The engine agrees with the authors' implementation, from the same initial weights."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from mivhead import BlockPreset, Features, Recipe
from mivhead.engine.head import Bags, Head, combine
from mivhead.engine.training import HeadTask, train
from mivhead.head.blocks import resolve_blocks
from mivhead.support import SupportSet

pytestmark = pytest.mark.usefixtures("kernels")

GOLDEN = Path(__file__).parents[1] / "golden"


class Run:
    """One golden file: its arrays, and our head set to its start."""

    def __init__(self, name: str) -> None:
        with safe_open(GOLDEN / f"golden_{name}.safetensors", "np") as file:
            config = json.loads(file.metadata()["config"])
            self.arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        presets = [
            BlockPreset(tuple(sizes), config["native_map"], name, config["tau"], heads)
            for sizes, heads in zip(config["pool_sizes"], config["heads"], strict=True)
        ]
        recipe = Recipe.paper(
            eta=config["eta"],
            temperature=config["temperature"],
            steps=config["steps"],
            learning_rate=config["lr"],
            pooling_learning_rate=config["pooling_lr"],
            momentum=config["momentum"],
        )
        labels, views = self.arrays["support.labels"], self.arrays["views.labels"]
        order = np.argsort(labels, kind="stable")
        # Which image a view was made from does not matter to the paper's recipe.
        view_rows = np.array([int(np.flatnonzero(labels[order] == c)[0]) for c in views])
        support = SupportSet(
            self.features("support")[order], labels[order], self.features("views"), view_rows
        )
        blocks = resolve_blocks(support.features, presets)
        self.head = Head.initial(blocks, recipe, seed=0)
        for key, value in self.arrays.items():
            if key.startswith("init.block"):
                number, name = key.removeprefix("init.block").split(".", 1)
                layer = self.head.layers[int(number)]
                assert layer.params[f"cap.{name}"].shape == value.shape
                layer.params[f"cap.{name}"] = value.copy()
        self.task, self.bags = HeadTask.of(support, recipe, None), Bags.from_shots(support.shots)
        self.support, self.candidates = support, self.head.prepare(support.everything)

    def features(self, part: str) -> Features:
        return Features.from_tensors(
            {
                key.removeprefix(f"{part}.").replace("cls", "token"): value
                for key, value in self.arrays.items()
                if key.startswith(f"{part}.block")
            }
        )

    def train(self) -> list[float]:
        return train(self.head.layers, self.candidates, self.task, self.head.recipe)


@pytest.fixture(params=["cnn", "vit"])
def run(request: pytest.FixtureRequest) -> Run:
    return Run(request.param)


def test_golden_training(run: Run) -> None:
    np.testing.assert_allclose(run.train(), run.arrays["losses"], atol=1e-5, rtol=0)
    embedded = run.head.embed(run.head.prepare(run.support.features))
    cosines = run.head.cosines(embedded, run.bags, run.features("query"))
    logits = combine(cosines, run.head.recipe)
    np.testing.assert_allclose(logits, run.arrays["final.query_logits"], atol=1e-3, rtol=0)


def test_golden_final_parameters(run: Run) -> None:
    run.train()
    ours, compared = run.head.params, 0
    for key, expected in run.arrays.items():
        kind, _, rest = key.partition(".block")
        if kind != "final" or "attention" in rest or "query_vectors" in rest:
            continue
        number, name = rest.split(".", 1)
        room = "pooling" if name in ("theta", "mu") else "cap"
        found = ours[f"blocks.{number}.{room}.{name}"]
        np.testing.assert_allclose(found, expected, atol=1e-4, rtol=1e-3, err_msg=key)
        compared += 1
    assert compared == len(ours)


def test_golden_attention_over_shots(run: Run) -> None:
    run.train()
    query = run.head.embed(run.head.prepare(run.features("query")))
    support = run.head.embed(run.head.prepare(run.support.features))
    for i, layer in enumerate(run.head.layers):
        found = layer.comparison(query[i], support[i], run.bags).weigh_shots(slice(None))
        for c, (first, last) in enumerate(zip(run.bags.starts, run.bags.starts[1:], strict=False)):
            ours = found[:, :, first:last].transpose(1, 0, 2)  # (query, head, shot)
            expected = run.arrays[f"final.block{i}.class{c}.attention"]
            np.testing.assert_allclose(ours, expected, atol=1e-4)


def test_golden_in_small_chunks(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mivhead.engine.plain.CHUNK_VALUES", 300)
    np.testing.assert_allclose(run.train(), run.arrays["losses"], atol=1e-5, rtol=0)
