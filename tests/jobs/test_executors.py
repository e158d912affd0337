"""Workers of this machine: one thread each, replaced when they die, gone when we are."""

import multiprocessing
import os

import pytest

from mivhead.errors import InputError, NotAvailableError
from mivhead.jobs import executors
from mivhead.jobs.executors import Died, LocalExecutor, RayExecutor
from tests.helpers.worker_calls import CountThreads, Fail, KillWorker, ReadVariable, Square


def test_workers_die_and_work_goes_on(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    executor = LocalExecutor(2)
    try:
        calls = [Square(2), KillWorker(), Square(3), Square(4), CountThreads()]
        outcomes = dict(executor.run(calls))
        assert outcomes.keys() == set(calls)
        assert isinstance(outcomes.pop(KillWorker()), Died)
        assert outcomes == {
            Square(2): 4,
            Square(3): 9,
            Square(4): 16,
            CountThreads(): (1, "1"),
        }
        assert os.environ["OMP_NUM_THREADS"] == "7"
        with pytest.raises(InputError, match="this call fails"):
            list(executor.run([Fail()]))
        assert list(executor.run([Square(5)])) == [(Square(5), 25)]  # the workers are still there
        assert 1 <= len(multiprocessing.active_children()) <= 2
    finally:
        executor.close()
    assert multiprocessing.active_children() == []


def test_ray_addresses_that_cannot_be():
    for address in ("nowhere", "127.0.0.1:9"):
        with pytest.raises(NotAvailableError, match="HOST:PORT"):
            RayExecutor(address)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs Unix")
def test_every_worker_sees_one_gpu(monkeypatch, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    executor = LocalExecutor(2, gpus=["4", "7"])
    try:
        calls = [ReadVariable("CUDA_VISIBLE_DEVICES", tmp_path / "pipe", mode) for mode in "rw"]
        assert {seen for _, seen in executor.run(calls)} == {"4", "7"}
        list(executor.run([KillWorker()]))  # its successor gets the same GPU
        assert {seen for _, seen in executor.run(calls)} == {"4", "7"}
    finally:
        executor.close()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,7"


def test_fewer_calls_at_a_time():
    executor = LocalExecutor(3)
    try:
        outcomes = list(executor.run([Square(n) for n in range(4)], 1))
        assert [n for _, n in outcomes] == [0, 1, 4, 9]  # one after the other
    finally:
        executor.close()


class FakeRay:
    """As much of Ray as the executor needs to be created."""

    def __init__(self, gpus):
        self.resources = {"CPU": 8.0} | ({"GPU": float(gpus)} if gpus else {})
        self.requested = None

    def init(self, **_):
        pass

    def shutdown(self):
        pass

    def cluster_resources(self):
        return self.resources

    def remote(self, **requested):
        self.requested = requested
        return lambda call: call


@pytest.mark.parametrize(("gpus", "workers"), [(0, 8), (1, 2)])
def test_calls_on_ray_ask_for_a_gpu(gpus, workers, monkeypatch):
    ray = FakeRay(2)
    monkeypatch.setattr(executors, "need", lambda *_: ray)
    executor = RayExecutor(gpus=gpus)
    assert ray.requested["num_gpus"] == gpus
    assert executor.workers == workers


def test_a_cluster_without_gpus_is_told_at_once(monkeypatch):
    monkeypatch.setattr(executors, "need", lambda *_: FakeRay(0))
    with pytest.raises(NotAvailableError, match="GPU"):
        RayExecutor(gpus=1)
