"""Predict any number of images: streamed, in parts, resumable, on one machine or many.

`predict` goes through sources shard by shard (`sources`, at any URL: `urls`), computes each here,
in processes or on a Ray cluster (`executors`), and writes Parquet (`job`).
"""

from typing import TYPE_CHECKING

from mivhead._util.imports import lazy

if TYPE_CHECKING:
    from mivhead.jobs.job import JobResult as JobResult
    from mivhead.jobs.job import predict as predict

__all__ = ["JobResult", "predict"]

__getattr__, __dir__ = lazy(__name__, {"job": "JobResult predict"})
