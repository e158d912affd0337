"""Workers of this machine: one thread each, replaced when they die, gone when we are."""

import contextlib
import multiprocessing
import os
import socket
import time

import pytest

from mivhead.errors import InputError, NotAvailableError
from mivhead.executors import Died, make_executor, ray_cluster
from mivhead.executors.local import LocalExecutor
from tests.helpers.worker_calls import CountThreads, Fail, KillWorker, ReadVariable, Square


def test_workers_die_and_work_goes_on(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    executor = make_executor("local", 2)
    try:
        calls = [Square(2), KillWorker(), Square(3), Square(4), CountThreads()]
        outcomes = dict(executor.run(calls))
        assert outcomes.keys() == set(calls)
        died = outcomes.pop(KillWorker())
        assert died == Died("the worker was killed by SIGKILL, perhaps for lack of memory")
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


def test_bad_requests():
    with pytest.raises(InputError, match="Did you mean 'local'"):
        make_executor("locl", 1)
    with pytest.raises(InputError, match="address is for the executor 'ray'"):
        make_executor("local", 1, "head:6379")


def test_ray_addresses_that_cannot_be():
    with pytest.raises(InputError, match="not of the form HOST:PORT"):
        make_executor("ray", 1, "nowhere")
    with pytest.raises(NotAvailableError, match="No Ray cluster answers at 127"):
        make_executor("ray", 1, "127.0.0.1:9")


def test_a_ray_address_that_swallows_calls_is_told_within_seconds(monkeypatch):
    monkeypatch.setattr(ray_cluster, "ANSWER", 0.5)
    with socket.socket() as server, contextlib.ExitStack() as callers:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        host, port = server.getsockname()
        for _ in range(4):  # nobody takes them: when the queue is full, packets are dropped
            caller = callers.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex((host, port))
        started = time.monotonic()
        with pytest.raises(NotAvailableError, match=r"No Ray cluster answers at .*timed out"):
            make_executor("ray", 1, f"{host}:{port}")
        assert time.monotonic() - started < 5


def test_every_worker_sees_one_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    executor = make_executor("local", 2, device="cuda")
    try:
        calls = [ReadVariable("CUDA_VISIBLE_DEVICES", n) for n in range(2)]
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
        assert len(executor._pool) == 1
    finally:
        executor.close()


class FakeRay:
    """As much of Ray as the executor needs to be created."""

    exceptions = None

    def __init__(self, gpus):
        self.resources = {"CPU": 8.0} | ({"GPU": float(gpus)} if gpus else {})
        self.asked = None

    def init(self, **_):
        pass

    def shutdown(self):
        pass

    def cluster_resources(self):
        return self.resources

    def remote(self, **asked):
        self.asked = asked
        return lambda call: call


@pytest.mark.parametrize(("device", "gpus", "workers"), [("cpu", 0, 8), ("cuda", 1, 2)])
def test_calls_on_ray_ask_for_a_gpu(device, gpus, workers, monkeypatch):
    ray = FakeRay(2)
    monkeypatch.setattr(ray_cluster, "need", lambda *_: ray)
    executor = make_executor("ray", 1, device=device)
    assert ray.asked["num_gpus"] == gpus
    assert executor.workers == workers


def test_a_cluster_without_gpus_is_told_at_once(monkeypatch):
    monkeypatch.setattr(ray_cluster, "need", lambda *_: FakeRay(0))
    with pytest.raises(NotAvailableError, match="has no GPU: use --device cpu"):
        make_executor("ray", 1, device="cuda")
