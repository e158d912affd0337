"""One episode of a benchmark as a drawing: the paper's t-SNE figure by one call."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mivhead.backbones import load_backbone
from mivhead.backbones.base import Backbone
from mivhead.benchmark.samplers import LeftOut, Protocol, sample_tasks
from mivhead.datasets.sets import open_set
from mivhead.errors import InputError
from mivhead.images.imageset import ImageSet
from mivhead.methods.registry import get_method

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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

    Names are as in `mivhead.backbones.load_backbone` and on the command line; `compare` is a method
    that tunes the backbone, with hyperparameters `params`, for the last panel: None shows nearest
    centroids. `task` and `query` are numbers, the seed is that of the task, of both methods and of
    t-SNE. Without a path nothing is written.
    """
    from mivhead.diagnostics.plots import Case
    from mivhead.model.fewshot import FewShotClassifier

    if compare is not None and get_method(compare).needs != "images":
        raise InputError(
            f"{compare!r} does not tune the backbone; only such methods have vectors of their own, "
            "such as 'tsa' and 'ett'."
        )
    images = open_set(name, data, paper_sizes=True)
    found = sample_tasks(images, name, Protocol.parse(protocol), seed, task + 1)
    if isinstance(found, LeftOut):
        raise InputError(found.reason)
    chosen = found.tasks[task]
    if query >= len(chosen.queries):
        raise InputError(
            f"Task {task} of {name} has the queries 0 to {len(chosen.queries) - 1}, not {query}."
        )
    rows = {id_: row for row, id_ in enumerate(images.ids)}
    labels = tuple(chosen.classes[label] for label in chosen.support_labels)
    shots = replace(images.take(rows[id_] for id_ in chosen.support), labels=labels)
    image = images.take([rows[chosen.queries[query]]])
    network = backbone
    if isinstance(backbone, str):
        network = load_backbone(backbone, weights=weights, device=device)

    def fit(method: str, **settings: Any) -> FewShotClassifier:
        model = FewShotClassifier(
            network, method=method, random_state=seed, device=device, verbose=False, **settings
        )
        return model.fit(_load(shots), list(labels))

    other = None if compare is None else fit(compare, method_params=params)
    case = Case(fit("miv", recipe="paper"), image.load(0))
    truth = chosen.classes[chosen.query_labels[query]]
    return case.plot_tsne(path, truth=truth, seed=seed, compare=other, shots=shots)


def _load(images: ImageSet) -> list[Any]:
    return [images.load(row) for row in range(len(images))]
