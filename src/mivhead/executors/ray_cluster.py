"""Executor on a Ray cluster, whose machines share the data folder and the feature cache."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.metadata import version
from itertools import islice
from typing import Any

from mivhead._util.optional import need
from mivhead.errors import InputError, NotAvailableError
from mivhead.executors import Call, Died, T
from mivhead.executors.local import ONE_THREAD, one_thread

ANSWER = 5.0  # seconds that the address gets to accept a connection
HEALTH = 45.0  # seconds for the health check; a busy machine takes long to import Ray
USAGE = 2  # exit code of a version of Ray without that command, which tells nothing
AHEAD = 2  # calls per processor that are submitted to Ray at once
LOOK = 2.0  # seconds after which new and lost nodes are noticed


class RayExecutor:
    """Runs calls on a Ray cluster, one processor each.

    The address is `HOST:PORT`, `ray://HOST:PORT`, or `auto` for the cluster that this machine
    belongs to; by default a cluster is started on this machine. Ray shows a call only the GPUs that
    it needs.
    """

    def __init__(self, address: str | None = None, *, gpus: int = 0) -> None:
        if address is not None:
            _check_address(address)  # before Ray is imported, which takes seconds
        ray = need("ray", "ray")
        try:
            ray.init(
                address=address or "local",
                runtime_env={"env_vars": dict(ONE_THREAD)},
                log_to_driver=False,
                logging_level="ERROR",
            )
        # Ray raises all kinds of errors; in any case, the cluster cannot be used.
        except Exception as error:
            raise NotAvailableError(
                f"The Ray cluster {address or 'on this machine'} cannot be used: {_short(error)}"
            ) from error
        self._ray = ray
        # The runner decides about retries, as with every executor: Ray retries nothing.
        self._gpus = gpus
        self._remote = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0)(_in_one_thread)
        if gpus and not ray.cluster_resources().get("GPU"):
            ray.shutdown()
            raise NotAvailableError(
                f"The Ray cluster {address or 'on this machine'} has no GPU: use --device cpu, or "
                "start its nodes with `ray start --num-gpus N`."
            )
        self._calls: dict[Any, Call[Any]] = {}  # that are submitted

    @property
    def workers(self) -> int:
        """Number of processors of the cluster at this moment, or of GPUs if calls need them."""
        there = self._ray.cluster_resources()
        return max(1, int(there.get("GPU", 1) / self._gpus if self._gpus else there.get("CPU", 1)))

    def run(
        self, calls: Iterable[Call[T]], most: int | None = None
    ) -> Iterator[tuple[Call[T], T | Died]]:
        """Run calls; if a worker or node dies, the outcome of its call is `Died`."""
        del most  # the memory of this machine says nothing about the others
        waiting = iter(calls)
        while True:
            room = max(0, AHEAD * self.workers - len(self._calls))
            for call in islice(waiting, room):
                self._calls[self._remote.remote(call)] = call
            if not self._calls:
                return
            done, _ = self._ray.wait(list(self._calls), num_returns=1, timeout=LOOK)
            for handle in done:
                yield self._calls.pop(handle), self._result(handle)

    def _result(self, handle: Any) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.get(handle)
        except errors.RayTaskError as error:
            raise error.cause from error  # what the call itself raised
        except errors.RayError as error:
            return Died(f"the worker or its node is gone ({type(error).__name__})")

    def close(self) -> None:
        """Cancel running calls and leave the cluster."""
        for handle in self._calls:
            with suppress(self._ray.exceptions.RayError):
                self._ray.cancel(handle, force=True)
        self._calls.clear()
        self._ray.shutdown()


def _in_one_thread(call: Call[T]) -> T:
    with one_thread():
        return call()


def _check_address(address: str) -> None:
    """Raise an error within seconds if no cluster answers; Ray itself tries for minutes."""
    if address in ("auto", "local"):
        return
    scheme, _, place = address.rpartition("://")
    host, _, port = place.rpartition(":")
    if scheme not in ("", "ray") or not host or not port.isdecimal():
        raise InputError(
            f"The Ray address {address!r} is not of the form HOST:PORT, ray://HOST:PORT or auto."
        )
    try:
        socket.create_connection((host, int(port)), timeout=ANSWER).close()
    except (OSError, OverflowError) as error:
        raise NotAvailableError(
            f"No Ray cluster answers at {address} ({_short(error)}); is it running? "
            "`ray start --head` on its first machine prints the address."
        ) from error
    if not scheme and not _is_healthy(f"{host}:{port}"):
        raise NotAvailableError(
            f"What answers at {address} is not a Ray cluster of version {version('ray')}."
        )


def _is_healthy(address: str) -> bool:
    """Check the head of the cluster with Ray's own command, which can be stopped."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", address]
    try:
        answer = subprocess.run(command, capture_output=True, timeout=HEALTH, check=False)
    except subprocess.TimeoutExpired:
        return False
    return answer.returncode in (0, USAGE)


def _short(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
