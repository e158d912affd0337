"""`miv bench report` and `miv bench compare` on results in a folder."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mivhead._util.schema import to_json
from tests.helpers.extras import needs
from tests.helpers.synthetic import random_run

pytestmark = needs("matplotlib", "plot")


def write_run(folder: Path, results) -> Path:
    folder.mkdir()
    lines = (json.dumps(to_json(result)) + "\n" for result in results)
    (folder / "results.jsonl").write_text("".join(lines))
    return folder


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", random_run(["birds", "signs"], {"miv": 0.8, "ncc": 0.7}))


def test_report(miv, run, tmp_path):
    answer = miv("bench", "report", run)
    assert answer.code == 0, answer.err
    assert (run / "report" / "report.html").read_text().startswith("<!doctype html>")
    answer = miv("bench", "report", run, "-o", tmp_path / "new", "--title", "Mine", "--json")
    files = json.loads(answer.out)["files"]
    assert {Path(file).suffix for file in files[6:]} == {".pdf", ".png"}
    assert [Path(file).name for file in files[:6]] == [
        "report.md",
        "tables.tex",
        "results.csv",
        "summary.csv",
        "rows.csv",
        "report.html",
    ]
    assert Path(files[0]).read_text(encoding="utf-8").startswith("# Mine\n")


def test_no_results(fails, tmp_path):
    assert "does not contain results" in fails("bench", "report", tmp_path)
    empty = write_run(tmp_path / "empty", [])
    assert "no results yet" in fails("bench", "report", empty)


def test_two_methods_of_a_run(miv, run):
    answer = miv("bench", "compare", f"{run}:miv", f"{run}:ncc")
    assert answer.code == 0, answer.err
    assert [line.split()[2] for line in answer.out.splitlines()[2:]] == ["birds", "signs"]
    document = json.loads(miv("bench", "compare", f"{run}:miv", f"{run}:ncc", "--json").out)
    rows = document["rows"]
    assert [row["set"] for row in rows] == ["birds", "signs"]
    assert all(row["difference"] > 0.05 and row["p"] < 0.01 for row in rows)


def test_two_runs(miv, fails, run, tmp_path):
    levels = {"miv": 0.8, "knn": 0.7}
    other = random_run(["birds"], levels, seed=1)
    second = write_run(tmp_path / "second", other)
    answer = miv("bench", "compare", run, second)
    assert "second:miv" in answer.out  # the only method that both have
    assert "knn" not in answer.out
    strangers = write_run(tmp_path / "third", [replace(r, tasks="b" * 64) for r in other])
    assert "different tasks" in fails("bench", "compare", run, strangers)


def test_a_run_with_itself_needs_methods(fails, run):
    assert "Name two methods" in fails("bench", "compare", run, run)
    assert "no method 'tsa'" in fails("bench", "compare", f"{run}:miv", f"{run}:tsa")
