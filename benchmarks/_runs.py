"""Runs methods on tasks in worker processes, keeps every result, and sums them up.

Results are lines of JSON, one per finished (backbone, set, method, task), appended at once: a run
that was stopped goes on where it was, and lines that exist already are not computed again. Delete
the file to begin anew, for instance after a change of the head.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from scipy.stats import ttest_rel

from _backbones import Subject
from _methods import Method
from _tasks import CONFIRMATION, TUNING, build_bank, open_set, sample_task

SETS = {"tuning": TUNING, "confirmation": CONFIRMATION, "all": TUNING + CONFIRMATION}


@dataclass(frozen=True)
class Job:
    """All that a worker does for one set."""

    subject: Subject
    data: Path
    name: str
    methods: tuple[Method, ...]
    tasks: int
    seed: int
    results: Path


@dataclass(frozen=True)
class Score:
    """What a method reached on some tasks."""

    accuracies: np.ndarray[tuple[int], np.dtype[np.float64]]  # in %, in the order of tasks
    seconds: float  # median processor time of a fit

    @property
    def mean(self) -> float:
        """Mean accuracy in %."""
        return float(self.accuracies.mean())

    @property
    def half_width(self) -> float:
        """Of the 95 % interval of the mean: 1.96 std / sqrt(n); one task has none."""
        if len(self.accuracies) < 2:
            return math.nan
        return float(1.96 * self.accuracies.std() / math.sqrt(len(self.accuracies)))

    def __str__(self) -> str:
        return f"{self.mean:.1f} ± {self.half_width:.1f}"


Scores = dict[str, dict[str, Score]]  # by set and method
Key = tuple[str, str, str, int, int]  # backbone, set, method, seed, task


def read_results(path: Path) -> dict[Key, tuple[float, float]]:
    """Accuracy and seconds of every finished task."""
    results: dict[Key, tuple[float, float]] = {}
    if path.exists():
        for line in path.read_text().splitlines():
            r = json.loads(line)
            key = (r["backbone"], r["set"], r["method"], r["seed"], r["task"])
            results[key] = (r["accuracy"], r["seconds"])
    return results


def run_set(job: Job) -> str:
    """Compute what is missing for one set; tasks outside, methods inside."""
    done = read_results(job.results)
    missing = [
        (number, method)
        for number in range(job.tasks)
        for method in job.methods
        if (job.subject.name, job.name, method.key, job.seed, number) not in done
    ]
    if not missing:
        return f"{job.name}: nothing to do"
    start = time.perf_counter()
    images = open_set(job.data, job.name)
    numbers = sorted({number for number, _ in missing})
    tasks = {number: sample_task(images.labels or (), number, job.seed) for number in numbers}
    bank = build_bank(
        job.subject,
        images,
        list(tasks.values()),
        sorted({tap for _, method in missing for tap in method.taps}),
        views=any(method.views for _, method in missing),
        seed=job.seed,
    )
    extracted = time.perf_counter()
    for number, method in missing:
        accuracy, seconds = method.run(bank, tasks[number])
        result = {"backbone": job.subject.name, "set": job.name, "method": method.key}
        result |= {"seed": job.seed, "task": number}
        result |= {"accuracy": round(accuracy, 5), "seconds": round(seconds, 3)}
        with job.results.open("a") as file:
            file.write(json.dumps(result) + "\n")
    end = time.perf_counter()
    return (
        f"{job.name}: {len(bank.features)} images and views in {extracted - start:.0f} s, "
        f"{len(missing)} fits in {end - extracted:.0f} s"
    )


def run(subject: Subject, methods: Sequence[Method], args: argparse.Namespace) -> Scores:
    """Compute what is missing and return scores by set and method."""
    jobs = [
        Job(subject, args.data, name, tuple(methods), args.tasks, args.seed, args.results)
        for name in args.sets
    ]
    os.environ["OMP_NUM_THREADS"] = "1"  # workers inherit it: one thread each
    args.results.parent.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.workers, context, torch.set_num_threads, (1,)) as pool:
        for line in pool.map(run_set, jobs):
            print(line, flush=True)
    scores = collect(subject, methods, args)
    if args.json:
        document = {
            name: {
                key: {"accuracies": score.accuracies.round(2).tolist(), "seconds": score.seconds}
                for key, score in by_method.items()
            }
            for name, by_method in scores.items()
        }
        args.json.write_text(json.dumps(document) + "\n")
    return scores


def collect(subject: Subject, methods: Sequence[Method], args: argparse.Namespace) -> Scores:
    """Scores by set and method from the result file."""
    results = read_results(args.results)
    scores: Scores = {}
    for name in args.sets:
        for method in methods:
            keys = [(subject.name, name, method.key, args.seed, k) for k in range(args.tasks)]
            found = [results[key] for key in keys]
            accuracies, seconds = np.array(found).T
            scores.setdefault(name, {})[method.key] = Score(
                100 * accuracies, float(np.median(seconds))
            )
    return scores


def mean_over_sets(scores: Scores, key: str) -> tuple[float, float]:
    """Mean of the sets' means, and the half-width of its 95 % interval over tasks."""
    means = [by_method[key].mean for by_method in scores.values()]
    widths = [by_method[key].half_width for by_method in scores.values()]
    return float(np.mean(means)), math.hypot(*widths) / len(widths)


def paired(parts: Iterable[dict[str, Score]], key: str, rival: str) -> tuple[float, float]:
    """Mean difference to a rival in points, and p of the paired two-sided t-test over all tasks."""
    sets = list(parts)
    ours, theirs = (np.concatenate([part[k].accuracies for part in sets]) for k in (key, rival))
    p = float(ttest_rel(ours, theirs).pvalue) if np.any(ours != theirs) else 1.0
    return float((ours - theirs).mean()), p


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay out a Markdown table; the first column is text, the others are figures."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def arguments(description: str, sets: str) -> argparse.ArgumentParser:
    """Make the options that all measurements share."""
    parser = argparse.ArgumentParser(description=description)
    data = os.environ.get("MIV_DATA")
    parser.add_argument(
        "--data",
        type=Path,
        default=data,
        required=data is None,
        help="folder that holds the sets as folders or zips; by default the variable MIV_DATA",
    )
    parser.add_argument("--results", type=Path, required=True, help="file to add results to")
    parser.add_argument("--json", type=Path, help="also write all accuracies to this file")
    parser.add_argument(
        "--sets",
        type=lambda text: SETS.get(text) or tuple(text.split(",")),
        default=SETS[sets],
        help=f"{', '.join(SETS)}, or names with commas between (default: {sets})",
    )
    parser.add_argument("--tasks", type=int, default=10, help="tasks a set (default: 10)")
    parser.add_argument("--seed", type=int, default=0, help="of tasks and views (default: 0)")
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each")
    return parser
