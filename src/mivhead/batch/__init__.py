"""Jobs over any number of images: streamed, written in parts, resumable, on one machine or many.

`predict` and `extract` go through a source (`sources`), which may be anywhere that
`mivhead.images.places` reaches. A job is a list of shards. Each is computed by itself (`job`,
`work`) in this process, in worker processes or on a Ray cluster, and written as Parquet files that
appear when they are complete (`output`).
"""

from typing import TYPE_CHECKING

from mivhead._util.lazy import lazy

if TYPE_CHECKING:
    from mivhead.batch.job import JobResult as JobResult
    from mivhead.batch.job import Result as Result
    from mivhead.batch.job import extract as extract
    from mivhead.batch.job import predict as predict

__all__ = ["JobResult", "extract", "predict"]  # `Result` was the name of JobResult in 0.2.0

__getattr__, __dir__ = lazy(__name__, {"job": "JobResult Result extract predict"})
