"""results/backbones.csv, and what the documentation makes of it."""

import csv
import json
import runpy
import sys
from pathlib import Path

import pytest

from mivhead_bench.benchmark.leaderboard import COLUMNS, KEY, page_rows

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield runpy.run_path(str(ROOT / "benchmarks" / "backbone_rows.py"))
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def test_the_pages_show_the_file(script):
    rows = script["read"]()
    assert {row["backbone"] for row in rows} >= {"efficientnet_lite0", "resnet50", "vit"}
    assert len({tuple(row[name] for name in KEY) for row in rows}) == len(rows)
    assert all(row["commit"] and row["command"] for row in rows)
    with (ROOT / "results" / "page.csv").open(newline="", encoding="utf-8") as file:
        shown = list(csv.DictReader(file))
    assert shown == script["page"](rows), "run python benchmarks/backbone_rows.py --page"


def row(**given):
    values = {"backbone": "a", "protocol": "5-way 1-shot", "method": "miv", "seconds": "0.5"}
    return {**dict.fromkeys(COLUMNS, ""), **values, "half_width": "3", "tasks": "4", **given}


def test_a_page_averages_complete_groups_of_sets_or_everything():
    groups = {"small": ("x", "y"), "large": ("x", "z")}
    both = [row(set="x", accuracy="60"), row(set="y", accuracy="70", half_width="4", commit="c")]
    (shown,) = page_rows(both, groups)
    assert (shown["sets"], shown["tasks"], shown["accuracy"]) == ("2 small", "8", "65.0")
    # The standard errors are 3 and 4 over t(3) = 3.18, and t(5.57) = 2.49, by Welch's formula.
    assert shown["±"] == "2.0"
    assert shown["commit"] == "; c", "all that a row is made of"
    (shown,) = page_rows(both[:1], groups)
    assert (shown["sets"], shown["±"]) == ("1", "3.0")
    (shown,) = page_rows([row(set="x", accuracy="60", half_width="")], {})
    assert shown["±"] == ""  # a single task has no interval


def test_rows_are_replaced_and_kept(script, tmp_path):
    def line(backbone, task, score):
        row = {"protocol": "5-way 1-shot", "backbone": backbone, "set": "mnist", "task": task}
        return json.dumps({**row, "methods": {"miv": [score, 0.5]}})

    source, target = tmp_path / "run.jsonl", tmp_path / "results" / "backbones.csv"
    source.write_text("\n".join([line("a", 0, 0.5), line("a", 1, 0.7), line("b", 0, 0.1)]))
    assert script["write"](script["of_jsonl"]([source], "c1"), target) == 2
    source.write_text(line("b", 0, 0.9))
    assert script["write"](script["of_jsonl"]([source], "c2"), target) == 2
    rows = {row["backbone"]: row for row in script["read"](target)}
    found = [rows["a"][name] for name in ("tasks", "accuracy", "commit")]
    assert found == ["2", "60.00", "c1"]
    assert (rows["b"]["accuracy"], rows["b"]["commit"]) == ("90.00", "c2")


def test_the_best_correction_counts_on_these_very_tasks(script, tmp_path):
    source = tmp_path / "run.jsonl"
    lines = [
        {"protocol": "unequal shots", "backbone": "a", "set": set_, "task": 0}
        | {"methods": {"ncc": [powers[0], 0.5]}, "corrected": {"ncc": powers}}
        for set_, powers in (("mnist", [0.4, 0.5, 0.6]), ("food101_small", [0.4, 0.9, 0.5]))
    ]
    source.write_text("\n".join(map(json.dumps, lines)))
    found = {(r["set"], r["method"]): r["accuracy"] for r in script["of_jsonl"]([source], "c")}
    assert found["mnist", "ncc"] == "40.00"
    assert found["mnist", "ncc+correction"] == "50.00"
    assert found["food101_small", "ncc+correction"] == "90.00"


def test_a_report_writes_the_rows_of_a_run(script, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    from mivhead.backbones import load_backbone
    from mivhead.cli.main import main

    run = tmp_path / "run"
    what = ["--sets", "digits", "--methods", "ncc", "--tasks", "2", "--workers", "0"]
    what += ["--protocol", "2-way 1-shot, max_queries 5"]
    assert main(["bench", "run", "small", "-o", str(run), *what, "--quiet"]) == 0
    assert main(["bench", "report", str(run), "--quiet"]) == 0
    (row,) = script["read"](run / "report" / "rows.csv")
    assert tuple(row) == COLUMNS
    assert (row["backbone"], row["set"], row["method"]) == ("efficientnet_lite0", "digits", "ncc")
    assert row["tasks"] == "2"
    assert float(row["accuracy"]) > 50
    assert row["library"][0].isdigit()
    assert row["tasks_hash"]
    assert row["command"]
    assert row["weights_hash"] == load_backbone("efficientnet_lite0").identity.weights[:12]
    assert script["write"]([row], tmp_path / "backbones.csv") == 1
