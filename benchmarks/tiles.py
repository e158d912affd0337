"""Whether large photos gain from tiles: a 2 x 2 grid of crops, whose probabilities are averaged.

    python benchmarks/tiles.py --data DIR [--sets fgvc_aircraft] [--tasks 10]

Fits the default recipe to whole photos, and predicts whole queries, their four tiles, and both
together, on the same tasks. Figures: docs/howto/boxes.md.
"""

from __future__ import annotations

import numpy as np
import torch
from scipy.stats import t as student

from _tasks import trial_options
from mivhead import FewShotClassifier
from mivhead.benchmark.samplers import LeftOut, Protocol, sample_tasks
from mivhead.datasets.sets import open_set


def tiles(image):
    """Return four crops that overlap a little."""
    width, height = image.size
    across, down = round(0.6 * width), round(0.6 * height)
    corners = [(x, y) for x in (0, width - across) for y in (0, height - down)]
    return [image.crop((x, y, x + across, y + down)) for x, y in corners]


def main() -> None:
    parser = trial_options(__doc__.splitlines()[0], tasks=10)
    parser.set_defaults(sets=("fgvc_aircraft",), protocol="10-way 5-shot")
    args = parser.parse_args()
    torch.set_num_threads(1)
    scores: dict[str, list[float]] = {}
    for name in args.sets:
        images = open_set(name, args.data)
        rows = {id_: row for row, id_ in enumerate(images.ids)}
        found = sample_tasks(images, name, Protocol.parse(args.protocol), 0, args.tasks)
        assert not isinstance(found, LeftOut), found
        for task in found.tasks:
            shots = [images.load(rows[id_]) for id_ in task.support]
            queries = [images.load(rows[id_]) for id_ in task.queries]
            labels = [str(each) for each in task.support_labels]
            truth = np.array([str(each) for each in task.query_labels])
            crops = [tile for query in queries for tile in tiles(query)]
            model = FewShotClassifier(threshold=0, verbose=False).fit(shots, labels)
            whole = model.predict_proba(queries)
            parts = model.predict_proba(crops).reshape(len(queries), 4, -1)
            ways = {
                "the whole photo": whole,
                "the mean of four tiles": parts.mean(1),
                "the mean of both": (whole + parts.mean(1)) / 2,
                "the most certain of all five": np.concatenate([whole[:, None], parts], 1).max(1),
            }
            for way, probabilities in ways.items():
                right = model.classes_[probabilities.argmax(1)] == truth
                scores.setdefault(way, []).append(100 * right.mean())
            report(scores)


def report(scores: dict[str, list[float]]) -> None:
    """Print the means so far, and paired differences from the whole photo."""
    first = np.array(next(iter(scores.values())))
    print(f"\n{len(first)} tasks\n\n| | accuracy | difference |\n|---|---:|---:|")
    for what, values in scores.items():
        apart = np.array(values) - first
        spread = apart.std(ddof=1) / np.sqrt(len(apart)) if len(apart) > 1 else np.nan
        half = student.ppf(0.975, max(1, len(apart) - 1)) * spread
        cells = f"{np.mean(values):.1f} | {apart.mean():+.1f} ± {half:.1f}"
        print(f"| {what} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
