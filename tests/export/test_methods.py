"""Every method on features exports, and its file says what the method says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

import mivhead
from mivhead import MIVClassifier, Recipe
from mivhead.ensemble.descriptors import average_pooling, window
from mivhead.errors import InputError
from mivhead.export.model import export_model
from mivhead.methods import make_method
from mivhead.methods.ncc import NearestCentroid
from tests.helpers.few_shots import DISTINCT, RIVALS, clusters, maps, quick

SHOTS = {"equal": [3, 3, 3, 3], "two classes": [2, 3], "one shot": [1] * 3}
SOME = ("miv", "miv-paper", "miv-no-attention", "svm", "knn", "fit-qda")  # where shots matter


def check(classifier, queries, path: Path, least: float = 1e-5) -> None:
    """Export, and compare every probability."""
    export = export_model(classifier, path)
    found = mivhead.load(path).predict_proba(queries)
    expected = classifier.predict_proba(queries)
    np.testing.assert_allclose(found, expected, atol=least)
    assert export.difference <= least
    assert (found.argmax(axis=1) == expected.argmax(axis=1)).all()


@pytest.mark.parametrize("name", DISTINCT)
def test_every_method(name: str, tmp_path: Path) -> None:
    check_on_maps(name, [1, 4, 2, 3], tmp_path)


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("shots", SHOTS.values(), ids=SHOTS)
def test_shots(name: str, shots: list[int], tmp_path: Path) -> None:
    check_on_maps(name, shots, tmp_path)


def check_on_maps(name: str, shots: list[int], folder: Path) -> None:
    labels = np.repeat(np.arange(len(shots)), shots)
    token = len(shots) == 4
    classifier = make_method(name, random_state=0, **quick(name))
    classifier.fit(maps(labels, token=token), labels)
    queries = maps(np.arange(len(shots)).repeat(5), seed=5, token=token, spread=3)
    check(classifier, queries, folder / "model.onnx")


@pytest.mark.parametrize("name", ["miv", *RIVALS])
def test_vectors(name: str, tmp_path: Path) -> None:
    X, y = clusters([3, 4, 2], 12)
    classifier = make_method(name, random_state=0, **quick(name)).fit(X, y)
    queries = clusters([5, 5, 5], 12, seed=3, spread=4)[0]
    check(classifier, queries, tmp_path / "model.onnx")


@pytest.mark.parametrize(
    "changes",
    [
        {"attention": "dot"},
        {"temperature_order": "inside"},
        {"centred": False},
        {"skip": False, "co_excitation": False},
        {"cross_attention": False},
        {"vote": "prior"},
        {"vote": "experts"},
    ],
    ids=str,
)
def test_options_of_the_recipe(changes: dict[str, object], tmp_path: Path) -> None:
    labels = np.repeat(np.arange(3), [2, 3, 1])
    recipe = Recipe.paper(steps=5, **changes) if "vote" not in changes else Recipe(**changes)
    classifier = MIVClassifier(recipe, random_state=0).fit(maps(labels, token=True), labels)
    queries = maps(np.arange(3).repeat(5), seed=5, token=True, spread=3)
    check(classifier, queries, tmp_path / "model.onnx")


@pytest.mark.parametrize("grid", [(9, 9), (14, 14), (10, 13), (30, 1)], ids=str)
def test_large_and_odd_maps(grid: tuple[int, int], tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    X = rng.random((8, 200, *grid), np.float32)  # more channels than components
    y = np.arange(8) % 4
    X += rng.random((4, 200, 1, 1), np.float32)[y]
    classifier = MIVClassifier(Recipe(steps=3), random_state=0).fit([X], y)
    check(classifier, mivhead.Features([X[::-1] + 0.1]), tmp_path / "model.onnx")


@pytest.mark.parametrize("size", [1e-20, 1e20])
def test_features_of_extreme_size(size: float, tmp_path: Path) -> None:
    X, y = clusters([3, 4, 2], 12)
    queries = clusters([5, 5, 5], 12, seed=3, spread=4)[0]
    scale = np.float32(size)
    for name in ("miv", "ncc"):
        classifier = make_method(name, random_state=0).fit(X * scale, y)
        assert any(classifier.scale_)
        check(classifier, queries * scale, tmp_path / "model.onnx")


def test_distances_are_computed_in_plain_operations(tmp_path: Path) -> None:
    """Exporters compute `cdist` with p = 1 wrongly, so it is written out: one Abs per block."""
    labels = np.repeat(np.arange(3), 2)
    classifier = MIVClassifier(Recipe.paper(steps=2), random_state=0).fit(maps(labels), labels)
    export_model(classifier, tmp_path / "model.onnx")
    graph = onnx.load(tmp_path / "model.onnx").graph
    operations = [node.op_type for node in graph.node]
    assert operations.count("Abs") == len(classifier.blocks_)
    assert {node.domain for node in graph.node} == {""}
    # onnxruntime computes products with one-dimensional factors wrongly after a Transpose.
    flat = {each.name for each in graph.initializer if len(each.dims) == 1}
    products = [node for node in graph.node if node.op_type == "MatMul"]
    assert not any(flat & set(node.input) for node in products)


def test_support_patches_are_not_in_the_file(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    X = rng.random((40, 16, 20, 20), np.float32)
    classifier = MIVClassifier(Recipe.paper(steps=1), random_state=0).fit([X], np.arange(40) % 2)
    export = export_model(classifier, tmp_path / "model.onnx")
    assert export.bytes < X.nbytes / 20


@pytest.mark.parametrize(
    ("storage", "share", "least"), [("half", 0.52, 1e-3), ("int8", 0.28, 0.02)]
)
def test_smaller_storage(storage, share: float, least: float, tmp_path: Path) -> None:
    X, y = clusters([3, 4, 2], 256)
    classifier = MIVClassifier(random_state=0).fit(X, y)
    whole = export_model(classifier, tmp_path / "whole.onnx").bytes
    export = export_model(classifier, tmp_path / "small.onnx", storage=storage)
    assert export.bytes < share * whole
    queries = clusters([5, 5, 5], 256, seed=3, spread=4)[0]
    found = mivhead.load(tmp_path / "small.onnx").predict_proba(queries)
    expected = classifier.predict_proba(queries)
    np.testing.assert_allclose(found, expected, atol=least)
    assert np.abs(found - expected).max() > 1e-7  # it is rounded


def test_windows_are_those_of_pytorch() -> None:
    for length in range(1, 15):
        for count in range(1, length + 1):
            x = torch.arange(float(length)).view(1, 1, length, 1)
            expected = torch.nn.functional.adaptive_max_pool2d(x, (count, 1)).flatten().tolist()
            assert [window(i, length, count)[-1] for i in range(count)] == expected


def test_average_pooling_is_that_of_pytorch() -> None:
    x = torch.rand(2, 3, 10, 13)
    expected = torch.nn.functional.adaptive_avg_pool2d(x, (7, 7)).flatten(2)
    found = x.flatten(2) @ torch.as_tensor(average_pooling((10, 13)))
    torch.testing.assert_close(found.float(), expected)


class Own:
    """A method of the user's."""

    def fit(self, X, y):
        self.classes_ = np.unique(y)
        return self

    def predict_proba(self, X):
        return np.full((len(X), len(self.classes_)), 1 / len(self.classes_))


def test_a_method_of_ones_own_cannot_be_exported(tmp_path: Path) -> None:
    X, y = clusters([2, 2], 4)
    classifier = make_method(f"{__name__}:Own").fit(X, y)
    with pytest.raises(InputError, match="Python code of your own"):
        export_model(classifier, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_a_built_in_method_without_a_formula_says_so(tmp_path: Path, monkeypatch) -> None:
    X, y = clusters([2, 2], 4)
    classifier = make_method("ncc").fit(X, y)
    monkeypatch.delattr(type(classifier), "_graph")
    with pytest.raises(InputError, match=r"ncc cannot be exported: its class has no `_graph`"):
        export_model(classifier, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_the_formula_of_a_class_is_not_that_of_its_subclass(tmp_path: Path) -> None:
    class Other(NearestCentroid):
        def _score(self, x):
            return -super()._score(x)

    X, y = clusters([2, 2], 4)
    with pytest.raises(InputError, match="Other is not a registered method"):
        export_model(Other().fit(X, y), tmp_path / "model.onnx")
