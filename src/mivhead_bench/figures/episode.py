"""One episode of a benchmark as a drawing: the paper's t-SNE figure by one call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from mivhead.backbones import load_backbone
from mivhead.backbones.base import Backbone
from mivhead.errors import InputError
from mivhead.fewshot import FewShotClassifier
from mivhead.images.imageset import ImageSet
from mivhead_bench.benchmark.samplers import LeftOut, Protocol, sample_tasks
from mivhead_bench.datasets.sets import open_set
from mivhead_bench.figures.plots import Case
from mivhead_bench.figures.tsne import Embeddings
from mivhead_bench.methods import get_method
from mivhead_bench.methods.tuning.network import load_pixels, network_of


def draw_episode(
    name: str,
    data: str | Path,
    path: str | Path | None = None,
    *,
    backbone: str | Backbone = "resnet50",
    weights: str | Path | None = None,
    compare: str | None = "tsa",
    protocol: str = "varying",
    task: int = 0,
    query: int = 0,
    seed: int = 0,
    device: str | None = None,
    params: dict[str, Any] | None = None,
) -> Figure:
    """Sample a task, fit the MIV-head and another method on it, and draw one query by t-SNE.

    `compare` is a method that tunes the backbone, with hyperparameters `params`, for the last
    panel: None shows nearest centroids. `task` and `query` are numbers, the seed is that of the
    task, of both methods and of t-SNE. Without a path nothing is written.
    """
    if compare is not None and get_method(compare).needs != "images":
        raise InputError(f"{compare!r} does not tune the backbone, as 'tsa' and 'ett' do.")
    images = open_set(name, data, paper_sizes=True)
    sampled = sample_tasks(images, name, Protocol.parse(protocol), seed, task + 1)
    if isinstance(sampled, LeftOut):
        raise InputError(sampled.reason)
    chosen = sampled.tasks[task]
    if query >= len(chosen.queries):
        raise InputError(
            f"Task {task} of {name} has the queries 0 to {len(chosen.queries) - 1}, not {query}."
        )
    rows = {id_: row for row, id_ in enumerate(images.ids)}
    shots = images.take(rows[id_] for id_ in chosen.support)
    image = images.take([rows[chosen.queries[query]]])
    if isinstance(backbone, str):
        backbone = load_backbone(backbone, weights=weights, device=device)
    model = FewShotClassifier(
        backbone, recipe="paper", random_state=seed, device=device, verbose=False
    )
    pictures = [shots.load(row) for row in range(len(shots))]
    model.fit(pictures, [chosen.classes[label] for label in chosen.support_labels])
    case = Case(model, image.load(0))
    other = None
    if compare is not None:
        numbers = [case.names.index(chosen.classes[label]) for label in chosen.support_labels]
        method = get_method(compare).make(random_state=seed, device=device, **params or {})
        other = _tuned_embeddings(compare, method, backbone, shots, numbers, image)
    truth = chosen.classes[chosen.query_labels[query]]
    return case.plot_tsne(path, truth=truth, seed=seed, other=other)


def _tuned_embeddings(
    name: str, method: Any, backbone: Backbone, shots: ImageSet, labels: list[int], image: ImageSet
) -> Embeddings:
    """Tune the backbone on the shots; return its vectors of shots and query, and class means."""
    size = backbone.preset.preprocessing.size
    pixels, query = (load_pixels(images, size)[0] for images in (shots, image))
    method.attach(network_of(backbone, name)).fit(pixels, labels)
    vectors = [method.network_.embed(batch).numpy(force=True) for batch in (pixels, query)]
    means = method.means_.numpy(force=True)
    return Embeddings(name, vectors[0], np.asarray(labels), means, vectors[1][0])
