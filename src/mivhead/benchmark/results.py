"""`Result`: what one method reached on one task; the line of the journal and the row of tables."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Result:
    """Outcome of one method on one task.

    Parameters
    ----------
    backbone, set, protocol, method
        What was run, by the names the run's configuration gives; a variant of a method has a name
        of its own.
    task
        Number of the task in its set.
    tasks
        Hash of the task set (`TaskSet.hash`): only results with equal hashes may be paired.
    ways, shots, views, queries
        Classes, support images, augmented views and query images of the task.
    accuracy
        Share of queries named rightly, 0 to 1; None if the task failed.
    error
        Why the task failed; None if it did not. `memory` and `numerical` failures begin with
        these words and a colon.
    adapt_seconds, infer_seconds
        From features to the trained head, and prediction of all queries, one thread, warmed up.
        For methods that tune the backbone, its passes are part of both.
    backbone_seconds
        One pass of support and views through the frozen backbone, from the rate measured when the
        features were extracted; 0 for methods that tune the backbone.
    peak_bytes
        Most memory taken during adaptation beyond what was taken before it.
    gflops, gflops_paper
        Adaptation, counted honestly and by the paper's rule, the backbone's pass included.
    calibration
        Per bin of confidence: queries, sum of confidences, rightly named; for the expected
        calibration error.
    """

    backbone: str
    set: str
    protocol: str
    method: str
    task: int
    tasks: str
    ways: int
    shots: int
    views: int
    queries: int
    accuracy: float | None
    error: str | None
    adapt_seconds: float
    infer_seconds: float
    backbone_seconds: float
    peak_bytes: int
    gflops: float
    gflops_paper: float
    calibration: tuple[tuple[float, float, float], ...]
