"""Results that no run has made, for tests of what is done with results."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mivhead_bench.benchmark.results import Result

TEMPLATE = Result(
    backbone="resnet50",
    set="birds",
    protocol="varying",
    method="miv",
    task=0,
    tasks="a" * 64,
    ways=5,
    shots=25,
    views=75,
    queries=50,
    accuracy=0.8,
    error=None,
    adapt_seconds=0.5,
    infer_seconds=0.1,
    backbone_seconds=1.0,
    peak_bytes=10**8,
    gflops_paper=10.0,
    calibration=((25.0, 15.0, 16.0), (25.0, 22.0, 24.0)),
)


def result(**changes: object) -> Result:
    return replace(TEMPLATE, **changes)


def cell(
    name: str, method: str, accuracies: list[float | None], *, error: str = "memory: full", **more
) -> list[Result]:
    """One method on one set; None is a failure."""
    return [
        result(
            set=name,
            method=method,
            task=task,
            accuracy=accuracy,
            error=error if accuracy is None else None,
            **more,
        )
        for task, accuracy in enumerate(accuracies)
    ]


def random_run(
    sets: list[str],
    levels: dict[str, float],
    *,
    tasks: int = 20,
    seed: int = 0,
    costs: dict[str, float] | None = None,
    **more: object,
) -> list[Result]:
    """Accuracies around a level per method; tasks of a set share their difficulty."""
    generator = np.random.default_rng(seed)
    results = []
    for place, name in enumerate(sets):
        difficulty = generator.normal(-0.03 * place, 0.08, tasks)
        for method, level in levels.items():
            noise = generator.normal(0, 0.02, tasks)
            values = np.clip(np.round(50 * (level + difficulty + noise)) / 50, 0, 1)
            cost = (costs or {}).get(method, 1.0)
            results += cell(
                name,
                method,
                values.tolist(),
                gflops_paper=10 * cost,
                gflops_authors=30 if method == "miv" else 10 * cost,
                adapt_seconds=0.5 * cost,
                **more,
            )
    return results
