"""What the app learns from a project, in the background."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mivhead
from mivhead import FewShotClassifier
from mivhead.app.learner import Knowledge, Learner, extrapolate
from mivhead.app.project import MODEL, Project
from tests.conftest import COLOURS
from tests.helpers.services import toy
from tests.service.conftest import photo


@contextmanager
def learning(project: Project, **options: Any) -> Iterator[Learner]:
    options = options or {"method": "ncc"}  # fast
    model = FewShotClassifier(toy(), threshold=0, verbose=False, **options)
    learner = Learner(project, model, debounce=0.05)
    learner.start()
    try:
        yield learner
    finally:
        learner.stop()
        learner._thread.join()


def wait(learner: Learner, test: Callable[[Knowledge], object]) -> Knowledge:
    until = time.monotonic() + 60
    while not test(learner.known):
        assert time.monotonic() < until, learner.known
        time.sleep(0.02)
    return learner.known


def fill(project: Project, count: int = 3) -> None:
    for name in COLOURS:
        project.add_class(name)
        for i in range(count):
            project.add_photo(photo(name, i), f"{i}.png", name)


def ready(known: Knowledge) -> bool:
    return known.stage == "ready" and known.estimate is not None


def test_it_learns_names_and_estimates(project: Project) -> None:
    with learning(project) as learner:
        wait(learner, lambda known: known.stage == "waiting" and learner.version > 1)
        fill(project)
        new = project.add_photo(photo("red", 50), "new.png", None)
        known = wait(learner, lambda known: ready(known) and new.id in known.predictions)
        assert known.predictions[new.id].label == "red"
        assert known.estimate is not None
        assert known.estimate["tested"] == 9
        assert set(known.estimate["classes"]) == set(COLOURS)
        assert known.estimate["classes"]["red"][0] == 3
        assert known.estimate["right"] == known.model.check().score.right
        saved = mivhead.load(project.folder / MODEL, backbone=toy())
        assert saved.classes_.tolist() == sorted(COLOURS)
        assert "red/0.png" in saved.shots_.names


def test_more_photos_are_extrapolated_from_fewer(project: Project) -> None:
    fill(project, 5)
    with learning(project) as learner:
        known = wait(learner, lambda known: ready(known) and len(known.shots) == 15)
        trend = known.estimate["trend"]
        assert trend["half"] == known.model.check(folds=2).score.accuracy
        assert trend["most"] == known.estimate["right"] / known.estimate["tested"]
        saved = mivhead.load(project.folder / MODEL, backbone=toy()).estimate_
        assert saved.accuracy == known.estimate["accuracy"]  # `miv info` shows the same figure
        project.remove([project.snapshot().classes["red"][0].id])
        known = wait(learner, lambda known: ready(known) and len(known.shots) == 14)
        assert "trend" not in known.estimate  # four photos are too few to halve


def test_the_trend_follows_a_power_of_the_number_of_shots() -> None:
    def checked(right: int, folds: int) -> Any:
        score = SimpleNamespace(images=100, right=right, accuracy=right / 100)
        return SimpleNamespace(score=score, accuracy=right / 100, folds=folds)

    rising = extrapolate(checked(60, 2), checked(70, 5))
    exponent = np.log(40.5 / 30.5) / np.log(0.8 / 0.5)
    assert rising["twice"] == pytest.approx(1 - 0.3 * 0.5**exponent)
    for half in (70, 75):  # fewer photos gave the same, or more
        assert extrapolate(checked(half, 2), checked(70, 5))["twice"] == 0.7
    steep = extrapolate(checked(10, 2), checked(90, 5))
    assert steep["twice"] == pytest.approx(1 - 0.1 / 2)  # not faster than 1 / n
    assert extrapolate(checked(90, 2), checked(100, 5))["twice"] == 1


def test_a_correction_is_learned_and_undone(project: Project) -> None:
    fill(project)
    with learning(project) as learner:
        new = project.add_photo(photo("red", 50), "new.png", None)
        wait(learner, ready)
        project.move([new.id], "blue")
        known = wait(learner, lambda known: known.shots.get(new.id) == "blue" and ready(known))
        assert new.id not in known.predictions
        wait(learner, lambda known: any(s["id"] == new.id for s in known.estimate["suspects"]))
        project.undo()
        wait(learner, lambda known: new.id not in known.shots and new.id in known.predictions)


def test_an_unreadable_file_does_not_stop_the_others(project: Project) -> None:
    fill(project)
    (project.folder / "red/bad.jpg").write_text("not a photo")
    project.rescan()
    with learning(project) as learner:
        known = wait(learner, ready)
        assert len(known.shots) == 9
        bad = next(p for p in project.snapshot().classes["red"] if p.name == "bad.jpg")
        assert "is not a JPEG" in str(project.problem(bad))


def test_too_few_classes_forget_the_model(project: Project) -> None:
    fill(project)
    with learning(project) as learner:
        wait(learner, ready)
        for name in ("red", "green"):
            project.remove_class(name)
        wait(learner, lambda known: known.model is None and known.stage == "waiting")
        project.undo()
        wait(learner, ready)


def test_a_model_file_of_someone_else_is_kept(project: Project) -> None:
    fill(project)
    with learning(project) as learner:
        wait(learner, ready)
    with learning(project) as learner:  # its own file is simply replaced
        assert wait(learner, ready).problem == ""
        (project.folder / MODEL).write_bytes(b"of another program")
        project.add_photo(photo("red", 60), "more.png", "red")
        known = wait(learner, lambda known: len(known.shots) == 10 and ready(known))
        assert "model.miv was changed by another program" in known.problem
    kept = project.folder / "model (from elsewhere).miv"
    assert kept.read_bytes() == b"of another program"
    mivhead.load(project.folder / MODEL, backbone=toy())


def test_reasons(project: Project) -> None:
    fill(project)
    new = project.add_photo(photo("red", 50), "new.png", None)
    with learning(project, recipe="paper") as learner:
        wait(learner, lambda known: new.id in known.predictions)
        reasons = learner.explain(new)
        assert reasons["shots"][0]["class"] == "red"
        assert learner.heat(new)[:2] == b"\xff\xd8"
        other = project.add_photo(photo("blue", 51), "other.png", None)
        assert wait(learner, lambda known: len(known.suggested) == 2)
        assert set(learner.known.suggested) == {new.id, other.id}


def test_a_failure_is_told_and_survived(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(project)
    with learning(project) as learner:
        wait(learner, ready)
        fail = OSError(28, "No space left on device")

        def full(*_: object, **__: object) -> None:
            raise fail

        monkeypatch.setattr(FewShotClassifier, "save", full)
        project.add_photo(photo("red", 60), "more.png", "red")
        known = wait(learner, lambda known: known.stage == "failed")
        assert "No space left" in known.problem
        monkeypatch.undo()
        project.add_photo(photo("red", 61), "more.png", "red")
        wait(learner, lambda known: len(known.shots) == 11 and ready(known))
