"""`miv data list` and `miv data prepare`; `tests/images/test_check.py` has `miv data check`."""

import json

import pytest

from mivhead.cli.main import main
from mivhead.datasets.catalogue import SETS
from tests.helpers.sample_files import make_folder, png


@pytest.fixture(autouse=True)
def no_data_folder(monkeypatch):
    monkeypatch.delenv("MIV_DATA", raising=False)


def run(capsys, *arguments):
    code = main([str(each) for each in arguments])
    return code, capsys.readouterr()


def test_all_sets_are_listed(capsys):
    code, output = run(capsys, "data", "list")
    assert code == 0
    lines = output.out.splitlines()
    assert [line.split()[0] for line in lines[1:18]] == [each.name for each in SETS]
    assert "Give a data folder with --data" in output.out


@pytest.mark.parametrize("by", ["--data", "MIV_DATA"])
def test_what_is_in_the_data_folder(by, capsys, tmp_path, monkeypatch):
    for name in ("gtsrb", "EuroSAT", "my_photos"):
        (tmp_path / name).mkdir()
    if by == "MIV_DATA":
        monkeypatch.setenv("MIV_DATA", str(tmp_path))
    code, output = run(capsys, "data", "list", *(["--data", tmp_path] if by == "--data" else []))
    assert code == 0
    found = {line.split()[0]: line.split()[-1] for line in output.out.splitlines()[1:18]}
    assert found["traffic_sign"] == "gtsrb"
    assert found["EuroSAT"] == "EuroSAT"
    assert found["dtd"] == "-"
    assert f"Other sets in {tmp_path}: my_photos." in output.out


def test_one_set_in_full(capsys):
    code, output = run(capsys, "data", "list", "birds")
    assert code == 0
    for text in ("CUB_200_2011.tgz", "non-commercial", "30 test", "miv data prepare cu_birds"):
        assert text in output.out
    code, output = run(capsys, "data", "list", "mnist")
    assert "miv data prepare mnist RAW_DIR -o DATA/mnist" in output.out
    assert "the paper's tables resize it to 84 px when they read it" in output.out


def test_the_list_as_json(capsys, tmp_path):
    (tmp_path / "cub").mkdir()
    code, output = run(capsys, "data", "list", "--data", tmp_path, "--json")
    document = json.loads(output.out)
    assert code == 0
    assert len(document["sets"]) == 17
    assert {each["name"]: each["licence"] for each in document["more"]}["beans"] == "MIT"
    assert document["sets"][1]["found"] == ["cub"]
    assert document["sets"][1]["prepared_by_miv"] is True
    assert document["others"] == []


def test_an_unknown_set(capsys, tmp_path):
    code, output = run(capsys, "data", "list", "nope")
    assert code == 2
    assert "'nope' is not a declared set" in output.err
    assert "did you mean 'trashnet'?" in run(capsys, "data", "list", "trashne")[1].err


def test_prepare_a_set(capsys, tmp_path):
    classes = ("AnnualCrop", "Forest")
    make_folder(tmp_path / "raw", {f"2750/{name}/1.jpg": png() for name in classes})
    arguments = ("data", "prepare", "EuroSAT", tmp_path / "raw", "-o", tmp_path / "EuroSAT")
    code, output = run(capsys, *arguments)
    assert code == 0
    assert f"Wrote 2 images in 2 classes to {tmp_path / 'EuroSAT'}." in output.out
    assert "The paper's set has 10 classes: check" in output.out
    assert (tmp_path / "EuroSAT" / "Forest" / "1.jpg").read_bytes() == png()
    code, output = run(capsys, *arguments)
    assert code == 2
    assert "already exists" in output.err


def test_prepare_as_json(capsys, tmp_path):
    make_folder(tmp_path / "raw", {f"2750/{name}/1.jpg": png() for name in ("AnnualCrop", "River")})
    arguments = ("data", "prepare", "EuroSAT", tmp_path / "raw", "-o", tmp_path / "EuroSAT")
    code, output = run(capsys, *arguments, "--json")
    assert code == 0
    assert json.loads(output.out) == {
        "folder": str(tmp_path / "EuroSAT"),
        "classes": {"AnnualCrop": 1, "River": 1},
    }


def test_prepare_into_no_folder(capsys, tmp_path):
    code, output = run(capsys, "data", "prepare", "mnist", tmp_path, "-o", tmp_path / "a" / "b")
    assert code == 2
    assert "does not exist; create it first" in output.err
