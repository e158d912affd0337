"""How fast the default backbone extracts features on a CPU, against plain eager inference.

    python benchmarks/backbone.py [--threads 2] [--json backbone.json]

Eager is the model as timm builds it, in evaluation mode under `torch.no_grad`, tapped at the same
layers. Both get the same decoded 224 px images (scikit-learn carries two photos; crops of them)
and turn them into features on the CPU. Repetitions alternate between the two, so that a busy
machine slows both; the ratio of the medians is what counts. Takes one or two minutes. Expect
ratios of about 1.5 for a single image, 2 for four, 4 in batches of 32 (what the library uses), and
differences below 1e-3.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mivhead.backbones import DEFAULT_BACKBONE, list_backbones, load_backbone
from mivhead.backbones.efficientnet_lite import PRESETS
from mivhead.backbones.efficientnet_lite_network import build
from mivhead.backbones.preprocessing import preprocess
from mivhead.backbones.taps import Taps
from mivhead.features import Features


def photos(count: int, size: int) -> list[np.ndarray[Any, Any]]:
    """Square crops of scikit-learn's two photos, at seeded places."""
    from sklearn.datasets import load_sample_images

    rng = np.random.default_rng(0)
    crops = []
    for i in range(count):
        photo = load_sample_images().images[i % 2]
        top, left = (rng.integers(side - size + 1) for side in photo.shape[:2])
        crops.append(photo[top : top + size, left : left + size])
    return crops


def eager(name: str) -> Callable[[list[np.ndarray[Any, Any]]], Features]:
    """Make the plain extractor: timm's model as built, NCHW memory, BatchNorm as layers."""
    preset = PRESETS[name]
    taps = Taps(build(name), preset.taps, torch.float32)

    def extract(images: list[np.ndarray[Any, Any]]) -> Features:
        x = preprocess(images, preset.preprocessing).contiguous()  # (n, 3, R, R)
        with torch.no_grad():
            return Features(taps(x))

    return extract


def difference(ours: Features, theirs: Features) -> float:
    pairs = zip(ours.tensors.values(), theirs.tensors.values(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def measure(name: str, batch: int, repetitions: int) -> dict[str, float]:
    images = photos(batch, PRESETS[name].preprocessing.size)
    rivals = {
        "eager": eager(name),
        "ours": load_backbone(name, device="cpu", dtype="float32").extract,
    }
    outputs = {key: extract(images) for key, extract in rivals.items()}  # also warms up
    seconds: dict[str, list[float]] = {key: [] for key in rivals}
    for _ in range(repetitions):
        for key, extract in rivals.items():
            start = time.perf_counter()
            extract(images)
            seconds[key].append(time.perf_counter() - start)
    ms = {key: 1000 * statistics.median(times) / batch for key, times in seconds.items()}
    return {
        "batch": batch,
        "eager_ms_per_image": ms["eager"],
        "ours_ms_per_image": ms["ours"],
        "ratio": ms["eager"] / ms["ours"],
        "max_abs_difference": difference(outputs["ours"], outputs["eager"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backbone", default=DEFAULT_BACKBONE, choices=list_backbones())
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 8, 16, 32, 64])
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    print(f"{args.backbone}, {args.threads} threads, median of {args.repetitions}")
    print("batch   eager ms/image   ours ms/image   ratio   max difference")
    rows = []
    for batch in args.batch:
        row = measure(args.backbone, batch, args.repetitions)
        rows.append(row)
        print(
            f"{batch:5d} {row['eager_ms_per_image']:16.1f} {row['ours_ms_per_image']:15.1f} "
            f"{row['ratio']:7.2f} {row['max_abs_difference']:16.1e}",
            flush=True,
        )
    if args.json:
        report = {"backbone": args.backbone, "threads": args.threads, "torch": torch.__version__}
        args.json.write_text(json.dumps(report | {"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
