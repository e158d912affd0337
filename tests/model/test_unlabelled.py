"""Models that learned from unlabelled images: files, changes and the command line."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import mivhead
from mivhead import FewShotClassifier
from mivhead.cli.main import main
from mivhead.errors import InputError
from tests.helpers.tiny_backbone import TinyBackbone
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


def test_of_many_images_a_sample_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mivhead.model.model.LIMIT", 6)
    model = fit(START, POOL)
    assert model.classifier_.unlabelled_.images == 6
    assert_equal(fit(START, POOL), model)


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
    model.fit(shots, skip_bad=True, unlabelled=tmp_path / "pool")
    assert [Path(each.id).name for each in model.skipped_] == ["worse.png", "bad.png"]
    assert model.classifier_.unlabelled_.images == 1


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
    fit_ = ("fit", shots, "-o", model, "--no-check")
    said = miv(capsys, *fit_[:-1], "--unlabelled", pool)
    assert "Learned from 12 unlabelled images, too" in said
    assert "the estimate is without them" in said
    document = json.loads(miv(capsys, *fit_, "--unlabelled", pool, "--json"))
    assert document["unlabelled"] == {"images": 12, "used": True}
    assert "12 images" in miv(capsys, "info", model)
    features = tmp_path / "pool.safetensors"
    miv(capsys, "extract", pool, "-o", features, "--no-labels")
    before = np.asarray(mivhead.load(model).predict_proba(pool))
    miv(capsys, *fit_, "--unlabelled", features)
    np.testing.assert_array_equal(mivhead.load(model).predict_proba(pool), before)


def test_an_empty_folder_on_the_command_line(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    arguments = ["fit", str(folders[0]), "-o", str(tmp_path / "m.miv")]
    assert main([*arguments, "--unlabelled", str(tmp_path / "empty")]) == 2
    assert "no images" in capsys.readouterr().err
    assert not (tmp_path / "m.miv").exists()
