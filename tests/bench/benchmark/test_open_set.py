"""Open tasks: their measures in plain loops, what they contain, a small run and its report."""

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mivhead.errors import InputError
from mivhead_bench.benchmark.executors import InlineExecutor
from mivhead_bench.benchmark.open_set import separate
from mivhead_bench.benchmark.report import write_report
from mivhead_bench.benchmark.results import Result
from mivhead_bench.benchmark.runner import Workspace, run
from mivhead_bench.benchmark.samplers import Protocol, sample_tasks
from mivhead_bench.datasets.bundled import write_bundled
from mivhead_bench.datasets.sets import open_set
from tests.helpers.bench_data import config, numbers
from tests.helpers.tiny_backbone import TinyBackbone

OPEN = "4-way 3-shot, open"
NAMES = ("digits", "photographs")


def test_measures_in_plain_loops() -> None:
    rng = np.random.default_rng(0)
    known, same, other = (rng.integers(a, a + 9, 40).astype(float) for a in (0, 3, 9))
    right = rng.random(40) < 0.6
    found = separate("energy", (known, same, other), right)
    threshold = min(t for t in known if np.mean(known <= t) >= 0.95)
    for unknown, auroc, fpr in (
        (same, found.auroc_same, found.fpr_same),
        (other, found.auroc_other, found.fpr_other),
    ):
        pairs = [(u > k) + 0.5 * (u == k) for k in known for u in unknown]
        assert auroc == pytest.approx(np.mean(pairs))
        assert fpr == pytest.approx(np.mean([u <= threshold for u in unknown]))
    surest = sorted(range(40), key=lambda i: known[i])[:32]
    assert found.accuracy_80 == pytest.approx(np.mean([right[i] for i in surest]), abs=0.07)  # ties


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundled(tmp_path_factory.mktemp("data"))


def test_unknown_images_are_of_other_classes_and_other_sets(data: Path) -> None:
    sets = {name: open_set(name, data) for name in NAMES}
    others = {"photographs": sets["photographs"]}
    rules = Protocol.parse("10-way 5-shot, open")
    tasks = sample_tasks(sets["digits"], "digits", rules, 0, 3, others=others)
    task = tasks.tasks[2]
    label = dict(zip(sets["digits"].ids, sets["digits"].labels or (), strict=True))
    assert len(task.classes) == 8  # two of ten stay unknown
    assert [task.classes[c] for c in task.query_labels] == [label[id_] for id_ in task.queries]
    assert not {label[id_] for id_ in task.unknown} & set(task.classes)
    assert len(task.unknown) == 40  # all of both
    assert len(task.foreign) == len(task.queries) == 80
    assert {id_.partition(":")[2] for id_ in task.foreign} <= set(sets["photographs"].ids)
    assert {id_.partition(":")[0] for id_ in task.foreign} == {"photographs"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("varying, open", "may be followed"),
        ("5-way 1-shot, open 3", "unless it is 'open'"),
        ("5-way 1-shot, open, unlabelled 6", "either open or has unlabelled"),
    ],
)
def test_protocols_that_cannot_be_open(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        Protocol.parse(text)


def run_open(
    workspace: Workspace, methods: list, executor: InlineExecutor | None = None
) -> list[Result]:
    wanted = config(sets=list(NAMES), protocols=[OPEN], tasks=1, methods=methods)
    return run(wanted, workspace, executor, backbones={"tiny": TinyBackbone()})


@pytest.fixture
def workspace(data: Path, tmp_path: Path) -> Workspace:
    return Workspace(tmp_path / "run", data, cache=tmp_path / "cache")


MIV = {"name": "miv", "params": {"steps": 2}}


def test_a_run_resumes_and_its_report_shows_unknown_images(workspace: Workspace) -> None:
    first = run_open(workspace, [MIV])
    results = run_open(workspace, [MIV, "ncc"])
    assert [r for r in results if r.method == "miv"] == first
    for result in results:
        assert result.error is None
        scores = ["probability", "energy", "unknown"][: 3 if result.method == "miv" else 1]
        assert [each.score for each in result.open.scores] == scores
    unknown = [r.open.scores[-1].auroc_other for r in first]
    assert np.mean(unknown) > 0.5
    write_report(results, workspace.folder / "report", "Open")
    text = (workspace.folder / "report" / "report.md").read_text()
    expected = np.mean([r.open.scores[0].auroc_same for r in results if r.method == "ncc"])
    assert f"| ncc | probability | {expected:.3f} |" in text
    assert f"Decisions of miv, tiny, {OPEN}" in text
    header = (workspace.folder / "report" / "results.csv").read_text().splitlines()[0]
    assert "auroc_same_unknown" in header


def test_features_may_be_dropped_and_tasks_be_sent_to_workers(workspace: Workspace) -> None:
    class Pickling(InlineExecutor):
        def run(self, calls, *most):
            return super().run([pickle.loads(pickle.dumps(call)) for call in calls], *most)

    kept = run_open(workspace, ["ncc"], Pickling())
    dropped = run_open(
        replace(workspace, folder=workspace.folder / "again", features="task"), ["ncc"]
    )
    assert numbers(kept) == numbers(dropped)
    assert [r.open for r in kept] == [r.open for r in dropped]


def test_one_set_is_not_enough(workspace: Workspace) -> None:
    with pytest.raises(InputError, match="at least two data sets"):
        run(config(sets=["digits"], protocols=[OPEN]), workspace)
