"""A real Ray cluster of two nodes on this machine, and ways to kill a worker or a node of it."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest


@pytest.fixture
def cluster(monkeypatch):
    """Two nodes of two processors; their workers can import what the tests can."""
    import ray
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    cluster.second = cluster.add_node(num_cpus=2)
    cluster.wait_for_nodes()
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def find_worker(nodes, seconds=10):
    """Wait for a process of these nodes that runs one of our calls; None if none is seen."""
    raylets = [info for node in nodes for info in node.all_processes["raylet"]]
    parents = {info.process.pid for info in raylets}
    for _ in range(20 * seconds):
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                parent = int(stat.read_text().rpartition(")")[2].split()[1])
                name = (stat.parent / "cmdline").read_text()
            except OSError:  # it has ended
                continue
            if parent in parents and name.startswith("ray::_in_one_thread"):
                return int(stat.parent.name)
        time.sleep(0.05)
    return None


def kill_node_at_work(cluster):
    """Remove the second node if it has a call, which is held back so that it cannot end."""
    worker = find_worker([cluster.second], seconds=1)
    if worker is None:
        return False
    os.kill(worker, signal.SIGSTOP)
    cluster.remove_node(cluster.second, allow_graceful=False)
    with suppress(ProcessLookupError):
        os.kill(worker, signal.SIGKILL)
    return True
