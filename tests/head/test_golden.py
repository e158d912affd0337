"""The head agrees with the authors' implementation, from the same initial weights."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from mivhead.backbones.preset import BlockPreset
from mivhead.features import Features
from mivhead.head.bags import Bags
from mivhead.head.blocks import resolve_blocks
from mivhead.head.head import MIVHead, rows
from mivhead.head.logits import combine
from mivhead.head.recipe import Recipe
from mivhead.head.training import CHUNK_VALUES, train

GOLDEN = Path(__file__).parents[1] / "golden"


class Run:
    """One golden file: its tensors, its configuration, and our head set to its start."""

    def __init__(self, name: str) -> None:
        with safe_open(GOLDEN / f"golden_{name}.safetensors", "pt") as file:
            self.config = json.loads(file.metadata()["config"])
            self.tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        config = self.config
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
        blocks = resolve_blocks(self.features("support"), presets)
        self.head = MIVHead(blocks, recipe, torch.Generator().manual_seed(0))
        state = self.head.state_dict()
        for key, value in self.tensors.items():
            if key.startswith("init.block"):
                number, name = key.removeprefix("init.block").split(".", 1)
                assert f"blocks.{number}.cap.{name}" in state
                state[f"blocks.{number}.cap.{name}"] = value
        self.head.load_state_dict(state)

        self.candidates = self.head.prepare(
            Features.concat([self.features("support"), self.features("views")])
        )
        support, views = self.tensors["support.labels"], self.tensors["views.labels"]
        self.labels = torch.cat([support, views])
        self.bags = Bags.from_labels(support, int(support.max()) + 1)
        self.shots = len(support)

    def features(self, part: str) -> Features:
        return Features.from_tensors(
            {
                key.removeprefix(f"{part}.").replace("cls", "token"): value
                for key, value in self.tensors.items()
                if key.startswith(f"{part}.block")
            }
        )

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
    ours = run.head.state_dict()
    compared = 0
    for key, expected in run.tensors.items():
        kind, _, rest = key.partition(".block")
        if kind != "final" or "attention" in rest or "query_vectors" in rest:
            continue
        number, name = rest.split(".", 1)
        room = "pooling" if name in ("theta", "mu") else "cap"
        torch.testing.assert_close(
            ours[f"blocks.{number}.{room}.{name}"], expected, atol=1e-4, rtol=1e-3
        )
        compared += 1
    assert compared == len(ours)


def test_golden_in_small_chunks(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CHUNK_VALUES, "cpu", 3 * 64 * len(run.bags.real))
    losses = train(run.head, run.candidates, run.labels, run.bags)
    torch.testing.assert_close(
        torch.tensor(losses, dtype=torch.float64), run.tensors["losses"], atol=1e-5, rtol=0
    )
