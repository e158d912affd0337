"""How close exported models are to the models they came from, how large and how fast.

    python benchmarks/export.py --data DIR [--resnet50 FILE.safetensors] [--json export.json]
    python benchmarks/export.py --data DIR --only vit      # or speed, lite0, resnet50

For each backbone and set: a model of up to 10 classes with 5 shots each, and up to 120 other
images. The exported variants predict the same images; the table shows the largest difference of a
probability, how many names are the same, and accuracy. Speed: `miv predict` on the model file
against the exported file, images decoded, without a feature cache, one thread; repetitions
alternate, and the ratio of the medians of processor time counts. Takes about 15 minutes on an idle
core.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import mivhead
from _backbones import build_resnet50, keras_resnet50
from mivhead import FewShotClassifier
from mivhead.backbones import from_module, load_backbone
from mivhead.export.model import export_model
from mivhead.images.sources import open_labelled

SETS = ("cub200_birds", "gtsrb_traffic_signs", "vgg_flower102", "eurosat", "isic_skin_lesions")
WAYS, SHOTS, QUERIES = 10, 5, 12
VARIANTS: dict[str, dict[str, Any]] = {
    "float32": {},
    "half": {"storage": "half"},
    "int8": {"storage": "int8"},
    "pixels": {"input": "pixels"},
}


def split(folder: Path) -> tuple[list[Any], list[str], list[Any], list[str]]:
    """Shots, their labels, queries and theirs: the first images of the first classes."""
    images = open_labelled(folder)
    labels = np.asarray(images.labels)
    shots: list[int] = []
    queries: list[int] = []
    for name in images.classes[:WAYS]:
        rows = np.flatnonzero(labels == name)
        shots += rows[:SHOTS].tolist()
        queries += rows[SHOTS : SHOTS + QUERIES].tolist()
    sources = [source.get() for source in images.sources]
    return (
        [sources[i] for i in shots],
        labels[shots].tolist(),
        [sources[i] for i in queries],
        labels[queries].tolist(),
    )


def agreement(
    name: str, backbone: Any, data: Path, variants: list[str], sets: list[str]
) -> list[dict[str, Any]]:
    """Compare the export with its model on every set, and other variants on three sets."""
    found = []
    for each in sets:
        shots, labels, queries, truth = split(data / each)
        views = None if backbone == "efficientnet_lite0" else 0  # none, to save time
        model = FewShotClassifier(backbone, threshold=views, verbose=False).fit(shots, labels)
        expected = model.predict_proba(queries)
        right = np.asarray(model.classes_)[expected.argmax(axis=1)] == truth
        for variant in variants if each in SETS[:3] else variants[:1]:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder, "model.onnx")
                export = export_model(model, file, **VARIANTS[variant])
                probabilities = mivhead.load(file).predict_proba(queries)
            best = probabilities.argmax(axis=1)
            names = np.asarray(model.classes_)[best]
            row = {
                "backbone": name,
                "set": each,
                "variant": variant,
                "images": len(queries),
                "bytes": export.bytes,
                "opset": export.opset,
                "difference": float(np.abs(probabilities - expected).max()),
                "same_names": int((best == expected.argmax(axis=1)).sum()),
                "accuracy": float(np.mean(right)),
                "exported_accuracy": float(np.mean(names == truth)),
            }
            print(json.dumps(row), flush=True)
            found.append(row)
    return found


def speed(data: Path, repetitions: int) -> dict[str, Any]:
    """Processor time per image of the default backbone's model and of its export."""
    shots, labels, queries, _ = split(data / SETS[0])
    model = FewShotClassifier(verbose=False, cache=False).fit(shots, labels)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "model.onnx")
        export_model(model, file)
        exported = mivhead.load(file)
        rivals = {"model": model, "exported": exported}
        seconds: dict[str, list[float]] = {name: [] for name in rivals}
        for _ in range(repetitions):
            for name, rival in rivals.items():
                start = time.process_time()
                rival.predict_proba(queries)
                seconds[name].append((time.process_time() - start) / len(queries))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    row = {**medians, "ratio": medians["model"] / medians["exported"], "images": len(queries)}
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, type=Path, help="folder of image sets")
    parser.add_argument("--resnet50", type=Path, help="weights, see benchmarks/_backbones.py")
    parser.add_argument("--only", choices=("speed", "lite0", "resnet50", "vit"))
    parser.add_argument("--sets", nargs="+", default=list(SETS))
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    document: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    if args.only in (None, "speed"):
        document["speed"] = speed(args.data, args.repetitions)
    if args.only in (None, "lite0"):
        rows += agreement(
            "efficientnet_lite0", "efficientnet_lite0", args.data, list(VARIANTS), args.sets
        )
    if args.resnet50 and args.only in (None, "resnet50"):
        network = from_module(
            build_resnet50(args.resnet50),
            ["layer3", "layer4"],
            name="resnet50",
            preprocessing=keras_resnet50(args.resnet50).preprocessing,
        )
        rows += agreement("resnet50", network, args.data, ["float32"], args.sets)
    if args.only in (None, "vit"):
        vit = load_backbone("timm:vit_tiny_patch16_224", weights="random", device="cpu")
        rows += agreement("vit_tiny, random weights", vit, args.data, ["float32"], args.sets)
    document["agreement"] = rows
    if args.json:
        args.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
