import math
import os
import subprocess
import sys

import pytest
import torch

from mivhead._util import threads as _threads


def policy(code, **variables):
    """What OMP_WAIT_POLICY is after some imports in a new process."""
    environment = {k: v for k, v in os.environ.items() if k != _threads.POLICY} | variables
    shown = f"{code}; import os; print(os.environ.get('OMP_WAIT_POLICY'))"
    done = subprocess.run(
        [sys.executable, "-c", shown], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_importing_mivhead_lets_threads_wait_passively():
    assert policy("import mivhead") == "passive"


def test_a_policy_of_the_user_stays():
    assert policy("import mivhead", OMP_WAIT_POLICY="active") == "active"


def test_after_pytorch_it_is_too_late_to_set_a_policy():
    assert policy("import torch, mivhead") == "None"


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, math.inf),
        ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 0.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, math.inf),
        ({"cpu.max": "nonsense"}, math.inf),
        ({}, math.inf),
    ],
)
def test_quota_of_a_container(files, cores, tmp_path):
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert _threads._quota(tmp_path) == cores


def test_a_quota_limits_the_cores(monkeypatch, tmp_path):
    (tmp_path / "cpu.max").write_text("50000 100000")
    monkeypatch.setattr(_threads, "CGROUP", tmp_path)
    assert _threads.available_cores() == 1


@pytest.fixture
def two_threads(monkeypatch):
    monkeypatch.setattr(_threads, "available_cores", lambda: 2)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("faster", "used"), [(True, 2), (False, 1)])
def test_spinning_threads_are_used_only_if_they_help(faster, used, two_threads, monkeypatch):
    monkeypatch.setenv(_threads.POLICY, "active")
    monkeypatch.setattr(_threads, "_faster_than_one", lambda _: faster)
    with _threads.shared_cores():
        assert torch.get_num_threads() == used
    assert torch.get_num_threads() == 2


def test_sleeping_threads_are_always_used(two_threads, monkeypatch):
    monkeypatch.setenv(_threads.POLICY, "PASSIVE")
    monkeypatch.setattr(_threads, "_faster_than_one", lambda _: False)
    assert _threads.useful_threads() == 2


def test_the_trial_leaves_the_number_of_threads_alone(two_threads):
    assert _threads._faster_than_one(2) in (True, False)
    assert torch.get_num_threads() == 2
