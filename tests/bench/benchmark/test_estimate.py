"""What a run would take: counted from tasks, and measured in seconds."""

import pytest

from mivhead_bench.benchmark.config import load_config, read_config
from mivhead_bench.benchmark.estimate import estimate
from tests.helpers.bench_data import write_sets

CONFIG = {"methods": ["miv", "ncc"], "protocols": ["5-way 1-shot"], "tasks": 4, "views": 1}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_sets(tmp_path_factory.mktemp("data"), ["dots", "mnist"], images=4)


def test_what_is_there_is_counted(data):
    plan = estimate(read_config(CONFIG), data, "cpu")
    assert plan.tasks == 8
    assert plan.missing_sets == ()
    assert plan.missing_backbones == {}
    # Four tasks of 5 shots and 10 queries see most of 24 images, and some of their 24 views.
    assert 2 * 20 < plan.passes < 2 * 48
    assert plan.bytes % plan.passes == 0
    miv, ncc = plan.columns
    assert miv.hours == pytest.approx(8 * miv.seconds / 3600)
    assert plan.hours == pytest.approx(plan.extraction_hours + miv.hours + ncc.hours)


def test_what_is_missing_is_named(data):
    pytest.importorskip("timm", reason="the extra timm is not installed")
    document = CONFIG | {"backbones": ["sdl_resnet18"], "methods": ["tsa", "ncc"]}
    plan = estimate(read_config(document | {"benchmark": "MD+"}), data, "cpu")
    assert "github.com/VICO-UoE/URL" in plan.missing_backbones["sdl_resnet18"]
    assert len(plan.missing_sets) == 16  # mnist is there
    assert plan.tasks == 4


def test_no_sets_at_all():
    plan = estimate(load_config("blocks-lite"), None, "cpu")
    assert (plan.tasks, plan.passes, plan.hours) == (0, 0, 0.0)
