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
from mivhead.benchmark import inputs, runner
from mivhead.benchmark.live import LiveView
from mivhead.benchmark.report import write_report
from mivhead.benchmark.results import RESULTS, read_origin, read_results
from mivhead.benchmark.runner import Place, run
from mivhead.benchmark.tasks import TaskSet
from mivhead.errors import InputError, NotAvailableError
from mivhead.executors import Died
from mivhead.executors.local import InlineExecutor, LocalExecutor
from mivhead.extraction.cache import FeatureCache, content_hash
from mivhead.extraction.pipeline import BATCH
from mivhead.images.augmentation import augment, view_seed
from mivhead.methods.knn import NearestNeighbours
from mivhead.methods.ncc import NearestCentroid
from mivhead.methods.registry import make_method
from mivhead.model.fewshot import FewShotClassifier
from tests.helpers.bench_data import MIV, config, numbers, write_sets
from tests.helpers.tiny_backbone import TinyBackbone


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Two sets of six classes of eight images; do not change them."""
    return write_sets(tmp_path_factory.mktemp("data"))


@pytest.fixture
def place(data, tmp_path):
    return Place(tmp_path / "run", data)


def bench(place, backbone=None, executor=None, view=None, **changes):
    own = {"tiny": backbone or TinyBackbone()}
    return run(config(**changes), place, executor, backbones=own, view=view)


def test_a_result_is_what_the_method_gives_by_hand(place, data):
    results = bench(place, sets=["dots"], tasks=1)
    (tasks,) = (TaskSet.load(path) for path in place.folder.glob("tasks/*/dots.json"))
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
        assert found.gflops > 0
        assert found.adapt_seconds > 0
        assert found.backbone_seconds > 0


def test_the_papers_tables_read_mnist_at_84_pixels(tmp_path, capsys):
    def votes(data, **changes):
        place = Place(tmp_path / f"run of {data} {changes}", tmp_path / data)
        wanted = {"sets": ["mnist"], "methods": ["ncc"], "tasks": 2} | changes
        return [r.calibration for r in bench(place, view=LiveView(), **wanted)]

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


def test_each_picture_passes_the_backbone_once(place):
    backbone = TinyBackbone()
    bench(place, backbone, protocols=["5-way 2-shot", "varying"])
    seen = backbone.seen
    entries = FeatureCache(place.folder / "features").info().entries
    extra = seen - entries  # plain images: for the layout, for warming up, for counting flops
    assert 0 < extra <= 8
    shutil.rmtree(place.folder / "tasks")
    (place.folder / RESULTS).unlink()
    bench(place, backbone, protocols=["5-way 2-shot", "varying"], methods=[MIV, "ncc", "knn"])
    assert backbone.seen - seen <= 4  # counting flops and memory, once a set


def test_flipped_bits_in_the_features_change_no_accuracy(place):
    first = bench(place)
    rng = np.random.default_rng(0)
    entries = [path for path in (place.folder / "features").glob("??/*") if path.is_file()]
    for path in entries:
        content = bytearray(path.read_bytes())
        content[rng.integers(len(content))] ^= 1 << rng.integers(8)
        path.write_bytes(content)
    shutil.rmtree(place.folder / "tasks")
    (place.folder / RESULTS).unlink()
    # Damaged features count as missing. This backbone cannot be loaded by name, so that they are
    # extracted by the next command.
    damaged = bench(place)
    assert all("disappeared from the cache" in (each.error or "") for each in damaged)
    assert [each.accuracy for each in bench(place)] == [each.accuracy for each in first]


def test_a_finished_run_computes_nothing_and_more_methods_only_themselves(place, monkeypatch):
    first = bench(place)
    written = (place.folder / RESULTS).read_bytes()
    monkeypatch.setattr(NearestCentroid, "_learn", None)  # would fail
    assert numbers(bench(place)) == numbers(first)
    assert (place.folder / RESULTS).read_bytes() == written
    more = bench(place, methods=["ncc", "knn"])
    assert {r.method for r in more} == {"ncc", "knn"}
    assert all(r.error is None for r in more)
    assert {r.method for r in read_results(place.folder)} == {"miv", "ncc", "knn"}


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError("64 GB"), "memory: 64 GB"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "memory: "),
        (FloatingPointError("overflow"), "numerical: overflow"),
        (KeyError("x"), "KeyError: 'x'"),
    ],
)
def test_a_failure_is_recorded_shown_and_tried_again(place, monkeypatch, capsys, error, words):
    learn = NearestCentroid._learn

    def fail_once(self, shots):
        monkeypatch.setattr(NearestCentroid, "_learn", learn)
        raise error

    monkeypatch.setattr("mivhead.benchmark.measuring._warm", {("tiny", "ncc"), ("tiny", "miv")})
    monkeypatch.setattr(NearestCentroid, "_learn", fail_once)
    results = bench(place, view=LiveView())
    (failed,) = (r for r in results if r.error)
    assert failed.error.startswith(words)
    assert (failed.accuracy, failed.method, failed.calibration) == (None, "ncc", ())
    assert f"ncc failed: {words}" in capsys.readouterr().err
    assert len(results) == 12  # the others went on
    again = bench(place)
    assert all(r.error is None for r in again)
    assert len(again) == 12


def test_probabilities_that_are_no_numbers_are_no_result(place, monkeypatch):
    def nan(self, features):
        return np.full((len(features), len(self.classes_)), np.nan)

    monkeypatch.setattr(NearestNeighbours, "predict_proba", nan)
    results = bench(place, methods=["ncc", "knn"], sets=["dots"])
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


def test_the_method_that_kills_workers_is_found(place):
    def deadly(call):
        return any(m.name == "knn" for m in call.methods)

    methods = ["ncc", "knn"]
    results = bench(place, executor=DyingExecutor(deadly), methods=methods, sets=["dots"])
    assert {r.error for r in results if r.method == "knn"} == {"memory: it was killed"}
    assert {r.error for r in results if r.method == "ncc"} == {None}
    healed = bench(place, methods=methods, sets=["dots"])
    assert {r.error for r in healed} == {None}


def test_a_run_resumes_after_a_full_disk(place, monkeypatch):
    expected = numbers(bench(replace(place, folder=place.folder.parent / "other")))
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
        with pytest.raises(NotAvailableError, match=r"No space left on device.* it resumes"):
            bench(place, backbone)
    assert len(written) == 51
    seen = backbone.seen
    assert numbers(bench(place, backbone)) == expected
    entries = FeatureCache(place.folder / "features").info().entries
    # What was stored before the disk was full did not pass the backbone again; the rest are plain
    # images, for the layout, for warming up (once per chunk) and for counting operations.
    assert backbone.seen - seen < entries - 50 + 20


def test_size_is_stated_and_limited(place, capsys):
    with pytest.raises(NotAvailableError, match="raise it with --cache-gb"):
        bench(replace(place, cache_gb=1e-6, features="cache"))
    bench(place, view=LiveView(), sets=["dots"])
    told = capsys.readouterr().err
    assert "images and" in told
    assert "GB in" in told
    assert "6 of 6" in told


def test_features_that_do_not_fit_are_computed_for_each_task(place, capsys):
    """The same numbers, without a file in the cache, and the price of it is told."""
    changes = {"sets": ["dots"], "methods": [MIV, "ncc"]}
    kept = bench(place, **changes)
    small = replace(place, folder=place.folder.with_name("small"), cache_gb=1e-6)
    assert numbers(bench(small, view=LiveView(), **changes)) == numbers(kept)
    told = capsys.readouterr().err
    assert "computed for each task and dropped" in told
    assert "raise it with --cache-gb" in told
    assert FeatureCache(small.folder / "features").info().entries == 0
    forced = replace(place, folder=place.folder.with_name("forced"), features="task")
    results = bench(forced, **changes)
    assert numbers(results) == numbers(kept)
    assert all(result.backbone_seconds > 0 for result in results)


def test_results_come_in_the_order_of_the_configuration(place):
    bench(place, sets=["bars"], methods=["ncc"])
    results = bench(place, methods=["ridge", "ncc"])  # `bars` and its `ncc` are in the folder
    expected = [(s, m, t) for s in ("dots", "bars") for t in range(3) for m in ("ridge", "ncc")]
    assert [(r.set, r.method, r.task) for r in results] == expected


def test_missing_kernels_are_announced(place, monkeypatch, capsys):
    words = "compiled kernels of mivhead are not available here"
    monkeypatch.setattr(runner, "library", object)
    bench(place, view=LiveView(), sets=["dots"], tasks=1)
    assert words not in capsys.readouterr().err
    monkeypatch.setattr(runner, "library", lambda: None)
    elsewhere = replace(place, folder=place.folder / "ncc")
    bench(elsewhere, view=LiveView(), sets=["dots"], tasks=1, methods=["ncc"])
    assert words not in capsys.readouterr().err
    bench(place, view=LiveView(), sets=["dots"], tasks=1)
    assert words in capsys.readouterr().err


def test_memory_limits_the_number_of_tasks_at_a_time(place, monkeypatch, capsys):
    class Counting(InlineExecutor):
        workers = 8
        limits: ClassVar = []

        def run(self, calls, most=None):
            self.limits.append(most)
            return super().run(calls)

    monkeypatch.setattr(runner, "available_memory", lambda: 3_000_000_000)
    bench(place, executor=Counting(), view=LiveView(), sets=["dots"], methods=["ncc"])
    assert Counting.limits[-1] == 3  # of a little more than 0.8 GB each
    assert "3 of 8 workers, because the largest task needs about 0.8 GB" in capsys.readouterr().err
    monkeypatch.setattr(runner, "available_memory", lambda: 100_000_000)
    bench(place, executor=Counting(), view=LiveView(), sets=["bars"], methods=["ncc"])
    assert Counting.limits[-1] == 1
    assert "0.1 GB are free: it may fail" in capsys.readouterr().err


def test_the_device_is_recorded(place):
    bench(place, sets=["dots"], methods=["ncc"])
    assert read_origin(place.folder)["device"] == "cpu"


def test_all_missing_weights_are_named_at_once(place, monkeypatch):
    def refuse(entry, device):
        raise NotAvailableError(f"The weights of {entry.name} are missing.")

    monkeypatch.setattr(runner, "load_once", refuse)
    several = {"backbones": ["a", "b"], "methods": ["ncc"]}
    with pytest.raises(
        NotAvailableError, match=r"2 backbones cannot be loaded:\n- a, b: The weights of NAME are"
    ):
        run(config(**several), place)


def test_changed_images_are_extracted_again(place, data, tmp_path):
    copy = shutil.copytree(data, tmp_path / "copy")
    cache = tmp_path / "features"
    first = bench(replace(place, data=copy, cache=cache), sets=["dots"])
    for path in (copy / "dots" / "class0").iterdir():
        Image.new("RGB", (9, 9), "red").save(path)
    there = replace(place, data=copy, cache=cache, folder=tmp_path / "second")
    assert numbers(bench(there, sets=["dots"])) != numbers(first)


def test_tasks_of_another_run_or_other_data_are_refused(place, data, tmp_path):
    bench(place, sets=["dots"])
    path = next(place.folder.glob("tasks/*/dots.json"))
    shutil.rmtree(place.folder / "tasks")
    other = write_sets(tmp_path / "other", images=9)
    with pytest.raises(InputError, match="other tasks of dots"):
        bench(replace(place, data=other), sets=["dots"])
    bench(Place(tmp_path / "five", data), sets=["dots"], tasks=5)
    shutil.copy(next((tmp_path / "five").glob("tasks/*/dots.json")), path)
    with pytest.raises(InputError, match="number of tasks is 5, not 3"):
        bench(place, sets=["dots"])
    few = write_sets(tmp_path / "few", images=4)
    TaskSet.load(path)
    with pytest.raises(InputError, match="which the data set dots does not contain"):
        bench(
            replace(place, data=few, folder=tmp_path / "five"),
            sets=["dots"],
            tasks=5,
            seed=0,
            methods=["knn"],
        )


def test_a_set_with_too_few_classes_is_left_out_and_told(tmp_path, capsys):
    data = write_sets(tmp_path / "data", classes=3)
    results = bench(Place(tmp_path / "run", data), view=LiveView(), protocols=["varying"])
    assert results == []
    assert "dots is left out of 'varying'" in capsys.readouterr().err
    with pytest.raises(InputError, match="names no data sets"):
        bench(Place(tmp_path / "run", data), sets=[])


def test_a_missing_set_is_told_before_anything_runs(place):
    backbone = TinyBackbone()
    with pytest.raises(InputError, match="has no set 'absent'"):
        bench(place, backbone, sets=["dots", "absent"])
    assert backbone.seen == 0
    assert not place.folder.exists()


def test_a_threshold_of_its_own_changes_the_views(place):
    variant = {"name": "few", "method": "miv", "threshold": 0, "params": {"steps": 2}}
    results = bench(place, methods=[MIV, variant], sets=["dots"])
    assert {r.views for r in results if r.method == "miv"} == {20}
    assert {r.views for r in results if r.method == "few"} == {0}


def test_a_method_that_tunes_the_backbone_runs_on_images(place):
    torchvision = pytest.importorskip("torchvision", reason="the extra timm is not installed")
    import torch

    torch.manual_seed(0)
    model = torchvision.models.resnet18(weights=None)
    size = Preprocessing(size=32)
    mine = from_module(model, ["layer3", "layer4"], name="mine", preprocessing=size)
    tsa = {"name": "tsa", "params": {"steps": 2}}
    results = bench(place, mine, methods=[tsa, "ncc"], sets=["dots"], tasks=2)
    assert {(r.method, r.task, r.error) for r in results} == {
        (name, number, None) for name in ("tsa", "ncc") for number in (0, 1)
    }
    found = {r.method: r for r in results}
    assert found["tsa"].backbone_seconds == 0 < found["ncc"].backbone_seconds
    # two steps of three passes against one pass
    assert 3 < found["tsa"].gflops_paper / found["ncc"].gflops_paper < 9
    assert (place.folder / "features").exists()  # of ncc; tsa alone needs none
    only = replace(place, folder=place.folder.parent / "only")
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


def test_a_run_shares_its_features_with_fit_and_with_other_runs(place, data, tmp_path):
    cache, backbone = tmp_path / "features", TinyBackbone()
    there = replace(place, cache=cache)
    first = bench(there, backbone, sets=["dots"])
    seen = backbone.seen
    again = bench(replace(there, folder=tmp_path / "second"), backbone, sets=["dots"])
    assert numbers(again) == numbers(first)
    # One batch to time the backbone and one image to warm up; two to count operations and memory.
    assert backbone.seen - seen == BATCH + 3
    (tasks,) = (TaskSet.load(path) for path in place.folder.glob("tasks/*/dots.json"))
    shots = tasks.tasks[0].support
    seen = backbone.seen
    classifier = FewShotClassifier(backbone, threshold=3, cache=cache, verbose=False)
    classifier.fit([data / "dots" / id_ for id_ in shots], tasks.tasks[0].support_labels)
    assert backbone.seen == seen  # not even the views: T = 3 and two shots make two views each


def test_a_backbone_that_cannot_be_sent_stays_in_this_process(place):
    class Local(TinyBackbone):  # local classes cannot be pickled
        pass

    executor = LocalExecutor(1)
    try:
        results = bench(place, Local(), executor, sets=["dots"])
    finally:
        executor.close()
    assert {r.error for r in results} == {None}
    assert numbers(results) == numbers(
        bench(replace(place, folder=place.folder.parent / "inline"), sets=["dots"])
    )


def test_a_run_of_version_0_1_0_resumes_and_reports(data, tmp_path, capsys):
    """The folder was written by 0.1.0, which seeded views by image id and recorded no version."""
    old = Path(__file__).parent / "data" / "run_0_1_0"
    folder = shutil.copytree(old, tmp_path / "run")
    before = read_results(folder)
    assert len(before) == 4
    results = bench(Place(folder, data), view=LiveView(), sets=["dots"])
    assert "was started by an earlier version of mivhead" in capsys.readouterr().err
    assert len(results) == 6
    assert results[:4] == before
    fresh = tmp_path / "fresh"
    shutil.copytree(old, fresh, ignore=shutil.ignore_patterns(RESULTS))  # the tasks alone
    again = numbers(bench(Place(fresh, data), sets=["dots"]))
    for result in results:
        (tasks, accuracy, *_) = again[result.key]
        assert result.tasks == tasks
        if result.method == "ncc":  # it uses no views
            assert result.accuracy == accuracy
    assert (folder / RESULTS).read_bytes().startswith((old / RESULTS).read_bytes())
    paths = write_report(read_results(folder), tmp_path / "report", "Old")
    assert all(path.stat().st_size for path in paths)


def test_a_run_of_version_0_2_0_resumes(data, tmp_path, capsys):
    old = Path(__file__).parent / "data" / "run_0_2_0"
    folder = shutil.copytree(old, tmp_path / "run")
    before = read_results(folder)
    assert len(before) == 4
    results = bench(Place(folder, data), view=LiveView(), sets=["dots"])
    assert "earlier version" not in capsys.readouterr().err
    assert len(results) == 6
    assert results[:4] == before
    assert (folder / RESULTS).read_bytes().startswith((old / RESULTS).read_bytes())


def test_a_method_runs_only_on_its_backbones(place):
    own = {name: TinyBackbone() for name in ("first", "second")}
    methods = ["ncc", {"name": "knn", "backbones": ["second"]}]
    chosen = config(backbones=["first", "second"], methods=methods, sets=["dots"], tasks=1)
    results = run(chosen, place, backbones=own)
    assert [(r.backbone, r.method) for r in results] == [
        ("first", "ncc"),
        ("second", "ncc"),
        ("second", "knn"),
    ]
