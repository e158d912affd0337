"""How fast backbones run as ONNX files on a CPU, against PyTorch.

    python benchmarks/onnx_speed.py [--backbones efficientnet_lite0 resnet18 ...] [--json onnx.json]

Each backbone is exported (with random weights if it has none here: speed does not depend on them)
and both get the same decoded images in batches of 32, preprocessing included, on one thread.
Repetitions alternate between three rivals, so that a busy machine slows all: `eager` is the network
in plain PyTorch as it is built, `ours` is mivhead's PyTorch path, `onnx` is the exported file in
onnxruntime. The ratios of the medians are what counts. Takes about three minutes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mivhead.backbones import load_backbone
from mivhead.backbones.base import Backbone, module_of
from mivhead.backbones.efficientnet_lite import WEIGHTS
from mivhead.backbones.efficientnet_lite_network import build
from mivhead.backbones.preprocessing import preprocess
from mivhead.backbones.taps import Taps
from mivhead.backbones.timm_models import build as build_timm
from mivhead.export.backbone import export_onnx

Extract = Callable[[list[np.ndarray[Any, Any]]], object]
DEFAULT = ("efficientnet_lite0", "resnet18", "resnet50", "regnety_016", "deit_small")


def eager(name: str, backbone: Backbone) -> Extract:
    """Make the plain extractor: the whole batch through the network, memory as PyTorch has it."""
    model = build(name) if name in WEIGHTS else build_timm(name, "random")
    taps = Taps(model.eval(), backbone.preset.taps)

    def extract(images: list[np.ndarray[Any, Any]]) -> object:
        with torch.no_grad():
            return taps(preprocess(images, backbone.preset.preprocessing).contiguous())

    return extract


def measure(name: str, batch: int, repetitions: int, folder: Path) -> dict[str, Any]:
    weights = None if name in WEIGHTS else "random"
    file = folder / f"{name}.onnx"
    difference = export_onnx(name, file, weights=weights)
    ours = module_of(load_backbone(name, weights=weights, device="cpu"))
    assert ours is not None
    rivals: dict[str, Extract] = {
        "eager": eager(name, ours),
        "ours": ours.extract,
        "onnx": load_backbone(file, device="cpu").extract,
    }
    size = ours.preset.preprocessing.size
    images = list(np.random.default_rng(0).integers(0, 256, (batch, size, size, 3), np.uint8))
    seconds: dict[str, list[float]] = {key: [] for key in rivals}
    for extract in rivals.values():
        extract(images)  # warm up
    for _ in range(repetitions):
        for key, extract in rivals.items():
            start = time.perf_counter()
            extract(images)
            seconds[key].append(time.perf_counter() - start)
    ms = {key: 1000 * statistics.median(times) / batch for key, times in seconds.items()}
    return {
        "backbone": name,
        **{f"{key}_ms_per_image": value for key, value in ms.items()},
        "onnx_vs_eager": ms["eager"] / ms["onnx"],
        "onnx_vs_ours": ms["ours"] / ms["onnx"],
        "relative_difference": difference,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backbones", nargs="+", default=DEFAULT)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{args.threads} threads, batch {args.batch}, median of {args.repetitions}; ms per image")
    print("backbone               eager    ours    onnx   eager/onnx   ours/onnx   difference")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.backbones:
            row = measure(name, args.batch, args.repetitions, Path(folder))
            rows.append(row)
            print(
                f"{name:20s} {row['eager_ms_per_image']:7.1f} {row['ours_ms_per_image']:7.1f} "
                f"{row['onnx_ms_per_image']:7.1f} {row['onnx_vs_eager']:11.2f}x "
                f"{row['onnx_vs_ours']:10.2f}x {row['relative_difference']:12.0e}",
                flush=True,
            )
    if args.json:
        report = {"threads": args.threads, "batch": args.batch, "torch": torch.__version__}
        args.json.write_text(json.dumps(report | {"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
