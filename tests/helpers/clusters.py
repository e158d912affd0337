"""Ways to kill a worker or a node of the Ray cluster of the tests (the fixture `cluster`)."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from mivhead.jobs.executors import Died


def find_worker(nodes, seconds=30):
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


class Saboteur:
    """An executor that kills a worker after the first call and, from the third on, a node.

    Only calls with the attribute `counted`, if it is given, count as calls.
    """

    def __init__(self, executor, cluster, counted=None):
        self._executor, self._cluster, self._counted = executor, cluster, counted
        self.workers = executor.workers
        self.died = self.done = 0
        self.node_lives = True

    def run(self, calls, most=None):
        for call, outcome in self._executor.run(calls, most):
            self.died += isinstance(outcome, Died)
            if self._counted is None or hasattr(call, self._counted):
                self.done += 1
                if self.done == 1:
                    os.kill(find_worker(self._cluster.list_all_nodes()), signal.SIGKILL)
                if self.done >= 3 and self.node_lives:
                    self.node_lives = not kill_node_at_work(self._cluster)
            yield call, outcome

    def close(self):
        self._executor.close()
