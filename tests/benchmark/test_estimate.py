"""What a run would take: counted from tasks, and measured in seconds."""

from __future__ import annotations

import pytest

from mivhead.benchmark.config import load_config, read_config
from mivhead.benchmark.estimate import estimate
from tests.helpers.bench_data import write_sets

CONFIG = {"methods": ["miv", "ncc"], "protocols": ["5-way 1-shot"], "tasks": 4, "views": 1}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_sets(tmp_path_factory.mktemp("data"), ["dots", "mnist"], images=4)


def test_what_is_there_is_counted(data):
    plan = estimate(read_config(CONFIG), data, "cpu")
    assert {each.name: (each.found, each.classes, each.images) for each in plan.sets} == {
        "dots": (True, 6, 24),
        "mnist": (True, 6, 24),
    }
    assert plan.sets[1].remark == "24 px; the paper's have 84 (--paper-sizes)"
    assert plan.sets[0].remark == ""
    assert plan.tasks == 8
    # Four tasks of 5 shots and 10 queries see most of 24 images, and some of their 24 views.
    assert 2 * 20 < plan.passes < 2 * 48
    (backbone,) = plan.backbones
    assert backbone.missing is None
    assert plan.bytes == plan.passes * backbone.bytes
    miv, ncc = plan.columns
    assert 0 < ncc.seconds < miv.seconds < 60
    assert miv.hours == pytest.approx(8 * miv.seconds / 3600)
    assert plan.hours == pytest.approx(plan.extraction_hours + miv.hours + ncc.hours)


def test_the_papers_sizes_are_announced(data):
    plan = estimate(read_config(CONFIG | {"paper_sizes": True, "methods": ["ncc"]}), data, "cpu")
    assert [each.remark for each in plan.sets] == [
        "",
        "24 px; resized to 84 px first, as in the paper",
    ]


def test_what_is_missing_is_named(data):
    config = read_config(CONFIG | {"backbones": ["sdl_resnet18"], "methods": ["tsa", "ncc"]})
    pytest.importorskip("timm", reason="the extra timm is not installed")
    plan = estimate(config, data, "cpu", full=True)
    assert "github.com/VICO-UoE/URL" in plan.backbones[0].missing
    assert sum(not each.found for each in plan.sets) == 16  # mnist is there
    tsa, ncc = plan.columns
    assert tsa.seconds > 40 * ncc.seconds


def test_no_sets_at_all():
    plan = estimate(load_config("blocks-lite"), None, "cpu")
    assert plan.sets == ()
    assert (plan.tasks, plan.passes, plan.hours) == (0, 0, 0.0)
    assert {column.seconds for column in plan.columns} == {None}
