"""A job on a real Ray cluster of two nodes: the rows of the local run, whoever dies."""

from __future__ import annotations

import pyarrow.parquet as pq
import pytest

from mivhead import jobs
from mivhead.jobs import executors
from mivhead.jobs.executors import RayExecutor
from tests.helpers.clusters import Saboteur

ray = pytest.importorskip("ray", reason="needs the extra ray")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # Ray has many
]


def test_the_rows_of_the_local_run_though_a_worker_and_a_node_die(
    cluster, here, tmp_path, monkeypatch
):
    local, there = tmp_path / "local.parquet", tmp_path / "ray.parquet"
    sources = [here / "new", here / "new" / "dark", here / "new" / "light"]
    options = {"part_rows": 2}
    assert jobs.predict(here / "model.onnx", sources, local, **options).rows == 40
    made = []

    def executor(*args):
        made.append(Saboteur(RayExecutor(*args), cluster))
        return made[0]

    monkeypatch.setattr(executors, "RayExecutor", executor)
    result = jobs.predict(here / "model.onnx", sources, there, ray=cluster.address, **options)
    assert (result.rows, result.errors) == (40, 4)
    assert made[0].died >= 2
    assert not made[0].node_lives
    assert pq.read_table(there).equals(pq.read_table(local))
