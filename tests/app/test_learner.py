"""What the app learns from a project, in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import mivhead
from mivhead import FewShotClassifier
from mivhead.app.learner import Learner, LearnerState
from mivhead.app.project import MODEL, Photo, Project
from tests.conftest import COLOURS
from tests.helpers.services import toy
from tests.service.conftest import photo


@contextmanager
def learning(project: Project, **options: Any) -> Iterator[Learner]:
    options = options or {"recipe": "experts"}  # fast
    model = FewShotClassifier(toy(), threshold=0, verbose=False, **options)
    learner = Learner(project, model, debounce=0.05)
    learner.start()
    try:
        yield learner
    finally:
        learner.stop()
        learner._thread.join()


def wait(learner: Learner, test: Callable[[LearnerState], object]) -> LearnerState:
    tick = threading.Event()
    for _ in range(3000):
        state = learner.state
        if test(state):
            return state
        tick.wait(0.02)
    raise AssertionError(learner.state)


def fill(project: Project, count: int = 3) -> None:
    for name in COLOURS:
        project.add_class(name)
        for i in range(count):
            project.add_photo(photo(name, i), f"{i}.png", name)


def class_of(state: LearnerState, photo: Photo) -> str | None:
    return next((label for shot, label in state.shots if shot.id == photo.id), None)


def ready(state: LearnerState) -> bool:
    return state.stage == "ready" and state.estimate is not None


def test_it_learns_names_and_estimates(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("save", "check"):
        original = getattr(FewShotClassifier, name)

        def counted(*given: Any, _name: str = name, _original: Any = original, **more: Any) -> Any:
            calls.append(_name)
            return _original(*given, **more)

        monkeypatch.setattr(FewShotClassifier, name, counted)
    fill(project)
    new = project.add_photo(photo("red", 50), "new.png", None)
    with learning(project) as learner:
        state = wait(learner, lambda state: ready(state) and new.id in state.predictions)
        assert sorted(calls) == ["check", "save"]  # once each
        assert state.predictions[new.id].label == "red"
        assert state.estimate is not None
        assert state.estimate["tested"] == 9
        assert state.estimate["classes"]["red"][0] == 3
        saved = mivhead.load(project.folder / MODEL, backbone=toy())
        assert saved.classes_.tolist() == sorted(COLOURS)
        assert "red/0.png" in saved.shots_.names
        assert saved.estimate_.accuracy == state.estimate["accuracy"]
        project.add_photo(photo("red", 51), "another.png", None)  # needs no new model
        wait(learner, lambda state: ready(state) and len(state.predictions) == 2)
        assert len(calls) == 2


def test_a_correction_is_learned_and_undone(project: Project) -> None:
    fill(project)
    with learning(project) as learner:
        new = project.add_photo(photo("red", 50), "new.png", None)
        wait(learner, ready)
        project.move([new.id], "blue")
        state = wait(learner, lambda state: class_of(state, new) == "blue" and ready(state))
        assert new.id not in state.predictions
        wait(learner, lambda state: any(s["id"] == new.id for s in state.estimate["suspects"]))
        project.undo()
        wait(learner, lambda state: not class_of(state, new) and new.id in state.predictions)


def test_an_unreadable_file_does_not_stop_the_others(project: Project) -> None:
    fill(project)
    (project.folder / "red/bad.jpg").write_text("not a photo")
    project.rescan()
    with learning(project) as learner:
        assert len(wait(learner, ready).shots) == 9
        bad = next(p for p in project.snapshot.classes["red"] if p.name == "bad.jpg")
        assert project.problems[bad.id]


def test_too_few_classes_forget_the_model(project: Project) -> None:
    fill(project)
    with learning(project) as learner:
        wait(learner, ready)
        for name in ("red", "green"):
            project.remove_class(name)
        wait(learner, lambda state: state.model is None and state.stage == "waiting")
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
        state = wait(learner, lambda state: len(state.shots) == 10 and state.problem)
        assert "another program" in state.problem
    kept = project.folder / "model (from elsewhere).miv"
    assert kept.read_bytes() == b"of another program"
    mivhead.load(project.folder / MODEL, backbone=toy())


def test_reasons(project: Project) -> None:
    fill(project)
    new = project.add_photo(photo("red", 50), "new.png", None)
    with learning(project, recipe="mivhead") as learner:
        wait(learner, lambda state: new.id in state.predictions)
        explained = learner.explain(new)
        assert explained["shots"][0]["class"] == "red"
        assert "red" in explained["reason"]
        assert learner.heat(new)[:2] == b"\xff\xd8"


def test_a_failure_is_told_and_survived(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(project)
    with learning(project) as learner:
        wait(learner, ready)

        def full(*_: object, **__: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(FewShotClassifier, "save", full)
        project.add_photo(photo("red", 60), "more.png", "red")
        state = wait(learner, lambda state: state.stage == "failed")
        assert "No space left" in state.problem
        monkeypatch.undo()
        project.add_photo(photo("red", 61), "more.png", "red")
        wait(learner, lambda state: len(state.shots) == 11 and ready(state))
