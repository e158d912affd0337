"""Tasks with unlabelled images."""

from dataclasses import replace
from pathlib import Path

import pytest

from mivhead.errors import InputError
from mivhead_bench.benchmark.config import read_config
from mivhead_bench.benchmark.runner import Workspace, run
from mivhead_bench.datasets.bundled import write_bundled
from tests.helpers.tiny_backbone import TinyBackbone


def test_the_benchmark_gives_unlabelled_images_to_the_method_that_uses_them(
    tmp_path: Path,
) -> None:
    write_bundled(tmp_path / "data")
    protocol = "3-way 1-shot, unlabelled 12"
    config = read_config(
        {
            "sets": ["digits"],
            "protocols": [protocol],
            "tasks": 3,
            "views": 0,
            "backbones": ["tiny"],
            "methods": ["miv", "miv+unlabelled"],
        }
    )
    workspace = Workspace(tmp_path / "run", tmp_path / "data", tmp_path / "cache")
    results = run(config, workspace, backbones={"tiny": TinyBackbone()})
    assert [r.error for r in results] == [None] * 6
    assert {r.protocol for r in results} == {protocol}
    by_method = {
        name: [(r.accuracy, r.calibration) for r in results if r.method == name]
        for name in ("miv", "miv+unlabelled")
    }
    assert by_method["miv"] != by_method["miv+unlabelled"]
    with pytest.raises(InputError, match="have none: use one such as"):
        replace(config, protocols=("3-way 1-shot",))
