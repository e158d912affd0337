"""Which backbone: accuracy and speed on the same tasks.

    python benchmarks/which_backbone.py --data DIR -o FILE.jsonl [--protocol "10-way 5-shot"]
        [--backbones efficientnet_lite0,efficientnet_lite2,resnet50,vit,TIMM_NAME=WEIGHTS]
        [--resnet50 WEIGHTS] [--vit WEIGHTS] [--methods miv,miv-paper,ridge,logistic] [--tasks 10]
    python benchmarks/which_backbone.py --speed [--backbones ...]

Fits each method to the features of each backbone. `resnet50` and `vit` (a ViT-S/14 at 224 pixels)
have the weights of a file. The number of views of each shot is at most that of the default recipe:
four with one shot, none with five. Resumes when it is started again, so backbones can be run one
after another into one file. `--protocol "unequal shots"` draws 1 to 12 shots for each of 5 to 10
classes; accuracy is then the mean over classes, and the logits of methods that do not count every
class the same are also corrected by powers of the number of shots. Figures: docs/research-log.md.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from _bench import SETS, names
from _tasks import UNEQUAL, LoadedTask, load_tasks
from mivhead import Preprocessing
from mivhead.backbones import from_module, load_backbone
from mivhead.backbones.base import Backbone
from mivhead.backbones.preset import Preset
from mivhead.backbones.presets import PAPER
from mivhead.backbones.timm_models import read_tensors
from mivhead_bench.benchmark.samplers import Protocol
from mivhead_bench.methods import make_method

IMAGES = 48  # to measure the speed of a backbone
VIT = "timm:vit_small_patch14_dinov2"
OURS = ("miv", "miv-paper", "experts")
BALANCED = ("miv", "experts")  # count every class the same, regardless of its number of shots
POWERS = (0.0, 0.5, 1.0, 1.5, 2.0)  # tau of the correction, log p - tau log n
VIEWS = 4  # of each shot at most, if there are fewer than five


def load(name: str, args: argparse.Namespace) -> Backbone:
    """Load a backbone; `resnet50` and `vit` have the weights of a file."""
    if name == "resnet50":
        return keras_resnet50(args.resnet50)
    if name == "vit":
        return load_backbone(VIT, weights=args.vit, image_size=224)
    spec, _, weights = name.partition("=")
    return load_backbone(f"timm:{spec}", weights=weights) if weights else load_backbone(name)


def keras_resnet50(weights: Path) -> Backbone:
    """Load the "v1" ResNet-50 of Keras in torchvision's names, which timm does not build."""
    from torchvision.models import resnet50

    model: nn.Module = resnet50(weights=None)
    for stage in ("layer2", "layer3", "layer4"):
        first = model.get_submodule(f"{stage}.0")
        first.conv1.stride, first.conv2.stride = (2, 2), (1, 1)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eps = 1e-3
    tensors = {key: tensor.float() for key, tensor in read_tensors(weights).items()}
    model.load_state_dict(tensors, strict=True)
    mean, preset = (123.68 / 255, 116.779 / 255, 103.939 / 255), PAPER["resnet50"].preset
    preprocessing = Preprocessing(224, mean=mean, std=(1 / 255, 1 / 255, 1 / 255))
    return from_module(
        model.eval(),
        preset.taps,
        name="resnet50",
        preprocessing=preprocessing,
        blocks=preset.blocks,
    )


def measure(task: LoadedTask, preset: Preset, methods: tuple[str, ...], *, unequal: bool) -> Any:
    """Accuracy and seconds of processor time for a fit, by method; then accuracies by power."""
    found: dict[str, Any] = {}
    corrected: dict[str, list[float]] = {}
    for method in methods:
        ours = method in OURS
        model = make_method(method, preset=preset if ours else None, random_state=0)
        start = time.process_time()
        model.fit(task.X, task.y, **(task.views(VIEWS) if ours else {}))
        spent = time.process_time() - start
        logits = np.log(np.maximum(model.predict_proba(task.queries), 1e-300))
        wanted = np.searchsorted(model.classes_, task.query_labels)
        powers = POWERS if unequal and method not in BALANCED else (0.0,)
        chosen = [(logits - power * np.log(np.bincount(task.y))).argmax(axis=1) for power in powers]
        right = [class_mean(labels == wanted, wanted) for labels in chosen]
        found[method] = [right[0], round(spent, 3)]
        if len(right) > 1:
            corrected[method] = right
    return found, corrected


def class_mean(right: Any, wanted: Any) -> float:
    """Return the share of right answers, as a mean over classes."""
    return float(np.mean([right[wanted == label].mean() for label in np.unique(wanted)]))


def run(args: argparse.Namespace) -> None:
    done = {key(row): row for row in read(args.output)} if args.output.exists() else {}
    unequal = args.protocol == UNEQUAL
    shots = None if unequal else Protocol.parse(args.protocol).shots
    views = VIEWS if shots is not None and shots < 5 else 0
    for given in args.backbones:
        backbone = load(given, args)
        name = given.partition("=")[0]
        for set_ in args.sets:
            wanted = [(args.protocol, name, set_, number) for number in range(args.tasks)]
            if all(set(args.methods) <= set(done.get(w, {}).get("methods", {})) for w in wanted):
                continue
            what = (args.data, [set_], args.protocol, args.tasks)
            for task in load_tasks(backbone, *what, views=views, seed=args.seed):
                row = done.get((args.protocol, name, set_, task.number)) or {
                    "protocol": args.protocol,
                    "backbone": name,
                    "set": set_,
                    "task": task.number,
                    "methods": {},
                }
                left = tuple(m for m in args.methods if m not in row["methods"])
                if not left:
                    continue
                found, corrected = measure(task, backbone.preset, left, unequal=unequal)
                row["methods"] |= found
                if corrected:
                    row["corrected"] = row.get("corrected", {}) | corrected
                with args.output.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            print(name, args.protocol, set_, flush=True)


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["protocol"], row["backbone"], row["set"], row["task"]


def read(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a file; a later row of the same task replaces an earlier one."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return list({key(row): row for row in rows}.values())


def images_per_second(backbone: Backbone) -> float:
    """Measure a backbone on photos of noise, which are as large as many."""
    rng = np.random.default_rng(0)
    images = list(rng.integers(0, 256, (IMAGES, 300, 400, 3), np.uint8))
    backbone.extract(images[:4])
    start = time.process_time()
    for first in range(0, IMAGES, 16):
        backbone.extract(images[first : first + 16])
    return IMAGES / (time.process_time() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default=os.environ.get("MIV_DATA"))
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--sets", type=lambda text: SETS.get(text) or names(text), default="all")
    parser.add_argument("--protocol", default="10-way 5-shot")
    parser.add_argument("--tasks", type=int, default=10, help="per set")
    parser.add_argument("--backbones", type=names, default="efficientnet_lite0,efficientnet_lite2")
    parser.add_argument("--methods", type=names, default="miv,miv-paper,ridge,logistic")
    parser.add_argument("--resnet50", metavar="WEIGHTS", type=Path)
    parser.add_argument("--vit", metavar="WEIGHTS", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--speed", action="store_true", help="images per second instead")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.speed:
        for name in args.backbones:
            for backbone in [load(name, args)]:
                print(f"{name}: {images_per_second(backbone):.1f} images/s with one thread")
    elif args.output is None:
        parser.error("-o is required, except with --speed")
    else:
        run(args)


if __name__ == "__main__":
    main()
