"""Open tasks: their measures in plain loops, what they contain, a small run and its report."""

import json
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mivhead.benchmark.open_set import separate
from mivhead.benchmark.report import write_report
from mivhead.benchmark.results import Result, read_results
from mivhead.benchmark.runner import Place, run
from mivhead.benchmark.samplers import Protocol, sample_tasks
from mivhead.cli.main import main
from mivhead.datasets.bundled import write_bundled
from mivhead.datasets.sets import open_set
from mivhead.errors import InputError
from mivhead.executors.local import InlineExecutor
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


def run_open(place: Place, methods: list, executor: InlineExecutor | None = None) -> list[Result]:
    wanted = config(sets=list(NAMES), protocols=[OPEN], tasks=1, methods=methods)
    return run(wanted, place, executor, backbones={"tiny": TinyBackbone()})


@pytest.fixture
def place(data: Path, tmp_path: Path) -> Place:
    return Place(tmp_path / "run", data, cache=tmp_path / "cache")


MIV = {"name": "miv", "params": {"steps": 2}}


def test_a_run_resumes_and_its_report_shows_unknown_images(place: Place) -> None:
    first = run_open(place, [MIV])
    results = run_open(place, [MIV, "ncc"])
    assert [r for r in results if r.method == "miv"] == first
    for result in results:
        assert result.error is None
        assert [each.score for each in result.open.scores] == ["probability", "energy", "unknown"]
        assert (result.open.coverage is None) == (result.method == "ncc")  # no shot is left out
    unknown = [r.open.scores[-1].auroc_other for r in first]
    assert np.mean(unknown) > 0.5
    write_report(results, place.folder / "report", "Open")
    text = (place.folder / "report" / "report.md").read_text()
    expected = np.mean([r.open.scores[1].auroc_same for r in results if r.method == "ncc"])
    assert f"| ncc | energy | {expected:.3f} |" in text
    assert f"Decisions of miv, tiny, {OPEN}" in text
    header = (place.folder / "report" / "results.csv").read_text().splitlines()[0]
    assert "auroc_same_unknown" in header


def test_features_may_be_dropped_and_tasks_be_sent_to_workers(place: Place) -> None:
    class Pickling(InlineExecutor):
        def run(self, calls, *most):
            return super().run([pickle.loads(pickle.dumps(call)) for call in calls], *most)

    kept = run_open(place, ["ncc"], Pickling())
    dropped = run_open(replace(place, folder=place.folder / "again", features="task"), ["ncc"])
    assert numbers(kept) == numbers(dropped)
    assert [r.open for r in kept] == [r.open for r in dropped]


def test_one_set_is_not_enough(place: Place) -> None:
    with pytest.raises(InputError, match="at least two data sets"):
        run(config(sets=["digits"], protocols=[OPEN]), place)


def test_results_of_0_2_0_are_reported(tmp_path: Path, capsys) -> None:
    lines = [
        {
            "set": name, "protocol": "5-way 1-shot", "method": method, "score": score, "task": task,
            "ways": 5, "auroc_same": 0.7, "auroc_other": 0.9, "fpr_same": 0.5, "fpr_other": 0.1,
            "accuracy": 0.8, "accuracy_80": 0.9, "calibration": [[20.0, 11.0, 10.0]],
            "coverage": None, "size": None, "known_rejected": 0.1 if score == "unknown" else None,
            "same_rejected": 0.2, "other_rejected": 0.9, "named": 0.5, "named_wrong": None,
        }
        for name in ("ducks", "swans")
        for task in range(2)
        for method, score in (("miv", "energy"), ("miv", "unknown"), ("features", "knn"))
    ]  # fmt: skip
    path = tmp_path / "open-set.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"set": "bir')
    assert len(read_results(tmp_path)) == 4
    assert main(["bench", "report", str(tmp_path)]) == 0
    text = (tmp_path / "report" / "report.md").read_text()
    assert "| miv | unknown | 0.700 | 0.900 | 0.500 | 0.100 | 0.900 |" in text
    assert "| ducks | 0.100 | 0.200 | 0.900 | 0.500 |" in text
    path.write_text('{"set": 1}\n')
    with pytest.raises(InputError, match="does not contain results of version"):
        read_results(tmp_path)
