"""The ready-made configurations: all load, and name only methods and backbones that exist."""

from __future__ import annotations

import re
import tomllib

import numpy as np
import pytest

from mivhead import Features, Recipe
from mivhead.backbones import list_backbones
from mivhead.backbones.presets import PAPER
from mivhead_bench.benchmark.config import TABLES, list_tables, load_config
from mivhead_bench.benchmark.published import _all
from mivhead_bench.methods.registry import METHODS, make_method

ALL = list_tables()


def test_the_papers_tables_are_there():
    comparisons = {"main", "one-shot", "fit-baseline", "backbones", "ln-tune", "sdl"}
    ablations = {"blocks", "candidates", "gap", "cap", "interactions", "cap-parts", "augmentation"}
    assert comparisons | ablations | {"latency", "cost"} <= set(ALL)


@pytest.mark.parametrize("name", ALL)
def test_table(name):
    text = (TABLES / f"{name}.toml").read_text()
    assert f"\n#     miv bench run {name} " in text, "the command"
    document = tomllib.loads(text)
    methods = [m if isinstance(m, str) else m["name"] for m in document["methods"]]
    config = load_config(name)
    assert [m.name for m in config.methods] == methods
    assert {b.source for b in config.backbones if ":" not in b.source} <= set(list_backbones())


NOT_OF_THE_PAPER = {
    *("small", "record", "record-one-shot", "blocks-lite", "interactions", "modern"),
}


@pytest.mark.parametrize("name", sorted(set(ALL) - NOT_OF_THE_PAPER))
def test_views_are_those_of_the_preset(name):
    assert load_config(name).views is None


def test_sizes_of_six_candidates_are_in_the_papers_range():
    (method,) = [m for m in load_config("candidates").methods if m.name == "miv-d6"]
    shallow, deep = method.params["pool_sizes"]
    assert 8 <= min(shallow) <= max(shallow) < 14
    assert sorted(deep) == [2, 3, 4, 5, 6]  # D = 6 of layer4: 2 x 2 to 7 x 7
    assert len(shallow) == len(deep) == 5, "and the map itself"


def test_names_of_ablations_are_those_of_the_printed_figures():
    tables = ("interactions", "cap-parts", "gap", "blocks", "candidates")
    here = {m.name for name in tables for m in load_config(name).methods} - {"miv-blocks2"}
    printed = {key[2] for key in _all()}
    assert here <= printed
    assert {name for name in printed if re.fullmatch(r"miv-(d|blocks)\d", name)} <= here


def test_blocks_has_one_two_and_three():
    config = load_config("blocks")
    (backbone,) = config.backbones
    preset = PAPER[backbone.source].preset
    counts = [
        METHODS[m.kind].settings.get("last_blocks", m.params.get("last_blocks"))
        for m in config.methods
    ]
    assert counts == [1, 2, 3]
    assert len(preset.blocks) == 3
    assert preset.blocks[1:] == PAPER["resnet50"].preset.blocks
    assert backbone.name == "resnet50", "so that the paper's figures stand beside ours"


@pytest.mark.parametrize(
    ("name", "expected"), [("miv-d1", 1), ("miv-d2", 2), ("miv-d4", 4), ("miv-d6", 6)]
)
def test_candidates_are_as_many_in_both_blocks(name, expected):
    (method,) = [m for m in load_config("candidates").methods if m.name == name]
    features = Features.from_tensors(
        {"block0.map": np.zeros((4, 64, 14, 14)), "block1.map": np.zeros((4, 64, 7, 7))}
    )
    preset = PAPER["resnet50"].preset
    classifier = make_method(
        method.kind, preset=preset, recipe=Recipe.paper(steps=0), **method.params
    )
    classifier.fit(features, [0, 0, 1, 1])
    blocks = [layer.config for layer in classifier.head_.layers]
    assert [block.candidates for block in blocks] == [expected] * 2
    assert all(len(set(block.candidate_sizes)) == expected for block in blocks)
