"""The paper's tables: rows and columns as printed there, and every table runs to its end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mivhead_bench.benchmark.compare import compare, compare_columns
from mivhead_bench.benchmark.config import RunConfig, describe_table, list_tables, load_config
from mivhead_bench.benchmark.measuring import one_step
from mivhead_bench.benchmark.report import make_sections, write_report
from mivhead_bench.benchmark.report.accuracy import accuracy_table
from mivhead_bench.benchmark.results import Result
from mivhead_bench.benchmark.runner import Workspace, run
from mivhead_bench.datasets.catalogue import SETS
from tests.helpers.bench_data import write_sets
from tests.helpers.extras import needs
from tests.helpers.synthetic import result

# The columns of the paper's tables and figures, by group: a method on a backbone.
RESNET = ["tsa@resnet50", "miv@resnet50"]
DINO_RESNET = ["tsa@dino_resnet50", "miv@dino_resnet50"]
DEIT = ["ett@deit_small", "miv@deit_small"]
DINO_VIT = ["ett@dino_vits16", "miv@dino_vits8", "miv@dino_vits16"]
COLUMNS = {
    "main": [
        ["ncc@resnet50", *RESNET],
        ["ncc@deit_small", *DEIT],
        ["ncc@dino_resnet50", *DINO_RESNET],
        ["ncc@dino_vits16", *DINO_VIT],
    ],
    "main-vit": [["ncc@deit_small", *DEIT], ["ncc@dino_vits16", *DINO_VIT]],
    "one-shot": [RESNET, DEIT, DINO_RESNET, DINO_VIT],
    "one-shot-vit": [DEIT, DINO_VIT],
    "latency": [DINO_VIT],
    "cost": [DINO_RESNET, DINO_VIT],
    "cost-supervised": [RESNET, DEIT],
    "ln-tune": [
        ["ln-tune@deit_small", *DEIT],
        ["ln-tune@dino_vits16", "ett@dino_vits16", "miv@dino_vits8"],
    ],
    "ln-tune-cost": [["ett@deit_small", "ln-tune@deit_small", "miv@deit_small"]],
    "sdl": [["tsa@sdl_resnet18", "miv@sdl_resnet18"], ["tsa@resnet18", "miv@resnet18"]],
}
# Tables whose columns are methods, the same on every backbone.
METHODS = {
    "ablation": ["miv", "miv-mean", "miv-gap", "miv-d1", "miv-d2", "miv-d4", "miv-d6"],
    "augmentation": ["miv-no-views", "miv"],
    "backbones": ["baseline++", "miv"],
    "blocks": ["miv-blocks1", "miv-blocks2", "miv-blocks3"],
    "candidates": ["miv-d1", "miv-d2", "miv-d4", "miv-d6", "miv"],
    "cap": ["miv-mean", "miv"],
    "cap-parts": ["miv-no-attention", "miv-no-skip", "miv-no-excitation", "miv"],
    "fit-baseline": ["fit-lda", "baseline++", "miv"],
    "gap": ["miv-gap", "miv-d1", "miv"],
    "interactions": [
        "miv-gap-mean-blocks1-no-views",
        "miv-gap-mean-no-views",
        "miv-gap-blocks1-no-views",
        "miv-gap-no-views",
        "miv-blocks1-no-views",
        "miv-no-views",
    ],
}
BACKBONES = {
    "augmentation": ["resnet50", "dino_vits8"],
    "backbones": [
        *("densenet161", "regnety_016", "deit_base", "swin_base_simmim", "dino_vitb16"),
        "clip_vitl14",
    ],
    "cap-parts": ["dino_vits8"],
    "fit-baseline": ["resnet50", "dino_resnet50", "deit_small", "dino_vits8"],
}
PAPER = [name for name in list_tables() if describe_table(name).paper]
ROWS = [
    *("Omniglot", "Aircraft", "Birds", "Textures", "Quick Draw", "Fungi", "VGG Flower"),
    *("Traffic Sign", "MSCOCO", "MNIST", "CIFAR-10", "CIFAR-100", "CropDisease", "EuroSAT"),
    *("ISIC", "ChestX", "Food101", "Average (MD)", "Average (MD+)"),
]


def test_all_tables_are_here():
    assert set(COLUMNS) | set(METHODS) == set(PAPER)


def finished(config: RunConfig, sets: list[str]) -> list[Result]:
    """Results as a run would give them."""
    return [
        result(
            backbone=backbone.name,
            set=name,
            protocol=protocol,
            method=method.name,
            task=task,
            accuracy=0.5 + 0.1 * task,
        )
        for backbone in config.backbones
        for name in sets
        for protocol in config.protocols
        for task in range(2)
        for method in config.methods_on(backbone.name)
    ]


def check_columns(name: str, config: RunConfig, results: list[Result], rows: list[str]) -> None:
    if name in COLUMNS:
        found = [
            comparison
            for each in config.comparisons
            for comparison in compare_columns(results, each.title, each.columns, each.rival)
        ]
        assert [list(comparison.methods) for comparison in found] == COLUMNS[name]
        assert all(comparison.rival in comparison.methods for comparison in found)
    else:
        found = compare(results)
        assert [c.backbone for c in found] == BACKBONES.get(name, ["resnet50"])
        assert all(list(c.methods) == METHODS[name] for c in found)
    table = accuracy_table(found)
    assert [row[0].text for row in table.rows] == rows
    assert table.header == ("data set", *(m for c in found for m in c.methods))


@pytest.mark.parametrize("name", PAPER)
def test_rows_and_columns_are_the_papers(name):
    config = load_config(name)
    check_columns(name, config, finished(config, [each.name for each in SETS]), ROWS)


def test_the_papers_tables_resize_mnist_and_cifar():
    """The authors' converter brings them to 84 pixels; other configurations keep their sizes."""
    assert [name for name in list_tables() if load_config(name).paper_sizes] == PAPER


def test_shares_and_tests_across_backbones():
    """The paper's share of eTT/16 by Ours/8, and its paired test of the two."""
    config = load_config("latency")
    results = [
        replace(r, adapt_seconds=10.0) if r.method == "ett" else r
        for r in finished(config, ["cu_birds"])
    ]
    section = make_sections(results, config.comparisons)[0]
    assert section.title == "Across backbones"
    titles = {table.title.partition(",")[0]: table for table in section.tables}
    latency = titles["Latency per task in seconds"]
    assert "% of ett@dino_vits16" in latency.header
    shares = {row[0].text: row[5].text for row in latency.rows}
    assert shares["Birds, ett@dino_vits16"] == "100.0%"
    assert shares["Birds, miv@dino_vits8"] == "18.1%"  # (0.5 + 1 + 0.1 + 0.5) / 11.6
    paired = [row[0].text for row in titles["Paired differences"].rows]
    assert "Birds: miv@dino_vits8 - ett@dino_vits16" in paired


def test_a_report_compares_all_backbones_if_nothing_else_is_asked_for(tmp_path):
    config = load_config("fit-baseline")
    results = finished(config, ["cu_birds"])
    write_report(results, tmp_path, "All")
    text = (tmp_path / "report.md").read_text()
    assert "Across backbones" in text
    assert "miv@resnet50" in text


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tables")
    return Workspace(folder, write_sets(folder / "data", ["aircraft"], classes=2, images=2))


@pytest.mark.slow
@needs("timm")
@pytest.mark.parametrize("name", PAPER)
def test_every_table_runs_to_its_end(name, workspace, tmp_path):
    """The paper's architectures with random weights, on one small task, with one step each.

    Tables add to one run folder, so that a column that several tables have is run once.
    """
    table = load_config(name)
    config = replace(
        table,
        backbones=tuple(replace(b, weights="random") for b in table.backbones),
        methods=tuple(replace(m, params=m.params | one_step(m)) for m in table.methods),
        sets=("aircraft",),
        protocols=("2-way 1-shot",),
        tasks=1,
        views=1 if table.views is None else table.views,
        comparisons=(),
    )
    shared = name if name in ("blocks", "interactions") else "shared"  # they differ in a setting
    results = run(
        config, replace(workspace, folder=workspace.folder / shared, cache=tmp_path / "cache")
    )
    assert {r.error for r in results} == {None}
    check_columns(name, table, results, ["Aircraft", "Average (MD)"])
    paths = write_report(results, tmp_path / "report", name, table.comparisons)
    assert all(path.stat().st_size for path in paths)
