"""Model files of every method: exact round trips, and nothing forged gets in."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mivhead import Features
from mivhead._util import files
from mivhead.classifier import FeatureClassifier
from mivhead.errors import InputError
from mivhead.methods import METHODS, make_method, method_name
from tests.helpers.few_shots import DISTINCT, RIVALS, clusters, maps, quick


def fitted(name: str, X: Any, y: Any) -> FeatureClassifier:
    return make_method(name, random_state=0, **quick(name)).fit(X, y)


def restore(name: str, classes: Any, config: Any, tensors: Any) -> FeatureClassifier:
    classifier = make_method(name)
    classifier.classes_ = classes
    classifier._restore(config, tensors)
    return classifier


@pytest.mark.parametrize(
    ("name", "token"),
    [*((name, False) for name in DISTINCT), ("miv", True), ("miv-paper", True), ("ncc", True)],
)
def test_round_trip_through_a_file_is_exact(name: str, token: bool, tmp_path: Path) -> None:
    _, y = clusters([3, 1, 2], 4)
    X, Q = maps(y, 1, token=token), maps(y, 2, token=token)
    before = fitted(name, X, y)
    config, tensors = before._state()
    files.write(tmp_path / "model", tensors, config)
    tensors, config = files.read(tmp_path / "model")
    after = restore(name, before.classes_, config, tensors)
    np.testing.assert_array_equal(before.logits(Q), after.logits(Q))
    assert after.layout_ == before.layout_
    assert after.n_features_in_ == before.n_features_in_
    assert method_name(after) == name
    with pytest.raises(InputError, match="other blocks or channels"):
        after.predict(Features(Q.blocks[:1]))


@pytest.mark.parametrize("name", RIVALS)
def test_hyperparameters_come_back(name: str) -> None:
    X, y = clusters([3, 2], 4)
    changed = {
        key: value * 2
        for key, value in METHODS[name].hyperparameters().items()
        if type(value) in (int, float)
    }
    changed |= quick(name)
    before = make_method(name, **changed, use_views=True).fit(X, y)
    config, tensors = before._state()
    after = restore(name, before.classes_, {**config, "recipe": None}, tensors)
    assert after.get_params() == before.get_params()


FORGERIES = {
    "unknown parameter": lambda c, _: c["params"].update(evil=1),
    "parameter of another type": lambda c, _: c["params"].update(use_views="yes"),
    "no parameters": lambda c, _: c.pop("params"),
    "unknown key": lambda c, _: c.update(code="import os"),
    "no layout": lambda c, _: c.pop("layout"),
    "layout of text": lambda c, _: c.update(layout="wide"),
    "layout of negative size": lambda c, _: c["layout"].update({"block0.token": [-4]}),
    "layout of huge size": lambda c, _: c["layout"].update({"block0.token": [2**40]}),
    "layout of another width": lambda c, _: c["layout"].update({"block0.token": [5]}),
    "layout of odd names": lambda c, _: c["layout"].update({"block7.token": [4]}),
    "tensor missing": lambda _, t: t.pop(next(iter(t))),
    "tensor unexpected": lambda _, t: t.update({"params.more": np.ones(1)}),
    "tensor of no group": lambda _, t: t.update({"more": np.ones(1)}),
    "tensor of another shape": lambda _, t: t.update({k: v[..., None] for k, v in t.items()}),
    "tensor of another type": lambda _, t: t.update(
        {k: v.astype(np.float16) for k, v in t.items()}
    ),
    "tensor with NaN": lambda _, t: t.update(
        {k: v * np.nan for k, v in t.items() if v.dtype.kind == "f"}
    ),
}


def check_refusal(name: str, before: FeatureClassifier, forgery: str) -> None:
    config, tensors = before._state()
    FORGERIES[forgery](config, tensors)
    with pytest.raises(InputError):
        restore(name, before.classes_, config, tensors)


@pytest.mark.parametrize("forgery", FORGERIES)
def test_forged_state_is_refused(forgery: str) -> None:
    check_refusal("ncc", fitted("ncc", *clusters([3, 2, 2], 4)), forgery)


@pytest.mark.parametrize("name", RIVALS)
def test_forged_tensors_of_every_method_are_refused(name: str) -> None:
    before = fitted(name, *clusters([3, 2, 2], 4))
    for forgery in FORGERIES:
        if forgery.startswith("tensor"):
            check_refusal(name, before, forgery)


@pytest.mark.parametrize("name", ["knn", "tip-adapter", "svm", "fit-qda"])
def test_class_numbers_out_of_range_are_refused(name: str) -> None:
    X, y = clusters([3, 2, 2], 4)
    before = fitted(name, X, y)
    config, tensors = before._state()
    tensors["params.labels"] = tensors["params.labels"] + 1
    with pytest.raises(InputError, match="class numbers below 3"):
        restore(name, before.classes_, config, tensors)


@pytest.mark.parametrize("name", RIVALS)
def test_other_number_of_classes_is_refused(name: str) -> None:
    X, y = clusters([3, 2, 2], 4)
    before = fitted(name, X, y)
    with pytest.raises(InputError, match=r"expected|class numbers"):
        restore(name, before.classes_[:2], *before._state())


def test_ablation_checks_that_blocks_fit_the_layout() -> None:
    _, y = clusters([2, 2], 4)
    before = fitted("miv-blocks1", maps(y), y)
    config, tensors = before._state()
    config["recipe"]["last_blocks"] = 2
    with pytest.raises(InputError, match="do not fit the layout"):
        restore("miv-blocks1", before.classes_, config, tensors)
    config["recipe"]["last_blocks"] = 3
    with pytest.raises(InputError, match="last_blocks is 3, but the features have only 2"):
        restore("miv-blocks1", before.classes_, config, tensors)
    config["recipe"]["last_blocks"], config["layout"] = 1, "wide"
    with pytest.raises(InputError, match="layout"):
        restore("miv-blocks1", before.classes_, config, tensors)
