"""A real Ray cluster of two nodes on this machine: results equal the local ones, whoever dies."""

import socket
import threading
import time

import pytest

from mivhead.benchmark.runner import Place, run
from mivhead.errors import InputError, NotAvailableError
from mivhead.executors import Died
from mivhead.executors.local import InlineExecutor
from tests.helpers.bench_data import numbers, read_config, write_sets
from tests.helpers.clusters import Saboteur
from tests.helpers.worker_calls import CountThreads, Fail, KillWorker, Square

ray = pytest.importorskip("ray", reason="needs the extra ray")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # Ray has many
]

from mivhead.executors.ray_cluster import RayExecutor  # noqa: E402  # after the skip

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
    place = Place(tmp_path / "local", data, cache=tmp_path / "features-local")
    local = run(config, place, InlineExecutor())
    executor = Saboteur(RayExecutor(cluster.address), cluster, "methods")
    try:
        place = Place(tmp_path / "ray", data, cache=tmp_path / "features-ray")
        there = run(config, place, executor)
    finally:
        executor.close()
    assert executor.died >= 2
    assert numbers(there) == numbers(local)
    assert len(there) == 32


def test_addresses_that_do_not_answer_are_told_within_seconds():
    started = time.monotonic()
    with pytest.raises(NotAvailableError, match="No Ray cluster answers"):
        RayExecutor("127.0.0.1:9")
    with pytest.raises(InputError, match="not of the form"):
        RayExecutor("somewhere")
    with pytest.raises(NotAvailableError, match="No Ray cluster answers"):
        RayExecutor("ray://127.0.0.1:9")
    assert time.monotonic() - started < 10


def test_something_else_that_answers_is_no_cluster():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        stop = threading.Event()

        def accept():
            kept = []
            while not stop.is_set():
                try:
                    kept.append(server.accept()[0])
                except TimeoutError:
                    continue
            for each in kept:
                each.close()

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            with pytest.raises(NotAvailableError, match="is not a Ray cluster"):
                RayExecutor(f"127.0.0.1:{server.getsockname()[1]}")
        finally:
            stop.set()
            thread.join()
