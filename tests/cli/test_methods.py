"""`miv methods`."""

import json

import pytest

from mivhead.cli.main import main
from mivhead.methods import METHODS


def test_all_methods_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n{name} " in out for name in METHODS)
    assert "..." not in out  # nothing is cut


def test_one_method_with_its_hyperparameters(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", "knn", "--json"]) == 0
    (facts,) = json.loads(capsys.readouterr().out)["methods"]
    assert facts["hyperparameters"]["neighbours"] == 5
    assert main(["methods", "knn"]) == 0
    assert "1805.01978" in capsys.readouterr().out


def test_an_unknown_method(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", "nnc"]) == 2
    assert "Did you mean 'ncc'?" in capsys.readouterr().err
