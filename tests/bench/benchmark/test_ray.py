"""A real Ray cluster of two nodes on this machine: results equal the local ones, whoever dies."""

import pytest

from mivhead.errors import InputError
from mivhead.jobs.executors import Died
from mivhead_bench.benchmark.executors import InlineExecutor
from mivhead_bench.benchmark.runner import Workspace, run
from tests.helpers.bench_data import numbers, read_config, write_sets
from tests.helpers.clusters import Saboteur
from tests.helpers.worker_calls import CountThreads, Fail, KillWorker, Square

ray = pytest.importorskip("ray", reason="needs the extra ray")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # Ray has many
]

from mivhead.jobs.executors import RayExecutor  # noqa: E402  # after the skip

METHODS = [{"name": "miv", "params": {"steps": 4}}, "ncc"]
CONFIG = {"sets": ["dots"], "methods": METHODS, "protocols": ["5-way 1-shot"], "views": 1}


def test_calls_threads_errors_and_dead_workers(cluster):
    executor = RayExecutor(cluster.address)
    try:
        assert executor.workers == 4
        calls = [Square(2), KillWorker(), CountThreads(), Square(3)]
        outcomes = dict(executor.run(calls))
        assert isinstance(outcomes.pop(KillWorker()), Died)
        assert outcomes == {Square(2): 4, Square(3): 9, CountThreads(): (1, "1")}
        with pytest.raises(InputError, match="this call fails"):
            list(executor.run([Fail()]))
    finally:
        executor.close()


def test_results_equal_the_local_ones_though_a_worker_and_a_node_die(cluster, tmp_path):
    data = write_sets(tmp_path / "data", names=("dots",), images=4)
    config = read_config(CONFIG | {"tasks": 16})
    workspace = Workspace(tmp_path / "local", data, cache=tmp_path / "features-local")
    local = run(config, workspace, InlineExecutor())
    executor = Saboteur(RayExecutor(cluster.address), cluster, "methods")
    try:
        workspace = Workspace(tmp_path / "ray", data, cache=tmp_path / "features-ray")
        there = run(config, workspace, executor)
    finally:
        executor.close()
    assert executor.died >= 2
    assert numbers(there) == numbers(local)
    assert len(there) == 32
