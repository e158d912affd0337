"""Workers of this machine: one thread each, replaced when they die, gone when we are."""

import contextlib
import multiprocessing
import os
import socket
import time

import pytest

from mivhead.errors import InputError, NotAvailableError
from mivhead.executors import Died, make_executor, ray_cluster
from tests.helpers.worker_calls import CountThreads, Fail, KillWorker, Square


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
