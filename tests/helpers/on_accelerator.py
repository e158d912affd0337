"""What must give the same on the simulated accelerator as on the CPU, in a process of its own.

`python -m tests.helpers.on_accelerator [NAME...]` prints a JSON line per check: its name, the error
if there was one, and the largest difference between the two devices.
"""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from tests.helpers.accelerator import DEVICE  # first: it changes PyTorch

from mivhead import Preprocessing  # isort: skip
from mivhead.backbones import from_module
from mivhead.backbones.module import ModuleBackbone
from mivhead.benchmark import runner
from mivhead.benchmark.config import RunConfig, list_tables, load_config
from mivhead.benchmark.live import LiveView
from mivhead.benchmark.results import Result, read_origin
from mivhead.benchmark.runner import Place, run
from mivhead.diagnostics.attention import explain
from mivhead.diagnostics.tsne import centroid_embeddings, miv_embeddings
from mivhead.features import Features
from mivhead.methods.registry import get_method, make_method
from mivhead.methods.tuning.base import free_memory, predicted_at_once
from mivhead.model.fewshot import FewShotClassifier
from mivhead.model.load import load
from mivhead.model.readers import network_of
from tests.helpers.bench_data import config, write_sets
from tests.helpers.few_shots import RIVALS
from tests.helpers.small_networks import SIZE, digits, resnet, vit

HERE = str(DEVICE)
ON_FEATURES = ("miv", "miv-paper", *RIVALS)
TUNING = {"tsa": resnet, "finetune": resnet, "finetune-vote": resnet, "ett": vit, "ln-tune": vit}


def make_backbone(model: torch.nn.Module, device: str) -> ModuleBackbone:
    """A backbone of two blocks (of one, if it is a ViT)."""
    taps = ["norm"] if hasattr(model, "blocks") else ["layer3", "layer4"]
    return from_module(
        model,
        taps,
        name="small",
        preprocessing=Preprocessing(size=SIZE),
        threshold=2,
        device=device,
        dtype="float32",
    )


def features() -> tuple[Features, Features]:
    """Shots of three classes of five, and queries, with maps and tokens."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(3, 32, 4, 4))
    shots = centres.repeat(5, axis=0) + 0.5 * rng.normal(size=(15, 32, 4, 4))
    queries = centres.repeat(4, axis=0) + 0.8 * rng.normal(size=(12, 32, 4, 4))
    return tuple(Features(x.astype(np.float32)) for x in (shots, queries))  # type: ignore[return-value]


def on_features(name: str) -> float:
    """Fit a method on features and predict, on both devices."""
    shots, queries = features()
    labels = np.repeat([0, 1, 2], 5)
    steps = {"steps": 5} if "steps" in get_method(name).hyperparameters() else {}
    found = [
        make_method(name, random_state=0, device=device, **steps).fit(shots, labels)
        for device in ("cpu", HERE)
    ]
    expected, there = (each.predict_proba(queries) for each in found)
    return float(np.abs(expected - there).max())


def tuning(name: str) -> float:
    """Tune a small network and predict."""
    X, y = digits(3)
    queries, _ = digits(2, skip=20)
    answers = []
    for device in ("cpu", HERE):
        tuner = make_method(name, random_state=0, steps=3, device=device, verbose=False)
        tuner.attach(network_of(make_backbone(TUNING[name](), device), name)).fit(X, y)
        assert str(tuner.network_.device) == device
        answers.append(tuner.predict_proba(queries))
    return float(np.abs(answers[0] - answers[1]).max())


def extraction() -> float:
    """Extract features of images; they arrive on the CPU, where caches and files are."""
    images, _ = digits(2)
    expected, there = (
        make_backbone(resnet(), device).extract(list(images)) for device in ("cpu", HERE)
    )
    pairs = zip(expected.tensors.values(), there.tensors.values(), strict=True)
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)


def saving_and_loading() -> float:
    """A model that was trained there gives the same here and there."""
    images, labels = digits(3)
    queries, _ = digits(2, skip=20)
    trained = FewShotClassifier(
        make_backbone(resnet(), HERE), recipe="paper", device=HERE, cache=False, verbose=False
    ).fit(list(images), labels.astype(str))
    with tempfile.TemporaryDirectory() as folder:
        trained.save(Path(folder, "model.miv"))
        answers = [trained.predict_proba(list(queries))]
        for device in ("cpu", HERE):
            again = load(
                Path(folder, "model.miv"), backbone=make_backbone(resnet(), device), device=device
            )
            answers.append(again.predict_proba(list(queries)))
    return float(max(np.abs(answers[0] - other).max() for other in answers[1:]))


def explanations_and_plots() -> float:
    """Attention, and the vectors that t-SNE shows, also without another model to compare with."""
    shots, queries = features()
    labels = np.repeat([0, 1, 2], 5)
    vectors = []
    for device in ("cpu", HERE):
        head = make_method("miv-paper", random_state=0, device=device, steps=3).fit(shots, labels)
        explain(head, queries[:1])
        panels = [*miv_embeddings(head, queries[:1]), centroid_embeddings(head, queries[:1])]
        vectors.append(np.concatenate([panel.prototypes.ravel() for panel in panels]))
    return float(np.abs(vectors[0] - vectors[1]).max())


def benchmark() -> float:
    """A run on one device: the same accuracies, and the device is recorded."""
    methods: list[Any] = [{"name": "miv", "recipe": "paper", "params": {"steps": 2}}, "ncc"]
    methods.append({"name": "tsa", "params": {"steps": 1}})
    results: list[list[Result]] = []
    with tempfile.TemporaryDirectory() as folder:
        data = write_sets(Path(folder, "data"), ("dots",))
        for number, device in enumerate(("cpu", HERE)):
            place = Place(Path(folder, f"run{number}"), data, device=device, features="task")
            own = {"tiny": make_backbone(resnet(), device)}
            wanted = config(sets=["dots"], tasks=1, methods=methods)
            results.append(run(wanted, place, backbones=own))
            assert read_origin(place.folder)["device"] == device
    for a, b in zip(*results, strict=True):
        assert a.error is None, a.error
        assert b.error is None, b.error
    return max(abs(a.accuracy - b.accuracy) for a, b in zip(*results, strict=True))


def memory_of_the_device() -> float:
    """A head that would not fit is announced before the run reaches it, with what it needs."""
    notes: list[str] = []

    class View(LiveView):
        def note(self, text: str) -> None:
            notes.append(text)

    with tempfile.TemporaryDirectory() as folder, mock.patch.object(runner, "free_memory") as free:
        data = write_sets(Path(folder, "data"), ("dots",))
        for number, (available, methods) in enumerate(
            ((4e9, ["ncc"]), (5e9, ["ncc"]), (1e9, [{"name": "tsa", "params": {"steps": 1}}]))
        ):
            free.return_value = int(available)
            place = Place(Path(folder, f"run{number}"), data, device=HERE, features="task")
            own = {"tiny": make_backbone(resnet(), HERE)}
            wanted = config(sets=["dots"], tasks=1, methods=methods)
            run(wanted, place, backbones=own, view=View(quiet=True))
    (note,) = [note for note in notes if "it may fail" in note]
    assert "needs about 4.3 GB on accel:0, and 4.0 GB are free there" in note, note
    return 0.0


def batch_sizes() -> float:
    """On a device, prediction takes as many images as training, not the few of a CPU's cache."""
    network = network_of(make_backbone(resnet(), HERE), "test")
    assert free_memory(network.device) is None  # the simulated device does not say
    assert predicted_at_once(network) >= 32
    return 0.0


def table(name: str) -> float:
    """Run a table of the paper on one small task with small stand-ins for its backbones."""
    found = load_config(name)
    with tempfile.TemporaryDirectory() as folder:
        data = write_sets(Path(folder, "data"), ("dots",))
        small = _shrink(found)
        own = {b.name: _stand_in(b.source) for b in small.backbones}
        place = Place(Path(folder, "run"), data, device=HERE, features="task")
        results = run(small, place, backbones=own)
    failed = [f"{r.method}@{r.backbone}: {r.error}" for r in results if r.error]
    assert not failed, failed
    assert len(results) == sum(len(small.methods_on(b.name)) for b in small.backbones)
    return 0.0


def _shrink(found: RunConfig) -> RunConfig:
    """Reduce a table to one task and one step per method."""
    methods = []
    for method in found.methods:
        steps = "steps" in get_method(method.kind).hyperparameters()
        params = {k: v for k, v in method.params.items() if k != "pool_sizes"}
        methods.append(replace(method, params=params | ({"steps": 1} if steps else {})))
    return replace(
        found,
        methods=tuple(methods),
        sets=("dots",),
        protocols=("2-way 1-shot",),
        tasks=1,
        views=1,
    )


def _stand_in(source: str) -> ModuleBackbone:
    """A small network of the same kind, with as many blocks."""
    is_vit = any(word in source for word in ("vit", "deit", "swin", "clip"))
    taps = [f"blocks.{i}" for i in range(3)] if is_vit else ["layer3", "layer4"]
    taps = ["layer2", *taps] if source == "resnet50_3blocks" else taps
    model = vit() if is_vit else resnet()
    size = Preprocessing(size=SIZE if is_vit else 64)
    return from_module(model, taps, name=source, preprocessing=size, threshold=2, device=HERE)


CHECKS: dict[str, Callable[[], float]] = {
    **{f"on features: {name}": lambda name=name: on_features(name) for name in ON_FEATURES},
    **{f"tuning: {name}": lambda name=name: tuning(name) for name in TUNING},
    "extraction": extraction,
    "saving and loading": saving_and_loading,
    "explanations and plots": explanations_and_plots,
    "benchmark": benchmark,
    "memory of the device": memory_of_the_device,
    "batch sizes": batch_sizes,
}
TABLES: dict[str, Callable[[], float]] = {
    f"table: {name}": lambda name=name: table(name)
    for name in list_tables()
    if load_config(name).benchmark is not None
}


def main(names: list[str]) -> None:
    """Run the checks and print their outcomes."""
    warnings.simplefilter("ignore")
    chosen = CHECKS | TABLES
    for name in names or CHECKS:
        error, difference = None, None
        try:
            difference = chosen[name]()
        except Exception:
            error = traceback.format_exc()
        print(json.dumps({"name": name, "error": error, "difference": difference}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
