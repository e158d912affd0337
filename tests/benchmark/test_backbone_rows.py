"""results/backbones.csv, and the table that the documentation makes of it."""

import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(ROOT / "benchmarks" / "backbone_rows.py"))


def test_the_page_shows_the_file(script):
    rows = script["read"]()
    assert {row["backbone"] for row in rows} >= {"efficientnet_lite0", "resnet50", "vit"}
    assert len({tuple(row[name] for name in script["KEY"]) for row in rows}) == len(rows)
    page = script["PAGE"].read_text(encoding="utf-8")
    assert script["table"](rows) in page, "run python benchmarks/backbone_rows.py --page"


def test_rows_are_replaced_and_kept(script, tmp_path):
    def line(backbone, task, score):
        row = {"protocol": "5-way 1-shot", "backbone": backbone, "set": "birds", "task": task}
        return json.dumps({**row, "methods": {"miv": [score, 0.5]}})

    source, target = tmp_path / "run.jsonl", tmp_path / "results" / "backbones.csv"
    source.write_text("\n".join([line("a", 0, 0.5), line("a", 1, 0.7), line("b", 0, 0.1)]))
    assert script["write"](script["of_jsonl"](source, "1.0"), target) == 2
    source.write_text(line("b", 0, 0.9))
    assert script["write"](script["of_jsonl"](source, "1.1"), target) == 2
    rows = {row["backbone"]: row for row in script["read"](target)}
    assert (rows["a"]["tasks"], rows["a"]["accuracy"], rows["a"]["library"]) == (
        "2",
        "60.00",
        "1.0",
    )
    assert (rows["b"]["accuracy"], rows["b"]["library"]) == ("90.00", "1.1")


def test_rows_of_a_run(script, tmp_path, capsys):
    from mivhead.backbones import load_backbone
    from mivhead.cli.main import main

    what = ["--sets", "digits", "--methods", "ncc", "--tasks", "2"]
    assert main(["bench", "run", "small", "-o", str(tmp_path / "run"), *what, "--quiet"]) == 0
    (row,) = script["of_run"](tmp_path / "run")
    assert (row["backbone"], row["set"], row["method"]) == ("efficientnet_lite0", "digits", "ncc")
    assert row["tasks"] == 2
    assert float(row["accuracy"]) > 50
    assert row["library"][0].isdigit()
    assert row["tasks_hash"]
    assert row["weights_hash"] == load_backbone("efficientnet_lite0").identity.weights[:12]
