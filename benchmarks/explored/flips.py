"""Whether averaging over mirrored and enlarged copies of shots and queries helps.

    python benchmarks/explored/flips.py --data DIR [--protocol "5-way 1-shot"] [--tasks 8]

The ridge experts with the weights of one-shot tasks, trained on the shots or also on their copies,
predict each query from the image alone or from the sum over its copies. A copy costs another pass
through the backbone. Figures: docs/research-log.md.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import torch
from PIL import Image, ImageOps

from _tasks import trial_options
from mivhead.backbones import DEFAULT_BACKBONE, load_backbone
from mivhead.backbones.base import Backbone
from mivhead.benchmark.samplers import LeftOut, Protocol, sample_tasks
from mivhead.datasets.sets import open_set
from mivhead.ensemble.ridge import Experts, prior_weights
from mivhead.features import Features

BATCH = 16
ZOOM = 0.8


def enlarge(image: Image.Image) -> Image.Image:
    """Cut the middle out of an image."""
    left, top = (round(side * (1 - ZOOM) / 2) for side in image.size)
    return image.crop((left, top, image.width - left, image.height - top))


COPIES = {"image": lambda image: image, "mirrored": ImageOps.mirror, "enlarged": enlarge}
TRIALS = {  # what the experts are trained on, and what they predict queries from
    "image; image": (["image"], ["image"]),
    "image; + mirrored": (["image"], ["image", "mirrored"]),
    "image; + enlarged": (["image"], ["image", "enlarged"]),
    "+ mirrored; image": (["image", "mirrored"], ["image"]),
    "+ mirrored; + mirrored": (["image", "mirrored"], ["image", "mirrored"]),
    "all; all": (list(COPIES), list(COPIES)),
}


def extract(backbone: Backbone, images: list[Image.Image]) -> Features:
    parts = [backbone.extract(images[i : i + BATCH]) for i in range(0, len(images), BATCH)]
    return Features.concat(parts)


def main() -> None:
    args = trial_options(__doc__.splitlines()[0], tasks=8).parse_args()
    torch.set_num_threads(1)
    backbone = load_backbone(DEFAULT_BACKBONE)
    right: dict[str, list[float]] = defaultdict(list)
    for name in args.sets:
        images = open_set(name, args.data)
        rows = {id_: row for row, id_ in enumerate(images.ids)}
        found = sample_tasks(images, name, Protocol.parse(args.protocol), 0, args.tasks)
        if isinstance(found, LeftOut):
            continue
        for task in found.tasks:
            chosen = images.take(rows[id_] for id_ in (*task.support, *task.queries))
            loaded = [chosen.load(i) for i in range(len(chosen))]
            features = {
                copy: extract(backbone, [change(image) for image in loaded])
                for copy, change in COPIES.items()
            }
            shots, y = len(task.support), torch.tensor(task.support_labels)
            for title, (trained, asked) in TRIALS.items():
                x = Features.concat([features[copy][:shots] for copy in trained])
                experts, _ = Experts.fit(x, y.repeat(len(trained)), int(y.max()) + 1)
                weights = prior_weights(list(experts.ridges), one_shot=True)
                members = sum(experts(features[copy][shots:]) for copy in asked)
                logits = (weights[:, None, None] * members).sum(dim=0)
                hits = logits.argmax(dim=1).numpy() == np.array(task.query_labels)
                right[title].append(100 * float(hits.mean()))
    base = np.array(right["image; image"])
    print("| trained on; predicted from | accuracy | difference |\n|---|---:|---:|")
    for title, scores in right.items():
        apart = np.array(scores) - base
        half = 1.96 * apart.std(ddof=1) / np.sqrt(len(apart))
        print(f"| {title} | {np.mean(scores):.1f} | {apart.mean():+.1f} ± {half:.1f} |")


if __name__ == "__main__":
    main()
