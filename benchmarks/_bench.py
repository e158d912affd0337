"""The image sets that accuracy is measured on, and files of `which_backbone.py`."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

TUNING = (  # choices are made on these sets
    "cub200_birds",
    "gtsrb_traffic_signs",
    "cifar10",
    "omniglot",
    "fgvc_aircraft",
    "dtd_textures10",
    "eurosat",
    "plantvillage_cropdisease",
)
CONFIRMATION = (  # and confirmed on these
    "quickdraw345",
    "vgg_flower102",
    "mnist",
    "isic_skin_lesions",
    "chestx_nih",
    "food101_small",
    "mushrooms7",
    "mscoco_crops",
)
SETS = {"tuning": TUNING, "confirmation": CONFIRMATION, "all": TUNING + CONFIRMATION}


def names(text: str) -> tuple[str, ...]:
    """Parse a comma-separated list."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


CORRECTED = "+correction"  # by the number of shots, as well as any power of it could


def read_jsonl(paths: list[Path]) -> Iterator[tuple[Any, ...]]:
    """Yield backbone, protocol, set, task, method, accuracy and seconds of which_backbone.py.

    With unequal shots, a method that does not count every class the same is also there with the
    power of the correction that is best on these very tasks, of the tuning or confirmation sets.
    """
    corrected: dict[Any, dict[Any, list[float]]] = defaultdict(dict)
    seconds: dict[Any, float] = {}
    for line in (line for path in paths for line in path.read_text().splitlines()):
        row = json.loads(line)
        task = (row["backbone"], row["protocol"], row["set"], row["task"])
        for method, (accuracy, spent) in row["methods"].items():
            if (*task, method) not in seconds:
                yield (*task, method, accuracy, spent)
            seconds[(*task, method)] = spent
        group = next(name for name, members in SETS.items() if row["set"] in members)
        for method, accuracies in row.get("corrected", {}).items():
            corrected[row["backbone"], row["protocol"], group, method][task] = accuracies
    for (*_, method), by_task in corrected.items():
        best = int(np.mean([*by_task.values()], axis=0).argmax())
        for task, accuracies in by_task.items():
            yield (*task, method + CORRECTED, accuracies[best], seconds[(*task, method)])
