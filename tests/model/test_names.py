"""Models that use the names of their classes: files, changes, reasons and exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import mivhead
from mivhead import BlockPreset, Features, FewShotClassifier, Preprocessing, Preset
from mivhead.backbones.base import Identity
from mivhead.errors import InputError, ModelFileError, NotAvailableError
from tests.model.test_file import change, document_of

COLOURS = {"red": (200, 40, 40), "green": (40, 180, 60), "blue": (40, 60, 200)}


class Tower:
    """A backbone of one's own that embeds colours: the mean colour, and what a name stands for."""

    identity = Identity("tower", "0" * 64, Preprocessing(32), ("embedding",))
    preset = Preset(("embedding",), (BlockPreset(form="vit"),), Preprocessing(32))

    def extract(self, images: Any) -> Features:
        return Features(np.stack([np.asarray(x).mean((0, 1)) - 110 for x in images]).astype("f4"))

    def embed_texts(self, sentences: list[str]) -> Any:
        rows = [next((c for n, c in COLOURS.items() if n in s), (1, 2, 3)) for s in sentences]
        return np.array(rows, np.float32) - 110


def picture(name: str, seed: int) -> Any:
    noise = np.random.default_rng(seed).normal(0, 25, (40, 40, 3))
    return np.clip(np.array(COLOURS[name]) + noise, 0, 255).astype(np.uint8)


LABELS = [name for name in COLOURS for _ in range(2)]
IMAGES = [picture(name, seed) for seed, name in enumerate(LABELS)]
NEW = [picture(name, 20 + i) for name in COLOURS for i in range(4)]


def fit(labels: list[str] = LABELS, backbone: Any = None, **settings: Any) -> FewShotClassifier:
    settings = {"threshold": 0, "verbose": False, **settings}
    return FewShotClassifier(backbone or Tower(), **settings).fit(IMAGES[: len(labels)], labels)


def test_names_are_used_where_they_help() -> None:
    model = fit()
    assert model.names_used
    assert model.templates_
    assert model.predict(NEW).tolist() == [name for name in COLOURS for _ in range(4)]
    assert model.check().score.images == 6
    assert any("name" in vote.member for vote in model.explain(NEW[0]).votes)


def test_names_that_the_tower_does_not_know_do_no_harm() -> None:
    translate = {"red": "赤", "green": "๛", "blue": "🜂"}
    named, plain = fit([translate[name] for name in LABELS]), fit(names=False)
    assert named.names_used is False  # all get the same vector
    expected = [translate[name] for name in plain.predict(NEW).tolist()]
    assert named.predict(NEW).tolist() == expected


def test_a_file_keeps_the_vectors_and_needs_no_tower(tmp_path: Path) -> None:
    model = fit()
    model.save(tmp_path / "m.miv")
    loaded = mivhead.load(tmp_path / "m.miv", backbone=Tower())
    np.testing.assert_array_equal(loaded.predict_proba(NEW), model.predict_proba(NEW))
    model.export(tmp_path / "m.onnx", input="features")
    exported = mivhead.load(tmp_path / "m.onnx")
    table = model.extract(NEW)
    np.testing.assert_allclose(exported.predict_proba(table), model.predict_proba(table), atol=1e-4)


def test_changes_equal_a_fit_from_scratch(tmp_path: Path) -> None:
    """Only the names of new classes are embedded."""
    model = fit(LABELS[:5])
    model.rename("green", "a green thing")
    model.add([IMAGES[5]], ["blue"])
    model.save(tmp_path / "m.miv")
    model = mivhead.load(tmp_path / "m.miv", backbone=Tower())
    model.remove("image 0")
    labels = [{"green": "a green thing"}.get(name, name) for name in LABELS]
    expected = FewShotClassifier(Tower(), threshold=0).fit(IMAGES[1:], labels[1:])
    np.testing.assert_array_equal(model.predict_proba(NEW), expected.predict_proba(NEW))


FORGED: dict[str, Any] = {
    "unknown key": {"meta": {"names": {"weight": 1.0, "used": True, "code": "x"}}},
    "no object": {"meta": {"names": [1]}},
    "templates": {"meta": {"templates": [1]}},
    "too few": {"tensors": {"names.centres": np.zeros(2, np.float32)}},
    "no cosines": {"tensors": {"names.centres": np.full(3, 9, np.float32)}},
    "NaN": {"tensors": {"names.vectors": np.full((3, 3), np.nan, np.float32)}},
    "more": {"tensors": {"names.more": np.ones(1, np.float32)}},
    "no vectors": {"without": ["names.vectors", "names.centres"]},
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_names_are_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "m.miv"
    fit().save(path)
    assert document_of(path)["names"]["used"]
    assert load_file(path)["names.vectors"].shape == (3, 3)
    change(path, **FORGED[name])
    with pytest.raises(ModelFileError):
        mivhead.load(path)


@pytest.mark.parametrize(
    ("settings", "word"),
    [({"templates": ["a photo"]}, "sentences"), ({"recipe": "paper", "names": True}, "recipe")],
)
def test_bad_input(settings: Any, word: str) -> None:
    with pytest.raises(InputError, match=word):
        fit(**settings)


def test_names_need_a_text_tower() -> None:
    with pytest.raises(InputError, match="text-and-image"):
        fit(backbone="efficientnet_lite0", names=True)
    assert fit(backbone="efficientnet_lite0").names_used is None


def test_a_tower_that_cannot_be_loaded_is_left_out_unless_it_is_asked_for() -> None:
    class Missing(Tower):
        def embed_texts(self, sentences: list[str]) -> Any:
            raise NotAvailableError(f"{len(sentences)} sentences, and no tokenizer.")

    assert fit(backbone=Missing()).names_used is None
    with pytest.raises(NotAvailableError, match="no tokenizer"):
        fit(backbone=Missing(), names=True)
