"""Models that learned from unlabelled images: files, changes and the command line."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import mivhead
from mivhead import FewShotClassifier
from mivhead.benchmark.config import read_config
from mivhead.benchmark.runner import Place, run
from mivhead.cli.main import main
from mivhead.datasets.bundled import write_bundled
from mivhead.errors import InputError, ModelFileError
from tests.helpers.tiny_backbone import TinyBackbone
from tests.model.test_file import change
from tests.model.test_shots import START, assert_equal, noise

POOL = [noise(i) for i in range(600, 620)]


def fit(shots: dict[int, str], unlabelled: Any = None, **params: Any) -> FewShotClassifier:
    model = FewShotClassifier(
        TinyBackbone(threshold=5), **{"recipe": mivhead.Recipe(steps=2), **params}
    )
    return model.fit([noise(i) for i in shots], list(shots.values()), unlabelled=unlabelled)


def test_the_file_predicts_without_the_unlabelled_images(tmp_path: Path) -> None:
    model = fit(START, POOL)
    model.save(tmp_path / "m.miv")
    loaded = mivhead.load(tmp_path / "m.miv", backbone=TinyBackbone(threshold=5))
    assert loaded.classifier_.unlabelled_ == model.classifier_.unlabelled_
    assert_equal(loaded, model)
    plain = fit(START)
    plain.save(tmp_path / "plain.miv")
    sizes = [(tmp_path / name).stat().st_size for name in ("m.miv", "plain.miv")]
    assert sizes[0] - sizes[1] < 200  # only a note


def test_the_order_of_the_unlabelled_images_does_not_matter() -> None:
    assert_equal(fit(START, POOL[::-1]), fit(START, POOL))


def test_features_instead_of_images() -> None:
    features = TinyBackbone().extract(POOL)
    table = FewShotClassifier(TinyBackbone(threshold=5)).extract(POOL)
    assert_equal(fit(START, features), fit(START, POOL))
    assert_equal(fit(START, table), fit(START, POOL))


def test_a_change_forgets_the_unlabelled_images_and_says_so() -> None:
    model = fit(START, POOL)
    if not model.classifier_.unlabelled_.used:
        pytest.fail("the example must use its unlabelled images")
    (note,) = model.add([noise(7)], ["green"]).notes
    assert "learned from 20 unlabelled images" in note
    assert_equal(model, fit({**START, 7: "green"}))
    assert model.classifier_.unlabelled_ is None
    assert not model.remove("blue").notes  # it said so already


def test_a_change_with_unlabelled_images_equals_a_fit_with_them() -> None:
    model = fit(START)
    assert not model.add([noise(7)], ["green"], unlabelled=POOL).notes
    assert_equal(model, fit({**START, 7: "green"}, POOL))
    model.rename("green", "lime", unlabelled=POOL)
    model.relabel("image 1", "lime", unlabelled=POOL)
    model.remove("blue", unlabelled=POOL)
    renamed = {0: "red", 1: "lime", 2: "red", 3: "lime", 4: "lime", 7: "lime"}
    assert_equal(model, fit(renamed, POOL))


def test_of_many_images_a_sample_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mivhead.model.fitting.LIMIT", 6)
    model = fit(START, POOL)
    assert model.classifier_.unlabelled_.images == 6
    assert_equal(fit(START, POOL), model)


def test_only_methods_that_can_take_unlabelled_images() -> None:
    with pytest.raises(InputError, match="ncc cannot learn from unlabelled images"):
        fit(START, POOL, method="ncc", recipe=None)


def test_an_empty_folder_is_an_error_before_anything_is_read(tmp_path: Path) -> None:
    backbone = TinyBackbone()
    with pytest.raises(InputError, match="no images"):
        FewShotClassifier(backbone).fit([noise(0), noise(1)], ["a", "b"], unlabelled=tmp_path)
    assert backbone.seen == 0


def test_unreadable_images_are_skipped_on_request(tmp_path: Path) -> None:
    from tests.helpers.patterns import write_images

    shots = write_images(tmp_path / "shots")
    (tmp_path / "pool").mkdir()
    Image.fromarray(noise(1)).save(tmp_path / "pool" / "good.png")
    (tmp_path / "pool" / "bad.png").write_bytes(b"not an image")
    (shots / "rings" / "worse.png").write_bytes(b"not an image either")
    model = FewShotClassifier(TinyBackbone(), recipe=mivhead.Recipe(steps=2))
    model.fit_folder(shots, skip_bad=True, unlabelled=tmp_path / "pool")
    assert [Path(each.id).name for each in model.skipped_] == ["worse.png", "bad.png"]
    assert model.classifier_.unlabelled_.images == 1
    more = [noise(7), shots / "rings" / "worse.png"]
    model.add(more, ["new", "new"], skip_bad=True, unlabelled=tmp_path / "pool")
    assert [Path(each.id).name for each in model.skipped_] == ["worse.png", "bad.png"]


FORGED = {
    "not a number": ({"images": "60", "used": True}, "unlabelled.v1.images"),
    "no images": ({"images": 0, "used": True}, "does not fit"),
    "unknown key": ({"images": 6, "used": True, "x": 1}, "unknown key 'x'"),
}


@pytest.mark.parametrize("forged", FORGED)
def test_a_forged_section_is_refused(forged: str, tmp_path: Path) -> None:
    value, message = FORGED[forged]
    path = tmp_path / "m.miv"
    fit(START, POOL).save(path)
    change(path, meta={"unlabelled.v1": value})
    with pytest.raises(ModelFileError, match=message):
        mivhead.load(path)


def test_the_benchmark_gives_unlabelled_images_to_the_method_that_uses_them(
    tmp_path: Path,
) -> None:
    write_bundled(tmp_path / "data")
    protocol = "3-way 1-shot, unlabelled 12"
    config = read_config(
        {
            "sets": ["digits"],
            "protocols": [protocol],
            "tasks": 3,
            "views": 0,
            "backbones": ["tiny"],
            "methods": ["miv", "miv+unlabelled"],
        }
    )
    place = Place(tmp_path / "run", tmp_path / "data", tmp_path / "cache")
    results = run(config, place, backbones={"tiny": TinyBackbone()})
    assert [r.error for r in results] == [None] * 6
    assert {r.protocol for r in results} == {protocol}
    by_method = {
        name: [(r.accuracy, r.calibration) for r in results if r.method == name]
        for name in ("miv", "miv+unlabelled")
    }
    assert by_method["miv"] != by_method["miv+unlabelled"]
    with pytest.raises(InputError, match="have none: use one such as"):
        replace(config, protocols=("3-way 1-shot",))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    from tests.helpers.patterns import write_images

    folder = tmp_path_factory.mktemp("unlabelled")
    shots = write_images(folder / "shots")
    return shots, write_images(folder / "pool", numbers=(5, 6, 7, 8))


def miv(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    capsys.readouterr()
    assert main([str(each) for each in arguments]) == 0
    return capsys.readouterr().out


def test_on_the_command_line(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shots, pool = folders
    model = tmp_path / "m.miv"
    fit_ = ("fit", shots, "-o", model, "--no-augmentation", "--no-check")
    said = miv(capsys, *fit_[:-1], "--unlabelled", pool)
    assert "Learned from 12 unlabelled images, too." in said
    assert said.endswith("The estimate is that of a model without the unlabelled images.\n")
    document = json.loads(miv(capsys, *fit_, "--unlabelled", pool, "--json"))
    assert document["unlabelled"] == {"images": 12, "used": True}
    assert "12 images" in miv(capsys, "info", model)
    features = tmp_path / "pool.safetensors"
    miv(capsys, "extract", pool, "-o", features, "--threshold", "0")
    before = np.asarray(mivhead.load(model).predict_proba(pool))
    miv(capsys, *fit_, "--unlabelled", features)
    np.testing.assert_array_equal(mivhead.load(model).predict_proba(pool), before)
    miv(capsys, "rename", model, "rings", "circles", "--unlabelled", pool)
    assert mivhead.load(model).classifier_.unlabelled_.images == 12


def test_an_empty_folder_on_the_command_line(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    arguments = ["fit", str(folders[0]), "-o", str(tmp_path / "m.miv")]
    assert main([*arguments, "--unlabelled", str(tmp_path / "empty")]) == 2
    assert "no images" in capsys.readouterr().err
    assert not (tmp_path / "m.miv").exists()
