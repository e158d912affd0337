"""Class names on the command line, with a tiny text-and-image model: no word is mocked."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mivhead.cli.main import main
from tests.helpers.text_towers import COLOURS, picture, save_clip, save_pictures, teach


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that knows four colours, shots of three of them, and new pictures of all."""
    folder: Path = tmp_path_factory.mktemp("names")
    save_clip(folder / "clip")
    known = {name: [picture(name, 900 + i) for i in range(6)] for name in COLOURS}
    teach(folder / "clip", known)
    save_pictures(folder / "shots", {"red": 5, "green": 2, "blue": 1})
    save_pictures(folder / "new", dict.fromkeys(COLOURS, 4), first=50)
    (folder / "names.txt").write_text("yellow\n\nred\n")
    return folder


def run(capsys: pytest.CaptureFixture[str], *args: Any) -> Any:
    """Run a command that must succeed, and return its JSON."""
    capsys.readouterr()
    assert main([*map(str, args), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def model(place: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A model with classes of five, two, one and no shots."""
    how = ["--backbone", f"open_clip:{place / 'clip'}", "--template", "{}"]
    output = place / "colours.miv"
    found = run(
        capsys, "fit", place / "shots", "-o", output, *how, "--classes", place / "names.txt"
    )
    assert found["classes"] == {"blue": 1, "green": 2, "red": 5, "yellow": 0}
    assert found["names"] is True
    return output


def accuracy(capsys: pytest.CaptureFixture[str], model: Path, place: Path) -> float:
    return float(run(capsys, "evaluate", model, place / "new")["accuracy"])


def test_no_one_and_five_shots(
    model: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert accuracy(capsys, model, place) >= 0.75
    assert run(capsys, "info", model)["names"] is True
    assert main(["info", str(model)]) == 0
    assert "class names used" in capsys.readouterr().out
    rows = run(capsys, "predict", model, place / "new" / "yellow")["predictions"]
    assert sum(row["label"] == "yellow" for row in rows) >= 3


def test_the_estimate_says_which_classes_it_is_about(
    place: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    how = ["--backbone", f"open_clip:{place / 'clip'}", "--classes", str(place / "names.txt")]
    assert main(["fit", str(place / "shots"), "-o", str(tmp_path / "a.miv"), *how]) == 0
    out = capsys.readouterr().out
    assert "1 class without shots could not be tested: the estimate covers only the others" in out
    assert "The classes have 0 to 5 shots. It would help most to add shots of yellow." in out


def test_predicting_needs_no_text_tower(
    model: Path, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("the text tower was loaded")

    monkeypatch.setattr("mivhead.backbones.open_clip_models.text_tower", refuse)
    assert accuracy(capsys, model, place) >= 0.75


def test_reasons(model: Path, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(capsys, "explain", model, place / "new" / "yellow" / "50.png")
    (one,) = found["explanations"] if isinstance(found, dict) else found
    assert "class name" in {vote["member"] for vote in one["votes"]}


def test_pictures_show_the_classes_with_shots(model: Path, place: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("sklearn")
    image = str(place / "new" / "yellow" / "50.png")
    for kind in ("attention", "tsne"):
        output = tmp_path / f"{kind}.png"
        assert main(["plot", kind, str(model), image, "-o", str(output)]) == 0
        assert output.stat().st_size > 1000


def test_changes(
    model: Path, place: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    renamed = run(capsys, "rename", model, "yellow", "amber", "-o", tmp_path / "a.miv")
    assert renamed["classes"] == {"amber": 0, "blue": 1, "green": 2, "red": 5}
    removed = run(capsys, "remove", model, "yellow", "-o", tmp_path / "b.miv")
    assert removed["classes"] == {"blue": 1, "green": 2, "red": 5}
    moved = run(capsys, "relabel", model, "red/0.png", "yellow", "-o", tmp_path / "c.miv")
    assert moved["classes"] == {"blue": 1, "green": 2, "red": 4, "yellow": 1}
    added = run(capsys, "add", model, place / "new", "-o", tmp_path / "d.miv")
    assert added["classes"] == {"blue": 5, "green": 6, "red": 9, "yellow": 4}
    assert added["change"] == "added 16 shots: blue 4, green 4, red 4, yellow 4"


def test_an_exported_model(
    model: Path, place: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("onnx")
    run(capsys, "export", model, "-o", tmp_path / "colours.onnx")
    exported = accuracy(capsys, tmp_path / "colours.onnx", place)
    assert exported == accuracy(capsys, model, place)


def test_names_are_on_by_default_and_can_be_switched_off(
    place: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    start = ["fit", place / "shots", "-o", tmp_path / "a.miv", "--backbone"]
    clip = f"open_clip:{place / 'clip'}"
    assert run(capsys, *start, clip)["names"] in (True, False)
    assert run(capsys, *start, clip, "--no-names")["names"] is None
    assert main([*map(str, start), clip, "--template", "{}", "--no-check"]) == 0
    assert "names of the classes" in capsys.readouterr().out


@pytest.mark.parametrize("shots", [{}, {"red": 3}], ids=["no shots", "shots of one class"])
def test_names_alone(
    shots: dict[str, int], place: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    names, model = tmp_path / "names.txt", tmp_path / "a.miv"
    names.write_text("\n".join(COLOURS))
    how = ["--backbone", f"open_clip:{place / 'clip'}", "--template", "{}", "--classes", names]
    save_pictures(tmp_path / "shots", shots)
    given = [tmp_path / "shots"] if shots else []
    found = run(capsys, "fit", *given, "-o", model, *how)
    assert found["classes"] == dict.fromkeys(COLOURS, 0) | shots
    assert found["check"]["accuracy"] is None  # there is nothing to test on
    assert accuracy(capsys, model, place) >= 0.75
    image = place / "new" / "red" / "50.png"
    reasons = run(capsys, "explain", model, image)
    (one,) = reasons["explanations"] if isinstance(reasons, dict) else reasons
    assert [vote["member"] for vote in one["votes"]] == ["class name"]
    assert run(capsys, "info", model)["names"] is True
    assert main(["predict", str(model), str(image), "--coverage", "0.9"]) == 2
    assert "no coverage can be guaranteed" in capsys.readouterr().err
    save_pictures(tmp_path / "more", {"red": 2, "green": 2}, first=80)
    added = run(capsys, "add", model, tmp_path / "more")
    assert added["classes"] == dict.fromkeys(COLOURS, 0) | {
        "green": 2,
        "red": shots.get("red", 0) + 2,
    }
    found = run(capsys, "predict", model, place / "new")["predictions"]
    named = [row["decision"] == Path(row["file"]).parent.name for row in found]
    assert sum(named) > 11  # of 16, half of them of classes that still have no shots


def test_names_alone_for_people(
    place: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    names, model = tmp_path / "names.txt", str(tmp_path / "a.miv")
    names.write_text("\n".join(COLOURS))
    how = ["--backbone", f"open_clip:{place / 'clip'}", "--classes", str(names)]
    assert main(["fit", "-o", model, *how]) == 0
    out = capsys.readouterr().out
    assert "Names alone tell the 4 classes apart" in out
    assert "No estimate of the accuracy" in out
    image = str(place / "new" / "red" / "50.png")
    for kind in ("attention", "tsne"):
        assert main(["plot", kind, model, image, "-o", str(tmp_path / "a.png")]) == 2
        assert "by name alone" in capsys.readouterr().err
    assert main(["card", model]) == 0
    card = capsys.readouterr().out
    assert "An image classifier that knows 4 classes by name only, made by mivhead" in card
    assert "- vectors of the names of the classes" in card
    assert "features of the images" not in card


def test_what_is_known_about_the_accuracy_is_about_classes_with_shots(
    model: Path, place: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    save_pictures(tmp_path / "more", {"blue": 1}, first=80)
    for command in (["info", model], ["add", model, tmp_path / "more"]):
        assert main([*map(str, command)]) == 0
        assert re.search(r"interval .*\) for the 3 classes with shots", capsys.readouterr().out)
    assert main(["card", str(model)]) == 0
    card = capsys.readouterr().out
    assert "learned 3 classes from 9 images and knows 1 class by name only" in card
    assert "1 class without images could not be tested" in card


def test_vectors_alone(place: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from mivhead.backbones.text import class_vectors
    from mivhead.features import Features, FeatureTable

    clip, vectors = f"open_clip:{place / 'clip'}", tmp_path / "vectors.safetensors"
    rows = Features(class_vectors(clip, list(COLOURS), ["{}"]))
    FeatureTable(rows, tuple(COLOURS), tuple(COLOURS)).save(vectors)
    how = ["--backbone", clip, "--class-vectors", vectors]
    found = run(capsys, "fit", "-o", tmp_path / "a.miv", *how)
    assert found["classes"] == dict.fromkeys(sorted(COLOURS), 0)
    assert accuracy(capsys, tmp_path / "a.miv", place) >= 0.75


def test_what_says_how_to_read_shots_needs_shots(
    place: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    start = ["fit", "-o", str(tmp_path / "a.miv"), "--classes", str(place / "names.txt")]
    for option in ("--boxes", "--label", "--encoding"):
        assert main([*start, option, "x"]) == 2
        assert f"{option} is about the shots" in capsys.readouterr().err


def test_notes_are_about_classes_without_shots_too(
    place: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "names.txt").write_text("Red\nother\n")
    how = ["--backbone", f"open_clip:{place / 'clip'}", "--classes", tmp_path / "names.txt"]
    found = run(capsys, "fit", place / "shots", "-o", tmp_path / "a.miv", "--no-check", *how)
    twins, other = found["notes"]
    assert "'Red' and 'red' differ in upper and lower case only" in twins
    assert "'other' stands for everything else" in other


@pytest.mark.parametrize(
    ("options", "names", "message"),
    [
        (["--names"], None, "text-and-image backbone"),
        (["--classes", "NAMES"], "yellow\n", "text-and-image backbone"),
        (["--classes", "NAMES"], "\n \n", "holds no names"),
        (["--classes", "NAMES"], "unsure\n", "cannot be a class"),
        (["--classes", "missing.txt"], None, "does not exist"),
        (["--classes", "NAMES", "--backbone", "CLIP"], "a\na\n", "'a' is listed twice"),
        (["--classes", "NAMES", "--backbone", "CLIP", "--no-names"], "a\n", "omit --no-names"),
        (["--template", "a photo", "--backbone", "CLIP"], None, "where the name goes"),
        (["--class-vectors", "SHORT", "--backbone", "CLIP"], None, "has the shape"),
        (["--class-vectors", "SHORT", "--no-names"], None, "Names are switched off"),
        (["--class-vectors", "SHORT", "--template", "{}"], None, "omit them (--template)"),
        (["--template", "a {}", "--backbone", "CLIP", "--no-names"], None, "Templates are"),
        (["--template", "a {}"], None, "text-and-image backbone"),  # the default one is not
    ],
)
def test_bad_input(
    place: Path,
    options: list[str],
    names: str | None,
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    import numpy as np

    from mivhead.features import Features, FeatureTable

    stand_for = {
        "NAMES": str(tmp_path / "names.txt"),
        "CLIP": f"open_clip:{place / 'clip'}",
        "SHORT": str(tmp_path / "short.safetensors"),
    }
    colours = ("red", "green", "blue")
    FeatureTable(Features(np.eye(3)), colours, colours).save(tmp_path / "short.safetensors")
    (tmp_path / "names.txt").write_text(names or "")
    given = [stand_for.get(each, each) for each in options]
    assert main(["fit", str(place / "shots"), "-o", str(tmp_path / "a.miv"), *given]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "a.miv").exists()
