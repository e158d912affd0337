"""What operators see: one line of JSON per request in the log, and metrics for Prometheus.

Neither contains images, keys or query strings.
"""

from __future__ import annotations

import json
import logging
import secrets
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import prometheus_client as prometheus
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_BATCHES = (1, 2, 4, 8, 16, 32, 64)

WINDOW = 500  # recent images that are compared with the shots
FEWEST = 10  # images, and shots, below which they are not

_log = logging.getLogger(__name__)


class Metrics:
    """The metrics of one service, in Prometheus' text format."""

    def __init__(self) -> None:
        registry = prometheus.CollectorRegistry()
        self._registry = registry
        self.requests = prometheus.Counter(
            "miv_requests", "Requests by path and status.", ["path", "status"], registry=registry
        )
        self.seconds = prometheus.Histogram(
            "miv_request_seconds",
            "Seconds from the head of a request to the end of its answer.",
            ["path"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.batches = prometheus.Histogram(
            "miv_batch_images", "Images per batch.", buckets=_BATCHES, registry=registry
        )
        self.batch_seconds = prometheus.Counter(
            "miv_batch_seconds", "Seconds spent on computing batches.", registry=registry
        )
        self.queue = prometheus.Gauge(
            "miv_queue_images", "Images that wait or are being computed.", registry=registry
        )
        self.predictions = prometheus.Counter(
            "miv_predictions",
            "Predictions by model and decision: a class, `unsure` or `none of these`.",
            ["model", "decision"],
            registry=registry,
        )
        self.drift = prometheus.Gauge(
            "miv_drift",
            "How much recent images differ from the shots in how unlike the shots they are: 0 is "
            "not at all, 1 is completely.",
            ["model"],
            registry=registry,
        )
        self._recent: dict[str, tuple[str, deque[float]]] = {}  # version and scores by model
        self.reloads = prometheus.Counter(
            "miv_reloads",
            "Times that a changed model file was read, by result.",
            ["model", "result"],
            registry=registry,
        )

    def count_batch(self, images: int, seconds: float) -> None:
        """Note a batch."""
        self.batches.observe(images)
        self.batch_seconds.inc(seconds)

    def watch_drift(
        self, model: str, version: str, reference: Sequence[float], scores: Iterable[float]
    ) -> None:
        """Compare the unknown scores of recent images with the out-of-fold scores of the shots.

        Another version of a model starts again.
        """
        if self._recent.get(model, ("", None))[0] != version:
            self._recent[model] = version, deque(maxlen=WINDOW)
        recent = self._recent[model][1]
        missing = len(recent) < FEWEST
        recent.extend(scores)
        if missing and len(recent) >= FEWEST and len(reference) >= FEWEST:
            # Computed when the metrics are read, not for every request.
            self.drift.labels(model).set_function(lambda: ks_distance(reference, recent))

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return prometheus.generate_latest(self._registry)


def ks_distance(first: Iterable[float], second: Iterable[float]) -> float:
    """Return the largest difference between two empirical distributions (Kolmogorov-Smirnov).

    >>> ks_distance([1, 2, 3, 4], [3, 4, 5, 6])
    0.5
    """
    a, b = np.sort(np.fromiter(first, float)), np.sort(np.fromiter(second, float))
    values = np.concatenate([a, b])
    shares = (np.searchsorted(each, values, side="right") / len(each) for each in (a, b))
    return float(np.abs(np.subtract(*shares)).max())


class Observer:
    """Middleware: log and count every request, and give each an id in `X-Request-Id`.

    `path_of` returns the pattern of the path of a request, so that metrics have few labels.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, path_of: Callable[[Scope], str]) -> None:
        self.app, self._metrics, self._path_of = app, metrics, path_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start = time.perf_counter()
        facts = scope["miv"] = {"id": secrets.token_hex(8)}  # endpoints add to it
        status = 499  # the client left

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message.setdefault("headers", [])
                message["headers"] = [
                    *message["headers"],
                    (b"x-request-id", facts["id"].encode()),
                ]
            await send(message)

        try:
            await self.app(scope, receive, note)
        except BaseException:
            status = 500
            raise
        finally:
            seconds = time.perf_counter() - start
            path = self._path_of(scope)
            self._metrics.requests.labels(path, status).inc()
            self._metrics.seconds.labels(path).observe(seconds)
            client = scope.get("client")
            record = {
                "client": client[0] if client else None,
                "method": scope["method"],
                "path": scope["path"],
                "status": status,
                "seconds": round(seconds, 4),
                **facts,
            }
            _log.info("request", extra={"facts": record})


def note(scope: Scope, **facts: Any) -> None:
    """Add facts, such as the number of images, to the log line of a request."""
    scope.get("miv", {}).update(facts)


class JsonFormatter(logging.Formatter):
    """One line of JSON per record."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        document = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            document["traceback"] = self.formatException(record.exc_info)
        return json.dumps(document, default=str)


def log_to_stderr() -> None:
    """Write the log of the service and of uvicorn to stderr, one JSON object per line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    for name, level in (("mivhead.service", logging.INFO), ("uvicorn.error", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
