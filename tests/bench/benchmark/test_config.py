"""Configurations: what is read, what is refused and with which words."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from mivhead._util.schema import to_json
from mivhead.backbones.presets import PAPER
from mivhead.errors import InputError
from mivhead_bench.benchmark.config import (
    MethodConfig,
    choose_sets,
    extend,
    list_tables,
    load_config,
    read_config,
)
from mivhead_bench.benchmark.runner import view_rule
from mivhead_bench.benchmark.tasks import Task

FULL = """
sets = ["birds", "signs"]
protocols = ["varying", "5-way 1-shot"]
tasks = 20
seed = 3
views = 15
backbones = ["efficientnet_lite0", {name = "mine", spec = "resnet50", weights = "w.pth"}]
methods = [
  "ncc",
  {name = "20 steps", method = "miv", threshold = 5, params = {steps = 20}},
]
"""


def test_a_file_with_everything(tmp_path):
    path = tmp_path / "my.toml"
    path.write_text(FULL)
    config = load_config(path)
    assert config.sets == ("birds", "signs")
    assert config.protocols == ("varying", "5-way 1-shot")
    assert (config.tasks, config.seed, config.views) == (20, 3, 15)
    assert [b.source for b in config.backbones] == ["efficientnet_lite0", "resnet50"]
    plain, variant = config.methods
    assert (plain.kind, plain.views_rule, plain.needs_images) == ("ncc", None, False)
    assert (variant.name, variant.kind, variant.params) == ("20 steps", "miv", {"steps": 20})
    assert variant.views_rule == "few"
    assert read_config(config.as_json()) == config  # as config.json is read again


@pytest.mark.parametrize(
    "document",
    [
        {"taks": 3},
        {"methods": [{"name": "x", "method": "miv", "parms": {}}]},
        {"methods": ["mvi"]},
        {"methods": [{"name": "miv", "params": {"step": 3}}]},
        {"tasks": "many"},
        {"tasks": 0},
        {"methods": ["miv", "miv"]},
        {"protocols": ["5 ways"]},
        {"methods": [{"name": "ncc", "recipe": "paper"}]},
        {"methods": [{"name": "miv", "threshold": -1}]},
    ],
)
def test_wrong_documents(document):
    with pytest.raises(InputError):
        read_config(document)


@pytest.mark.parametrize(
    "text", [None, "tasks = = 3", "a = " + 5000 * "[" + 5000 * "]", 2**20 * "#" + "#"]
)
def test_wrong_files(text, tmp_path):
    path = tmp_path / "their.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=r"their\.toml"):
        load_config(path)
    with pytest.raises(InputError, match="small"):
        load_config("smal")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs Unix")
def test_a_pipe_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "their.toml")
    with pytest.raises(InputError, match="not a regular file"):
        load_config(tmp_path / "their.toml")


def test_the_small_benchmark_is_ready_made():
    assert "small" in list_tables()
    small = load_config("small")
    assert (len(small.sets), len(small.methods), small.tasks) == (3, 3, 10)


def test_a_run_folder_does_not_hide_the_configuration_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small").mkdir()  # `miv bench run small -o small`, given again
    assert load_config("small").tasks == 10


def test_a_run_grows_but_never_contradicts_itself():
    old = read_config({"sets": ["a"], "methods": ["miv"], "tasks": 5})
    new = read_config({"sets": ["b"], "methods": ["ncc", "miv"], "tasks": 5})
    both = extend(old, new)
    assert both.sets == ("a", "b")
    assert [m.name for m in both.methods] == ["miv", "ncc"]
    for key, value in {"tasks": 6, "seed": 1, "views": 1}.items():
        other = read_config({"sets": ["a"], "methods": ["miv"], "tasks": 5} | {key: value})
        with pytest.raises(InputError, match=f"another configuration: {key} is"):
            extend(old, other)
    changed = MethodConfig("miv", params={"steps": 5})
    with pytest.raises(InputError, match="the method 'miv' is"):
        extend(old, read_config({"tasks": 5, "methods": [to_json(changed)]}))


def test_a_run_grows_backbone_by_backbone():
    """As `miv bench run main --backbone NAME` does, whose methods name their backbones."""
    table = load_config("main")
    tsa = next(m for m in table.methods if m.name == "tsa")
    parts = [
        replace(
            table,
            sets=("omniglot",),
            backbones=(b,),
            methods=tuple(
                replace(m, backbones=(b.name,) if m.backbones else ())
                for m in table.methods_on(b.name)
            ),
        )
        for b in table.backbones
    ]
    grown = parts[0]
    for part in parts[1:]:
        grown = extend(grown, part)
    assert [b.name for b in grown.backbones] == [b.name for b in table.backbones]
    for backbone in table.backbones:
        names = {m.name for m in grown.methods_on(backbone.name)}
        assert names == {m.name for m in table.methods_on(backbone.name)}
    whole = extend(grown, replace(table, sets=("omniglot", "mnist")))
    assert next(m for m in whole.methods if m.name == "tsa") == tsa
    assert next(m for m in whole.methods if m.name == "miv").backbones == ()
    other = replace(tsa, params={"steps": 3}, backbones=())
    with pytest.raises(InputError, match="the method 'tsa' is"):
        extend(grown, replace(parts[0], methods=(other,)))


def test_tables_on_md_run_its_nine_sets(tmp_path):
    for name in ("cub200_birds", "dtd", "mnist", "my_photos", "aircraft", "fgvc_aircraft"):
        (tmp_path / name).mkdir()
    assert choose_sets(load_config("ablation"), tmp_path) == ("cub200_birds", "dtd", "aircraft")
    everything = choose_sets(load_config("main"), tmp_path)
    assert everything == ("cub200_birds", "dtd", "aircraft", "mnist")
    assert "my_photos" in choose_sets(read_config({}), tmp_path)
    (tmp_path / "empty" / "x").mkdir(parents=True)
    with pytest.raises(InputError, match="MD"):
        choose_sets(load_config("blocks"), tmp_path / "empty")


@pytest.mark.parametrize(
    ("backbone", "name", "expected"),
    [
        ("resnet50", "quickdraw", 10),
        ("resnet50", "ChestX", 10),
        ("dino_resnet50", "cifar100", 10),
        ("resnet50", "fungi", None),
        ("dino_vits8", "fungi", 10),
        ("dino_vits8", "quickdraw345", 5),
        ("dino_vits8", "Food101", 5),
        ("dino_vits8", "cifar100", 2),
        ("dino_vits16", "mscoco", 15),
        ("deit_small", "quickdraw", None),
        ("dino_vits8", "my_photos", None),
    ],
)
def test_thresholds_are_lowered_as_the_authors_did(backbone, name, expected):
    table = load_config("main")
    assert table.threshold(backbone, name) == expected
    assert read_config({}).threshold(backbone, name) is None
    rule = view_rule(MethodConfig("miv", recipe="paper"), PAPER[backbone].preset, None, expected)
    assert rule.threshold == (expected or PAPER[backbone].preset.threshold)


def test_a_run_keeps_to_one_size_of_images():
    def images(name, paper_sizes):
        return read_config({"sets": [name], "paper_sizes": paper_sizes})

    with pytest.raises(InputError, match="paper_sizes is False there and True here"):
        extend(images("cifar10", False), images("cifar10", True))
    # Where it has no effect, a run of an earlier version can be resumed.
    assert extend(images("aircraft", False), images("aircraft", True)).paper_sizes
    with pytest.raises(InputError, match="paper_sizes is True there and False here"):
        extend(images("aircraft", True), images("mnist", False))


def test_views_follow_the_preset_in_the_papers_tables():
    preset = read_config({"views": "preset"})
    assert preset.views is None
    assert read_config(preset.as_json()) == preset
    assert view_rule(MethodConfig("miv-paper"), PAPER["dino_vits16"].preset, None).limit == 20
    task = Task(("a", "b"), tuple("abcdefghij"), (0,) * 5 + (1,) * 5, (), ())
    counts = {
        name: sum(view_rule(MethodConfig("miv-paper"), PAPER[name].preset, None).count(task))
        for name in ("resnet50", "dino_vits16", "dino_vitb16", "clip_vitl14")
    }
    # ceil(T / 5) views of each of ten images, with T of 15, 20, 30 and 20
    assert counts == {"resnet50": 30, "dino_vits16": 40, "dino_vitb16": 60, "clip_vitl14": 40}
    one_shot = Task(("a", "b"), ("1", "2"), (0, 1), (), ())
    rule = view_rule(MethodConfig("miv-paper"), PAPER["dino_vitb16"].preset, None)
    assert rule.count(one_shot) == [30, 30]
    few = view_rule(MethodConfig("miv"), PAPER["dino_vitb16"].preset, None)
    assert few.count(one_shot) == [4, 4]
    assert sum(few.count(task)) == 0  # five shots


def test_the_rule_for_views_is_a_setting():
    chosen = read_config({"methods": [{"name": "miv", "params": {"views_rule": "floor"}}]})
    rule = view_rule(chosen.methods[0], PAPER["resnet50"].preset, None)
    assert rule.count(Task(("a",), ("1", "2"), (0, 0), (), ())) == [7, 7]


def test_a_method_may_name_its_backbones():
    config = read_config(
        {
            "backbones": ["resnet50", "dino_vits16"],
            "methods": ["ncc", {"name": "tsa", "backbones": ["resnet50"]}],
            "comparisons": [{"title": "both", "columns": ["tsa@resnet50", "ncc@dino_vits16"]}],
        }
    )
    assert [m.name for m in config.methods_on("resnet50")] == ["ncc", "tsa"]
    assert [m.name for m in config.methods_on("dino_vits16")] == ["ncc"]
    assert read_config(config.as_json()) == config
    with pytest.raises(InputError, match="backbone of tsa must be one of"):
        read_config({"methods": [{"name": "tsa", "backbones": ["resnet50"]}]})
    with pytest.raises(InputError, match="must be written as METHOD@BACKBONE"):
        read_config({"comparisons": [{"title": "x", "columns": ["tsa"]}]})


def test_a_backbone_may_have_the_preset_of_one_of_the_paper():
    entry = {"name": "tiny", "spec": "timm:deit_tiny_patch16_224", "preset": "deit_small"}
    (backbone,) = read_config({"backbones": [entry]}).backbones
    preset = backbone.settings["preset"]
    assert preset.taps == ("blocks.8", "blocks.9", "blocks.10", "blocks.11")
    with pytest.raises(InputError, match="deit_small"):
        read_config({"backbones": [{**entry, "preset": "deit_smal"}]})
