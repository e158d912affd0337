"""Threads that compute: parts of work, nesting, forks, limits, and how PyTorch's threads wait."""

import os
import subprocess
import sys
import threading

import pytest

from mivhead._util import threads as _threads
from mivhead._util.threads import run_parts, set_threads, shared_cores, thread_count


def policy(code, **variables):
    """What OMP_WAIT_POLICY is after some imports in a new process."""
    environment = {k: v for k, v in os.environ.items() if k != _threads.POLICY} | variables
    shown = f"{code}; import os; print(os.environ.get('OMP_WAIT_POLICY'))"
    done = subprocess.run(
        [sys.executable, "-c", shown], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


CLASSIFIER = "from mivhead import FewShotClassifier"


def test_what_computes_lets_pytorchs_threads_wait_passively():
    assert policy(CLASSIFIER) == "passive"


@pytest.mark.parametrize(
    ("quota", "cores"), [("50000 100000\n", 1), ("max 100000\n", 8), ("nonsense", 8)]
)
def test_a_quota_of_a_container_limits_the_cores(quota, cores, monkeypatch, tmp_path):
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(_threads, "CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    assert _threads.available_cores.__wrapped__() == cores


def test_how_many_threads_compute(threads, monkeypatch):
    assert thread_count() == threads
    monkeypatch.setattr(_threads, "available_cores", lambda: 1)
    assert thread_count() == 1  # no more than there are cores
    monkeypatch.setattr(_threads, "available_cores", lambda: 8)
    set_threads(None)
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert thread_count() == 5
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert thread_count() == 8


@pytest.mark.parametrize("parts", [0, 1, 2, 50])
def test_every_part_is_worked_on_once(parts, threads):
    done = []
    run_parts(done.append, parts)
    assert sorted(done) == list(range(parts))


def test_parts_run_side_by_side(threads):
    """Each waits for the others, so that one thread alone could not end."""
    together = threading.Barrier(threads, timeout=30)
    run_parts(lambda _: together.wait(), threads)


def test_an_exception_is_raised_after_the_other_parts_have_ended(threads):
    """Whether it comes from a helper or from the calling thread."""
    for bad in range(3):
        running = []

        def work(part, bad=bad, running=running):
            if part == bad:
                raise ValueError(f"part {part}")
            running.append(part)
            running.remove(part)

        with pytest.raises(ValueError, match=f"part {bad}"):
            run_parts(work, 6)
        assert running == []
        done = []
        run_parts(done.append, 4)  # the threads can be used again
        assert sorted(done) == [0, 1, 2, 3]


def test_parts_of_parts_run_in_the_thread_of_their_part(threads):
    seen = {}

    def inner(outer):
        here = threading.get_ident()
        within = []
        run_parts(lambda part: within.append((part, threading.get_ident())), 3)
        seen[outer] = within == [(part, here) for part in range(3)]

    run_parts(inner, 5)
    assert list(seen.values()) == [True] * 5


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own(threads):
    run_parts(lambda _: None, 4)  # our threads exist; a fork does not copy them
    with shared_cores():  # ... and a context is open
        child = os.fork()
        if child == 0:
            done = []
            with shared_cores():
                run_parts(done.append, 10)
            os._exit(0 if sorted(done) == list(range(10)) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def blas_threads():
    from threadpoolctl import threadpool_info

    libraries = [each for each in threadpool_info() if each["user_api"] == "blas"]
    return [each["num_threads"] for each in libraries if "numpy" in each["filepath"]]


def test_heavy_work_gives_numpy_one_thread_and_then_back():
    from threadpoolctl import threadpool_limits

    with threadpool_limits(2, user_api="blas"):
        before = blas_threads()
        with shared_cores():
            with pytest.raises(ValueError, match="broken"), shared_cores():
                raise ValueError("broken")
            assert set(blas_threads()) <= {1}
        assert blas_threads() == before


def test_heavy_work_limits_pytorch_while_it_runs(threads):
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with shared_cores():
            assert torch.get_num_threads() == threads
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
