"""The ready-made configurations can be read, and say what they are."""

from __future__ import annotations

import tomllib

import pytest

from mivhead.backbones import list_backbones
from mivhead.benchmark.config import TABLES, list_tables, load_config
from mivhead.benchmark.cost_tuning import TUNING
from mivhead.benchmark.published import _all
from mivhead.methods.registry import METHODS

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
    if any(m in TUNING and m not in METHODS for m in methods):
        return  # methods that tune the backbone register themselves when they are there
    config = load_config(name)
    assert [m.name for m in config.methods] == methods
    assert {b.name for b in config.backbones} <= set(list_backbones())


def test_names_of_ablations_are_those_of_the_printed_figures():
    here = {
        m.name for name in ("interactions", "cap-parts", "gap") for m in load_config(name).methods
    }
    printed = {key[2] for key in _all()}
    assert here <= printed
