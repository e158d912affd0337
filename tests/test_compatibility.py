"""What 0.1.0 and 0.2.0 wrote, offered and exported still works (docs/reference/compatibility.md).

The files under `tests/golden` were written by the versions that they name. Models of 0.1.0 are read
in `tests/model`, the run folders of both in `tests/benchmark`. 0.2.0 had every option of 0.1.0.
"""

from __future__ import annotations

import argparse
import shlex
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import mivhead
from mivhead import Features, FeatureTable
from mivhead.cli.main import build_parser
from mivhead.cli.options import REMOVED
from mivhead.diagnostics.evaluation import Mistake
from tests.helpers.tiny_backbone import TinyBackbone

GOLDEN = Path(__file__).parent / "golden"
MODEL = GOLDEN / "model-0.2.0.miv"


@pytest.fixture(scope="module")
def expected() -> dict[str, np.ndarray]:
    """Features of nine images, and what 0.2.0 said about them."""
    return load_file(f"{MODEL}.expected.safetensors")


@pytest.fixture(scope="module")
def features(expected: dict[str, np.ndarray]) -> Features:
    return Features(
        [
            expected["block0.map"],
            expected["block1.map"],
            {"token": expected["block2.token"]},
        ]
    )


def test_a_model_of_0_2_0_gives_the_same_answers(
    features: Features, expected: dict[str, np.ndarray]
) -> None:
    model = mivhead.load(MODEL)
    found = model.classify(features)
    logits = np.asarray(model.classifier_.logits(features))
    np.testing.assert_allclose(logits, expected["logits"], atol=1e-4)
    np.testing.assert_allclose([each.unknown for each in found], expected["unknown"], atol=1e-3)
    names = ["none of these", *["blue"] * 2, *["green"] * 3, *["red"] * 3]
    assert [each.decision for each in found] == names


def test_a_model_of_0_2_0_can_be_changed(tmp_path: Path) -> None:
    model = mivhead.load(MODEL, backbone=TinyBackbone(token=True))
    assert [change.text for change in model.history_] == ["removed the shot red/1.png"]
    assert model.shots_.counts == {"blue": 3, "green": 3, "red": 2}
    model.remove("green/2.png")
    model.rename("blue", "azure")
    model.save(tmp_path / "m.miv")
    again = mivhead.load(tmp_path / "m.miv")
    assert again.shots_.counts == {"azure": 3, "green": 2, "red": 2}
    assert len(again.history_) == 3


def test_an_exported_model_of_0_2_0_runs() -> None:
    model = mivhead.load(GOLDEN / "model-0.2.0.onnx")
    blue = np.full((20, 24, 3), (50, 60, 230), np.uint8)
    assert model.predict([blue]).tolist() == ["blue"]


@pytest.mark.parametrize("version", ["0.1.0", "0.2.0"])
def test_features_are_read(version: str) -> None:
    table = FeatureTable.load(GOLDEN / f"features-{version}.safetensors")
    rng = np.random.default_rng(0)  # as when they were written, the views first
    drawn = [rng.integers(0, 9, shape) for n in (2, 3) for shape in ((n, 4, 2, 2), (n, 3))]
    for features, (maps, tokens) in ((table.views, drawn[:2]), (table.features, drawn[2:])):
        first, second = features.blocks
        np.testing.assert_array_equal(first.map, maps)
        np.testing.assert_array_equal(second.token, tokens)
    assert table.ids == ("a/1.png", "b/1.png", "ü/1.png")
    assert table.labels == ("a", "b", "ü")
    assert table.view_of.tolist() == [0, 2]


def options(parser: argparse.ArgumentParser, command: str = "miv") -> dict[str, set[str]]:
    """Return the options of every command, by its name."""
    found = {command: {text for action in parser._actions for text in action.option_strings}}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                found |= options(inner, f"{command} {name}")
    return found


def test_every_option_of_0_2_0_is_known() -> None:
    """An option that no longer does anything stays, hidden, and says what to use instead."""
    known = options(build_parser())
    for line in (GOLDEN / "options-0.2.0.txt").read_text().splitlines():
        words = line.split()
        command = " ".join(word for word in words if not word.startswith("-"))
        if command.split()[-1] in REMOVED:
            continue
        missing = {word for word in words if word.startswith("-")} - known.get(command, set())
        assert command in known, f"`{command}` is gone"
        assert not missing, f"`{command}` does not know {', '.join(sorted(missing))}"


@pytest.mark.parametrize("line", ["bench open-set --data sets -o open", "bench open-set"])
def test_a_command_that_was_removed_names_its_successor(line: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(line.split())
    error = capsys.readouterr().err
    successor = "bench run --protocol '10-way 5-shot, open'"
    assert f"miv {successor}" in error
    args = build_parser().parse_args(shlex.split(f"{successor} -o run"))
    assert args.run is not None


def test_every_public_name_of_0_2_0_can_be_imported() -> None:
    for name in (GOLDEN / "names-0.2.0.txt").read_text().split():
        module, _, attribute = name.rpartition(".")
        assert hasattr(import_module(module), attribute), name


def test_mistakes_can_still_be_asked_whether_they_are_confident() -> None:
    mistake = Mistake("1.jpg", "a", "b", 0.6)
    with pytest.warns(FutureWarning, match="mislabelled"):
        assert mistake.confident
