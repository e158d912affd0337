"""The runner in one process: what is computed, in which order, and what happens when it fails."""

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from PIL import Image

from mivhead.backbones import from_module
from mivhead.backbones.preset import Preprocessing
from mivhead.errors import InputError, NotAvailableError
from mivhead.extraction.cache import FeatureCache, content_hash
from mivhead.extraction.pipeline import BATCH
from mivhead.fewshot import FewShotClassifier
from mivhead.images.augmentation import augment, view_seed
from mivhead.jobs.executors import Died, LocalExecutor
from mivhead_bench.benchmark import inputs, runner
from mivhead_bench.benchmark.executors import InlineExecutor
from mivhead_bench.benchmark.live import LiveView
from mivhead_bench.benchmark.results import RESULTS, read_origin, read_results
from mivhead_bench.benchmark.runner import Workspace, run
from mivhead_bench.benchmark.tasks import TaskSet
from mivhead_bench.methods.centroids import NearestCentroid
from mivhead_bench.methods.neighbours import NearestNeighbours
from mivhead_bench.methods.registry import make_method
from tests.helpers.bench_data import MIV, config, numbers, write_sets
from tests.helpers.tiny_backbone import TinyBackbone


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Two sets of six classes of eight images; do not change them."""
    return write_sets(tmp_path_factory.mktemp("data"))


@pytest.fixture
def workspace(data, tmp_path):
    return Workspace(tmp_path / "run", data)


def bench(workspace, backbone=None, executor=None, view=None, **changes):
    own = {"tiny": backbone or TinyBackbone()}
    return run(config(**changes), workspace, executor, backbones=own, view=view)


def test_a_result_is_what_the_method_gives_by_hand(workspace, data):
    results = bench(workspace, sets=["dots"], tasks=1)
    (tasks,) = (TaskSet.load(path) for path in workspace.folder.glob("tasks/*/dots.json"))
    task, backbone = tasks.tasks[0], TinyBackbone()

    def load(id_):
        return Image.open(data / "dots" / id_).convert("RGB")

    def content(id_):
        return content_hash((data / "dots" / id_).read_bytes())

    size = backbone.preset.preprocessing.size
    support = backbone.extract([load(id_) for id_ in task.support])
    queries = backbone.extract([load(id_) for id_ in task.queries])
    # T = 3 and two shots: two views each
    views = backbone.extract(
        [
            augment(load(id_), size, view_seed(0, content(id_), number))
            for id_ in task.support
            for number in range(2)
        ]
    )
    seed = int(np.random.SeedSequence((0, 0)).generate_state(1)[0]) >> 1
    for name in ("miv", "ncc"):
        found = next(r for r in results if r.method == name)
        steps = {"steps": 2} if name == "miv" else {}
        method = make_method(name, preset=backbone.preset, random_state=seed, **steps)
        given = {"views": views, "view_of": np.repeat(range(10), 2)} if name == "miv" else {}
        method.fit(support, task.support_labels, **given)
        proba = method.predict_proba(queries)
        right = proba.argmax(axis=1) == np.array(task.query_labels)
        assert found.accuracy == pytest.approx(right.mean())
        assert sum(row[0] for row in found.calibration) == len(task.queries)
        assert sum(row[1] for row in found.calibration) == pytest.approx(proba.max(axis=1).sum())
        assert sum(row[2] for row in found.calibration) == right.sum()
        assert (found.ways, found.shots, found.queries) == (5, 10, len(task.queries))
        assert found.views == (20 if name == "miv" else 0)
        assert found.tasks == tasks.hash
        assert (found.gflops_paper > 0) == (name == "miv")  # the backbone is a black box
        assert found.adapt_seconds > 0
        assert found.backbone_seconds > 0


def test_the_papers_tables_read_mnist_at_84_pixels(tmp_path, capsys):
    def votes(data, **changes):
        workspace = Workspace(tmp_path / f"run of {data} {changes}", tmp_path / data)
        wanted = {"sets": ["mnist"], "methods": ["ncc"], "tasks": 2} | changes
        return [r.calibration for r in bench(workspace, view=LiveView(), **wanted)]

    write_sets(tmp_path / "original", ["mnist"])
    for path in (tmp_path / "original").rglob("*.png"):
        resized = tmp_path / "resized" / path.relative_to(tmp_path / "original")
        resized.parent.mkdir(parents=True, exist_ok=True)
        Image.open(path).resize((84, 84), Image.Resampling.LANCZOS).save(resized)
    expected = votes("resized")
    assert "resized" not in capsys.readouterr().err.replace("run of resized", "")
    assert votes("original", paper_sizes=True) == expected
    assert "mnist: images are resized to 84 x 84 pixels first" in capsys.readouterr().err
    assert votes("resized", paper_sizes=True) == expected
    assert votes("original") != expected


def test_each_picture_passes_the_backbone_once(workspace):
    backbone = TinyBackbone()
    bench(workspace, backbone, protocols=["5-way 2-shot", "varying"])
    seen = backbone.seen
    entries = FeatureCache(workspace.folder / "features").info().entries
    extra = seen - entries  # plain images: for the layout, for warming up, for counting flops
    assert 0 < extra <= 8
    shutil.rmtree(workspace.folder / "tasks")
    (workspace.folder / RESULTS).unlink()
    bench(workspace, backbone, protocols=["5-way 2-shot", "varying"], methods=[MIV, "ncc", "knn"])
    assert backbone.seen - seen <= 4  # counting flops and memory, once a set


def test_flipped_bits_in_the_features_change_no_accuracy(workspace):
    first = bench(workspace)
    rng = np.random.default_rng(0)
    entries = [path for path in (workspace.folder / "features").glob("??/*") if path.is_file()]
    for path in entries:
        content = bytearray(path.read_bytes())
        content[rng.integers(len(content))] ^= 1 << rng.integers(8)
        path.write_bytes(content)
    shutil.rmtree(workspace.folder / "tasks")
    (workspace.folder / RESULTS).unlink()
    # Damaged features count as missing. This backbone cannot be loaded by name, so that they are
    # extracted by the next command.
    damaged = bench(workspace)
    assert all("disappeared from the cache" in (each.error or "") for each in damaged)
    assert [each.accuracy for each in bench(workspace)] == [each.accuracy for each in first]


def test_a_finished_run_computes_nothing_and_more_methods_only_themselves(workspace, monkeypatch):
    first = bench(workspace)
    written = (workspace.folder / RESULTS).read_bytes()
    monkeypatch.setattr(NearestCentroid, "_learn", None)  # would fail
    assert numbers(bench(workspace)) == numbers(first)
    assert (workspace.folder / RESULTS).read_bytes() == written
    more = bench(workspace, methods=["ncc", "knn"])
    assert {r.method for r in more} == {"ncc", "knn"}
    assert all(r.error is None for r in more)
    assert {r.method for r in read_results(workspace.folder)} == {"miv", "ncc", "knn"}


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError("64 GB"), "memory: 64 GB"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "memory: "),
        (FloatingPointError("overflow"), "numerical: overflow"),
        (KeyError("x"), "KeyError: 'x'"),
    ],
)
def test_a_failure_is_recorded_shown_and_tried_again(workspace, monkeypatch, capsys, error, words):
    learn = NearestCentroid._learn

    def fail_once(self, x, labels):
        monkeypatch.setattr(NearestCentroid, "_learn", learn)
        raise error

    monkeypatch.setattr(
        "mivhead_bench.benchmark.measuring._warm", {("tiny", "ncc"), ("tiny", "miv")}
    )
    monkeypatch.setattr(NearestCentroid, "_learn", fail_once)
    results = bench(workspace, view=LiveView())
    (failed,) = (r for r in results if r.error)
    assert failed.error.startswith(words)
    assert (failed.accuracy, failed.method, failed.calibration) == (None, "ncc", ())
    assert f"ncc failed: {words}" in capsys.readouterr().err
    assert len(results) == 12  # the others went on
    again = bench(workspace)
    assert all(r.error is None for r in again)
    assert len(again) == 12


def test_probabilities_that_are_no_numbers_are_no_result(workspace, monkeypatch):
    def nan(self, features):
        return np.full((len(features), len(self.classes_)), np.nan)

    monkeypatch.setattr(NearestNeighbours, "predict_proba", nan)
    results = bench(workspace, methods=["ncc", "knn"], sets=["dots"])
    assert {r.error for r in results if r.method == "knn"} == {
        "numerical: the probabilities are not finite"
    }
    assert {r.error for r in results if r.method == "ncc"} == {None}


class DyingExecutor(InlineExecutor):
    """Workers die on some calls."""

    def __init__(self, deadly):
        self.deadly = deadly

    def run(self, calls, most=None):
        for call in calls:
            yield call, (Died("it was killed") if self.deadly(call) else call())


def test_the_method_that_kills_workers_is_found(workspace):
    def deadly(call):
        return any(m.name == "knn" for m in call.methods)

    methods = ["ncc", "knn"]
    results = bench(workspace, executor=DyingExecutor(deadly), methods=methods, sets=["dots"])
    assert {r.error for r in results if r.method == "knn"} == {"memory: it was killed"}
    assert {r.error for r in results if r.method == "ncc"} == {None}
    healed = bench(workspace, methods=methods, sets=["dots"])
    assert {r.error for r in healed} == {None}


def test_a_run_resumes_after_a_full_disk(workspace, monkeypatch):
    expected = numbers(bench(replace(workspace, folder=workspace.folder.parent / "other")))
    real, written = Path.write_bytes, []
    monkeypatch.setattr(inputs, "CHUNK", 20)

    def full(path, data):
        written.append(path)
        if len(written) > 50:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, data)

    backbone = TinyBackbone()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(NotAvailableError, match="No space left on device"):
            bench(workspace, backbone)
    assert len(written) == 51
    seen = backbone.seen
    assert numbers(bench(workspace, backbone)) == expected
    entries = FeatureCache(workspace.folder / "features").info().entries
    # What was stored before the disk was full did not pass the backbone again; the rest are plain
    # images, for the layout, for warming up (once per chunk) and for counting operations.
    assert backbone.seen - seen < entries - 50 + 20


def test_size_is_stated_and_limited(workspace, capsys):
    with pytest.raises(NotAvailableError, match="--cache-gb"):
        bench(replace(workspace, cache_gb=1e-6, features="cache"))
    bench(workspace, view=LiveView(), sets=["dots"])
    told = capsys.readouterr().err
    assert "images and" in told
    assert "GB in" in told
    assert "6 of 6" in told


def test_features_that_do_not_fit_are_computed_for_each_task(workspace, capsys):
    """The same numbers, without a file in the cache, and the price of it is told."""
    changes = {"sets": ["dots"], "methods": [MIV, "ncc"]}
    kept = bench(workspace, **changes)
    small = replace(workspace, folder=workspace.folder.with_name("small"), cache_gb=1e-6)
    assert numbers(bench(small, view=LiveView(), **changes)) == numbers(kept)
    told = capsys.readouterr().err
    assert "computed for each task and dropped" in told
    assert FeatureCache(small.folder / "features").info().entries == 0
    forced = replace(workspace, folder=workspace.folder.with_name("forced"), features="task")
    results = bench(forced, **changes)
    assert numbers(results) == numbers(kept)
    assert all(result.backbone_seconds > 0 for result in results)


def test_results_come_in_the_order_of_the_configuration(workspace):
    bench(workspace, sets=["bars"], methods=["ncc"])
    results = bench(workspace, methods=["ridge", "ncc"])  # `bars` and its `ncc` are in the folder
    expected = [(s, m, t) for s in ("dots", "bars") for t in range(3) for m in ("ridge", "ncc")]
    assert [(r.set, r.method, r.task) for r in results] == expected


def test_memory_limits_the_number_of_tasks_at_a_time(workspace, monkeypatch, capsys):
    class Counting(InlineExecutor):
        workers = 8
        limits: ClassVar = []

        def run(self, calls, most=None):
            self.limits.append(most)
            return super().run(calls)

    monkeypatch.setattr(runner, "available_memory", lambda: 3_000_000_000)
    bench(workspace, executor=Counting(), view=LiveView(), sets=["dots"], methods=["ncc"])
    assert Counting.limits[-1] == 3  # of a little more than 0.8 GB each
    assert "3 of 8 workers, because the largest task needs about 0.8 GB" in capsys.readouterr().err
    monkeypatch.setattr(runner, "available_memory", lambda: 100_000_000)
    bench(workspace, executor=Counting(), view=LiveView(), sets=["bars"], methods=["ncc"])
    assert Counting.limits[-1] == 1
    assert "0.1 GB are free" in capsys.readouterr().err


def test_the_device_is_recorded(workspace):
    bench(workspace, sets=["dots"], methods=["ncc"])
    assert read_origin(workspace.folder)["device"] == "cpu"


def test_all_missing_weights_are_named_at_once(workspace, monkeypatch):
    def refuse(entry, device):
        raise NotAvailableError(f"The weights of {entry.name} are missing.")

    monkeypatch.setattr(runner, "load_once", refuse)
    several = {"backbones": ["a", "b"], "methods": ["ncc"]}
    with pytest.raises(
        NotAvailableError, match=r"2 backbones cannot be loaded:\n- a, b: The weights of NAME are"
    ):
        run(config(**several), workspace)


def test_changed_images_are_extracted_again(workspace, data, tmp_path):
    copy = shutil.copytree(data, tmp_path / "copy")
    cache = tmp_path / "features"
    first = bench(replace(workspace, data=copy, cache=cache), sets=["dots"])
    for path in (copy / "dots" / "class0").iterdir():
        Image.new("RGB", (9, 9), "red").save(path)
    there = replace(workspace, data=copy, cache=cache, folder=tmp_path / "second")
    assert numbers(bench(there, sets=["dots"])) != numbers(first)


def test_tasks_of_another_run_or_other_data_are_refused(workspace, data, tmp_path):
    bench(workspace, sets=["dots"])
    path = next(workspace.folder.glob("tasks/*/dots.json"))
    shutil.rmtree(workspace.folder / "tasks")
    other = write_sets(tmp_path / "other", images=9)
    with pytest.raises(InputError, match="other tasks of dots"):
        bench(replace(workspace, data=other), sets=["dots"])
    bench(Workspace(tmp_path / "five", data), sets=["dots"], tasks=5)
    shutil.copy(next((tmp_path / "five").glob("tasks/*/dots.json")), path)
    with pytest.raises(InputError, match="number of tasks is 5, not 3"):
        bench(workspace, sets=["dots"])
    few = write_sets(tmp_path / "few", images=4)
    TaskSet.load(path)
    with pytest.raises(InputError, match="does not contain"):
        bench(
            replace(workspace, data=few, folder=tmp_path / "five"),
            sets=["dots"],
            tasks=5,
            seed=0,
            methods=["knn"],
        )


def test_a_set_with_too_few_classes_is_left_out_and_told(tmp_path, capsys):
    data = write_sets(tmp_path / "data", classes=3)
    results = bench(Workspace(tmp_path / "run", data), view=LiveView(), protocols=["varying"])
    assert results == []
    assert "dots is left out of 'varying'" in capsys.readouterr().err
    with pytest.raises(InputError, match="names no data sets"):
        bench(Workspace(tmp_path / "run", data), sets=[])


def test_a_missing_set_is_told_before_anything_runs(workspace):
    backbone = TinyBackbone()
    with pytest.raises(InputError, match="has no set 'absent'"):
        bench(workspace, backbone, sets=["dots", "absent"])
    assert backbone.seen == 0
    assert not workspace.folder.exists()


def test_a_threshold_of_its_own_changes_the_views(workspace):
    variant = {"name": "few", "method": "miv", "threshold": 0, "params": {"steps": 2}}
    results = bench(workspace, methods=[MIV, variant], sets=["dots"])
    assert {r.views for r in results if r.method == "miv"} == {20}
    assert {r.views for r in results if r.method == "few"} == {0}


def test_a_method_that_tunes_the_backbone_runs_on_images(workspace):
    torchvision = pytest.importorskip("torchvision", reason="the extra timm is not installed")
    import torch

    torch.manual_seed(0)
    model = torchvision.models.resnet18(weights=None)
    size = Preprocessing(size=32)
    mine = from_module(model, ["layer3", "layer4"], name="mine", preprocessing=size)
    tsa = {"name": "tsa", "params": {"steps": 2}}
    results = bench(workspace, mine, methods=[tsa, "ncc"], sets=["dots"], tasks=2)
    assert {(r.method, r.task, r.error) for r in results} == {
        (name, number, None) for name in ("tsa", "ncc") for number in (0, 1)
    }
    found = {r.method: r for r in results}
    assert found["tsa"].backbone_seconds == 0 < found["ncc"].backbone_seconds
    # two steps of three passes against one pass
    assert 3 < found["tsa"].gflops_paper / found["ncc"].gflops_paper < 9
    assert (workspace.folder / "features").exists()  # of ncc; tsa alone needs none
    only = replace(workspace, folder=workspace.folder.parent / "only")
    bench(only, mine, methods=[tsa], sets=["dots"], tasks=1)
    assert not (only.folder / "features").exists()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_there_is_a_worker_for_every_core_that_may_be_used():
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert runner.default_workers() == 1
    finally:
        os.sched_setaffinity(0, allowed)
    assert runner.default_workers() == len(allowed)


def test_a_run_shares_its_features_with_fit_and_with_other_runs(workspace, data, tmp_path):
    cache, backbone = tmp_path / "features", TinyBackbone()
    there = replace(workspace, cache=cache)
    first = bench(there, backbone, sets=["dots"])
    seen = backbone.seen
    again = bench(replace(there, folder=tmp_path / "second"), backbone, sets=["dots"])
    assert numbers(again) == numbers(first)
    # One batch to time the backbone and one image to warm up; two to count operations and memory.
    assert backbone.seen - seen == BATCH + 3
    (tasks,) = (TaskSet.load(path) for path in workspace.folder.glob("tasks/*/dots.json"))
    shots = tasks.tasks[0].support
    seen = backbone.seen
    classifier = FewShotClassifier(backbone, threshold=3, cache=cache, verbose=False)
    classifier.fit([data / "dots" / id_ for id_ in shots], tasks.tasks[0].support_labels)
    # At most once more, for the pictures that a model keeps; their views do not pass again.
    assert backbone.seen - seen <= len(shots)


def test_a_backbone_that_cannot_be_sent_stays_in_this_process(workspace):
    class Local(TinyBackbone):  # local classes cannot be pickled
        pass

    executor = LocalExecutor(1)
    try:
        results = bench(workspace, Local(), executor, sets=["dots"], tasks=1)
    finally:
        executor.close()
    assert {r.error for r in results} == {None}
    inline = replace(workspace, folder=workspace.folder.parent / "inline")
    assert numbers(results) == numbers(bench(inline, sets=["dots"], tasks=1))


def test_a_method_runs_only_on_its_backbones(workspace):
    own = {name: TinyBackbone() for name in ("first", "second")}
    methods = ["ncc", {"name": "knn", "backbones": ["second"]}]
    chosen = config(backbones=["first", "second"], methods=methods, sets=["dots"], tasks=1)
    results = run(chosen, workspace, backbones=own)
    assert [(r.backbone, r.method) for r in results] == [
        ("first", "ncc"),
        ("second", "ncc"),
        ("second", "knn"),
    ]
