"""The open-set protocol: its measures in plain loops, what its tasks hold, and a small run."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from mivhead.benchmark.open_set import (
    auroc,
    describe_open_set,
    fpr,
    read_open_set,
    run_open_set,
    sample_open_set,
    summarise,
)
from mivhead.cli.main import main
from mivhead.datasets.bundled import write_bundled
from mivhead.datasets.sets import open_set
from mivhead.errors import InputError
from mivhead.executors.local import InlineExecutor
from mivhead.extraction.cache import FeatureCache
from mivhead.images.augmentation import ViewPlan, number_views
from tests.helpers.tiny_backbone import TinyBackbone


def test_auroc_and_fpr_in_plain_loops() -> None:
    rng = np.random.default_rng(0)
    known, unknown = rng.integers(0, 9, 40).astype(float), rng.integers(3, 12, 30).astype(float)
    pairs = [(u > k) + 0.5 * (u == k) for k in known for u in unknown]
    assert auroc(known, unknown) == pytest.approx(np.mean(pairs))
    threshold = min(t for t in known if np.mean(known <= t) >= 0.95)
    assert fpr(known, unknown) == np.mean([u <= threshold for u in unknown])


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundled(tmp_path_factory.mktemp("data"))


NAMES = ("digits", "photographs")


def test_unknown_images_are_of_other_classes_and_other_sets(data: Path) -> None:
    sets = {name: open_set(name, data) for name in NAMES}
    task = sample_open_set("digits", sets, 10, 5, 0, 3)
    labels = sets["digits"].labels or ()
    assert len(task.classes) == 8  # two of ten stay unknown
    assert [task.classes[c] for c in task.support_labels] == [labels[r] for r in task.support]
    assert [task.classes[c] for c in task.query_labels] == [labels[r] for r in task.queries]
    assert not {labels[row] for row in task.same} & set(task.classes)
    assert not set(task.support) & set(task.queries)
    assert {name for name, _ in task.other} == {"photographs"}
    assert len(task.other) == len(task.queries)
    assert task == sample_open_set("digits", sets, 10, 5, 0, 3)
    assert task != sample_open_set("digits", sets, 10, 5, 0, 4)


@pytest.mark.parametrize(("shots", "views"), [(1, 4), (5, 0)])
def test_shots_have_the_views_of_the_default_recipe(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shots: int, views: int
) -> None:
    asked = []

    def spy(counts: list[int], seed: int = 0) -> ViewPlan:
        asked.append(set(counts))
        return number_views(counts, seed)

    monkeypatch.setattr("mivhead.benchmark.open_set.number_views", spy)
    run_open_set(
        NAMES,
        data,
        tmp_path / "run",
        protocols=((3, shots),),
        methods=("ncc",),
        tasks=1,
        views=4,
        backbone=TinyBackbone(threshold=15),
        cache=FeatureCache(tmp_path / "cache"),
        verbose=False,
    )
    assert asked
    assert all(counts == {views} for counts in asked)


def test_a_small_run_resumes(data: Path, tmp_path: Path) -> None:
    def run(methods: tuple[str, ...]) -> list:
        return run_open_set(
            NAMES,
            data,
            tmp_path / "run",
            protocols=((4, 3), (3, 1)),
            methods=methods,
            tasks=1,
            views=1,
            backbone=TinyBackbone(),
            cache=FeatureCache(tmp_path / "cache"),
            verbose=False,
        )

    first = run(("miv",))
    path = tmp_path / "run" / "open-set.jsonl"
    with path.open("a") as file:
        file.write('{"set": "dig')  # a kill
    path.write_text(path.read_text().rpartition("\n")[0] + "\n")
    results = run(("miv", "ncc"))
    assert results[: len(first)] == first
    assert read_open_set(path) == results
    rows = {(r.protocol, r.method, r.score): r for r in summarise(results)}
    with_sets = rows["4-way 3-shot", "miv", "unknown"].means
    assert 0 <= with_sets["coverage"] <= 1 <= with_sets["size"] <= 4
    assert rows["3-way 1-shot", "miv", "unknown"].means["coverage"] is None
    assert 0.5 < with_sets["auroc_other"] <= 1
    assert {score for _, method, score in rows if method == "features"} == {"knn", "mahalanobis"}
    assert rows["4-way 3-shot", "ncc", "energy"].sets == 2
    assert 0 <= rows["4-way 3-shot", "ncc", "energy"].means["calibration_error"] <= 1
    assert rows["4-way 3-shot", "features", "knn"].means["calibration_error"] is None
    report = describe_open_set(results)
    assert report.count("Per set, `miv`:") == 2
    expected = rows["4-way 3-shot", "ncc", "energy"].means["auroc_same"]
    assert f"| `ncc` | energy | 2 | {expected:.3f} |" in report
    assert "| not possible |" in report  # sets of a 3-way 1-shot task
    assert main(["bench", "report", str(tmp_path / "run"), "--quiet"]) == 0
    assert (tmp_path / "run" / "report" / "report.md").read_text() == report


def test_tasks_can_be_sent_to_workers(data: Path, tmp_path: Path) -> None:
    """Workers get pickled calls: here, each call makes the journey, and the results are equal."""

    class Pickling(InlineExecutor):
        def run(self, calls):
            return super().run([pickle.loads(pickle.dumps(call)) for call in calls])

    def run(folder: str, executor: InlineExecutor | None) -> list:
        return run_open_set(
            NAMES, data, tmp_path / folder, protocols=((3, 1),), methods=("ncc",), tasks=1, views=0,
            cache=FeatureCache(tmp_path / "cache"), executor=executor, verbose=False,
        )  # fmt: skip

    assert run("sent", Pickling()) == run("here", None)
    with pytest.raises(InputError, match="cannot be sent to workers"):
        run_open_set(NAMES, data, tmp_path, backbone=TinyBackbone(), executor=InlineExecutor())


def test_one_set_is_not_enough(data: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="at least two data sets"):
        run_open_set(["digits"], data, tmp_path)
