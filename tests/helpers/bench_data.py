"""Small data sets, a backbone and configurations for tests of the runner."""

from pathlib import Path

import numpy as np
from PIL import Image

from mivhead_bench.benchmark.config import RunConfig, read_config
from mivhead_bench.benchmark.results import Result

MIV = {"name": "miv", "params": {"steps": 2}}  # views matter to it; few steps are quick


def write_sets(folder: Path, names=("dots", "bars"), classes: int = 6, images: int = 8) -> Path:
    """Sets of noisy images, one mean colour a class."""
    for number, name in enumerate(names):
        rng = np.random.default_rng(number)
        colours = rng.integers(40, 215, (classes, 3))
        for label, colour in enumerate(colours):
            place = folder / name / f"class{label}"
            place.mkdir(parents=True)
            for i in range(images):
                pixels = np.clip(colour + rng.normal(0, 45, (20, 24, 3)), 0, 255)
                Image.fromarray(pixels.astype(np.uint8)).save(place / f"{i}.png")
    return folder


def config(**changes) -> RunConfig:
    usual = {
        "backbones": ["tiny"],
        "methods": [MIV, "ncc"],
        "sets": ["dots", "bars"],
        "protocols": ["5-way 2-shot"],
        "tasks": 3,
        "views": 2,
    }
    return read_config(usual | changes)


def result(**changes) -> Result:
    usual = {
        "backbone": "tiny",
        "set": "dots",
        "protocol": "varying",
        "method": "miv",
        "task": 0,
        "tasks": "f" * 64,
        "ways": 5,
        "shots": 10,
        "views": 0,
        "queries": 20,
        "accuracy": 0.5,
        "error": None,
        "adapt_seconds": 1.0,
        "infer_seconds": 0.1,
        "backbone_seconds": 0.2,
        "peak_bytes": 10,
        "gflops_paper": 0.5,
        "calibration": ((20.0, 11.0, 10.0),),
    }
    return Result(**usual | changes)


def numbers(results: list[Result]) -> dict[tuple, tuple]:
    """What must not depend on where and when it was computed."""
    return {
        (r.backbone, r.set, r.protocol, r.task, r.method): (
            r.tasks,
            r.accuracy,
            r.error,
            r.calibration,
            r.views,
            r.gflops_paper,
        )
        for r in results
    }
