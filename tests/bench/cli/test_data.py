"""`miv bench data`: list the declared sets, prepare one."""

import json

import pytest

from mivhead_bench.datasets.catalogue import ALL_SETS
from tests.helpers.sample_files import make_folder, png


@pytest.fixture(autouse=True)
def no_data_folder(monkeypatch):
    monkeypatch.delenv("MIV_DATA", raising=False)


def test_all_sets_are_listed(miv):
    lines = miv("bench", "data", "list").out.splitlines()
    assert [line.split()[0] for line in lines[1:26]] == [each.name for each in ALL_SETS]


@pytest.mark.parametrize("by", ["--data", "MIV_DATA"])
def test_what_is_in_the_data_folder(by, miv, tmp_path, monkeypatch):
    for name in ("gtsrb", "EuroSAT", "my_photos"):
        (tmp_path / name).mkdir()
    if by == "MIV_DATA":
        monkeypatch.setenv("MIV_DATA", str(tmp_path))
    answer = miv("bench", "data", "list", *(["--data", tmp_path] if by == "--data" else []))
    folders = {line.split()[0]: line.split()[-1] for line in answer.out.splitlines()[1:18]}
    assert folders["traffic_sign"] == "gtsrb"
    assert folders["EuroSAT"] == "EuroSAT"
    assert folders["omniglot"] == "-"
    assert f"Other sets in {tmp_path}: my_photos." in answer.out


def test_one_set_in_full(miv, fails):
    shown = miv("bench", "data", "list", "birds").out
    for text in ("CUB_200_2011.tgz", "non-commercial", "30 test", "prepare cu_birds"):
        assert text in shown
    assert "omniglot" in fails("bench", "data", "list", "omniglott")


def test_the_list_as_json(miv, tmp_path):
    (tmp_path / "cub").mkdir()
    document = json.loads(miv("bench", "data", "list", "--data", tmp_path, "--json").out)
    assert len(document["sets"]) == 17
    assert {each["name"]: each["licence"] for each in document["more"]}["beans"] == "MIT"
    assert document["sets"][1]["found"] == ["cub"]


def test_prepare_a_set(miv, fails, tmp_path):
    classes = ("AnnualCrop", "Forest")
    make_folder(tmp_path / "raw", {f"2750/{name}/1.jpg": png() for name in classes})
    prepare = ("bench", "data", "prepare", "EuroSAT", tmp_path / "raw")
    assert "10 classes" in miv(*prepare, "-o", tmp_path / "EuroSAT").out
    assert (tmp_path / "EuroSAT" / "Forest" / "1.jpg").read_bytes() == png()
    document = json.loads(miv(*prepare, "-o", tmp_path / "again", "--json").out)
    assert document["classes"] == dict.fromkeys(classes, 1)
    fails(*prepare, "-o", tmp_path / "a" / "b")
