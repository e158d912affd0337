"""Views in feature space (brightness FroFA) against augmented photos and against no views.

    python benchmarks/explored/feature_views.py --data DIR [--protocol "5-way 3-shot"] [--tasks 2]
        [--backbone vit --vit WEIGHTS]

Brightness FroFA (Bär et al., "Frozen Feature Augmentation for Few-Shot Image Classification", CVPR
2024): per image and channel, u = (f - min) / (max - min) over the patches, plus a number drawn from
U(-0.5, 0.5), clipped to [0, 1] and mapped back. A token counts as one more patch. Four views per
shot, as the default recipe has of photos. It ran on 18 November 2026, after version 0.2.0.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _tasks import load_tasks, seed_of, trial_options
from mivhead.benchmark.compare import summarise
from mivhead.features import Block, Features
from mivhead.methods import make_method
from which_backbone import load

VIEWS, STRENGTH = 4, 0.5


def brighten(block: Block, rng: np.random.Generator) -> Block:
    """Return a view of every image of a block."""
    parts = []
    if block.map is not None:
        parts.append(block.map.reshape(*block.map.shape[:2], -1).astype(np.float32))
    if block.token is not None:
        parts.append(block.token[:, :, None].astype(np.float32))
    x = np.concatenate(parts, axis=2)  # (image, channel, patch)
    low, high = x.min(axis=2, keepdims=True), x.max(axis=2, keepdims=True)
    width = np.maximum(high - low, 1e-12)
    shift = rng.uniform(-STRENGTH, STRENGTH, size=low.shape)
    x = (low + np.clip((x - low) / width + shift, 0, 1) * width).astype(np.float32)
    token: NDArray[np.floating] | None = None
    if block.token is not None:
        x, token = x[:, :, :-1], x[:, :, -1].astype(block.token.dtype)
    if block.map is None:
        return Block(token=token)
    return Block(map=x.reshape(block.map.shape).astype(block.map.dtype), token=token)


def feature_views(X: Features, rng: np.random.Generator) -> dict[str, object]:
    """Return views of all shots, as arguments of `fit`."""
    views = [Features([brighten(block, rng) for block in X.blocks]) for _ in range(VIEWS)]
    return {"views": Features.concat(views), "view_of": np.tile(np.arange(len(X)), VIEWS)}


def main() -> None:
    parser = trial_options(__doc__.splitlines()[0], tasks=2)
    parser.add_argument("--backbone", default="efficientnet_lite0", help="or resnet50, vit")
    parser.add_argument("--resnet50", type=Path, help="weights")
    parser.add_argument("--vit", type=Path, help="weights")
    args = parser.parse_args()
    (backbone,) = load(args.backbone, args)
    rows = []
    what = (args.data, args.sets, args.protocol, args.tasks)
    for task in load_tasks(backbone, *what, views=VIEWS):
        rng = np.random.default_rng(seed_of(task))
        row = []
        for views in ({}, task.views(VIEWS), feature_views(task.X, rng)):
            model = make_method("miv", preset=backbone.preset, random_state=0)
            model.fit(task.X, task.y, **views)
            row.append(100 * float((model.predict(task.queries) == task.query_labels).mean()))
        rows.append(row)
        print(task.set, task.number, *(f"{each:.1f}" for each in row), flush=True)
    none, photos, features = np.array(rows).T
    print(f"{len(rows)} tasks, no views {none.mean():.1f}, photos {photos.mean():.1f}")
    for name, other in (("no views", none), ("photos", photos)):
        ahead = summarise(features - other)
        print(f"feature views minus {name}: {ahead.mean:+.1f} ± {ahead.half_width:.1f}")


if __name__ == "__main__":
    main()
