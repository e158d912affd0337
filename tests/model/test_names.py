"""Models that know their classes by name: files, changes, decisions, reasons and exports."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mivhead
from mivhead import FewShotClassifier
from mivhead._util import files
from mivhead.backbones.base import Identity
from mivhead.backbones.preset import BlockPreset, Preprocessing, Preset
from mivhead.backbones.text import class_vectors
from mivhead.ensemble.names import names_of
from mivhead.errors import InputError, ModelFileError, NotAvailableError
from mivhead.features import Features, FeatureTable
from mivhead.model.decision import NONE
from tests.helpers.text_towers import COLOURS, picture

NAMES, WIDTH = ["ant", "bee", "cat", "dog", "elk"], 16
RNG = np.random.default_rng(0)
MEANS = RNG.normal(size=(5, WIDTH))
VECTORS = dict(zip(NAMES, MEANS + 0.3 * RNG.normal(size=MEANS.shape), strict=True))
SHOTS = [0, 1, 3, 2, 0]


def draw(counts: list[int], seed: int = 1) -> FeatureTable:
    labels = np.repeat(np.arange(5), counts)
    noise = 0.5 * np.random.default_rng(seed).normal(size=(len(labels), WIDTH))
    X = Features((MEANS[labels] + noise).astype(np.float32))
    return FeatureTable(
        X, tuple(f"{seed}-{i}" for i in range(len(X))), tuple(NAMES[i] for i in labels)
    )


def fitted(**how: Any) -> FewShotClassifier:
    model = FewShotClassifier(None, verbose=False)
    return model.fit_table(draw(SHOTS), class_vectors=VECTORS, **how)


@pytest.fixture(scope="module")
def model() -> FewShotClassifier:
    return fitted()


NEW = draw([6] * 5, seed=2)


def test_a_table_is_fitted_as_by_fit_table(model: FewShotClassifier) -> None:
    again = FewShotClassifier(None, verbose=False).fit(draw(SHOTS), class_vectors=VECTORS)
    assert again.classes_.tolist() == NAMES
    assert np.array_equal(again.predict_proba(NEW), model.predict_proba(NEW))
    with pytest.raises(InputError, match="text-and-image backbone"):
        FewShotClassifier(None, verbose=False).fit(draw(SHOTS), classes=["ant"])


@pytest.mark.parametrize("counts", [[3] * 5, [1] * 5])
def test_with_shots_of_every_class_nothing_stands_for_others(counts: list[int]) -> None:
    model = FewShotClassifier(None, verbose=False)
    rule = model.fit_table(draw(counts), class_vectors=VECTORS).classifier_.decision_
    assert model.names_used
    assert "lift" not in rule.state()[0]  # which earlier versions do not read


def test_classes_with_and_without_shots(model: FewShotClassifier) -> None:
    assert model.classes_.tolist() == NAMES
    assert model.shot_counts == dict(zip(NAMES, SHOTS, strict=True))
    assert model.names_used
    assert (model.predict(NEW) == np.array(NEW.labels)).mean() > 0.9


def test_a_file_keeps_the_vectors_and_needs_no_tower(
    model: FewShotClassifier, tmp_path: Path
) -> None:
    model.save(tmp_path / "a.miv")
    loaded = mivhead.load(tmp_path / "a.miv")
    np.testing.assert_array_equal(loaded.predict_proba(NEW), model.predict_proba(NEW))
    assert [p.decision for p in loaded.classify(NEW)] == [p.decision for p in model.classify(NEW)]
    assert loaded.shot_counts == model.shot_counts
    assert loaded.shots_ is not None
    assert loaded.shots_.unseen == ("ant", "elk")


def damaged(path: Path, document: Any = None, tensors: Any = None) -> Path:
    """Write a copy of a model file in which something is changed."""
    arrays, meta = files.read(path)
    (document or (lambda _: None))(meta)
    (tensors or (lambda _: None))(arrays)
    out = path.with_name("damaged.miv")
    files.write(out, arrays, meta)
    return out


def without_names(tensors: Any) -> None:
    del tensors["names.vectors"], tensors["names.centres"]


@pytest.mark.parametrize(
    ("document", "tensors", "message"),
    [
        (
            lambda d: d.pop("names.v1"),
            lambda t: [t.pop(f"names.{each}") for each in ("vectors", "centres")],
            "neither shots nor a name",
        ),
        (lambda d: d["names.v1"].update(used=False), None, "neither shots nor a name"),
        (lambda d: d["names.v1"].update(code="x"), None, "unknown key 'code'"),
        (lambda d: d["names.v1"].update(scale="x"), None, "names.v1.scale"),
        (lambda d: d["names.v1"].update(templates=[1]), None, "templates"),
        (lambda d: d.update({"names.v1": [1]}), None, "names.v1"),
        (None, lambda t: t.update({"names.vectors": t["names.vectors"][:3]}), "do not fit"),
        (None, lambda t: t.update({"names.vectors": 2 * t["names.vectors"]}), "of length 1"),
        (None, lambda t: t.update({"names.centres": 9 + t["names.centres"]}), "and cosines"),
        (None, lambda t: t.update({"names.more": np.ones(1)}), "do not fit"),
        (None, lambda t: t.update({"names.vectors": t["names.vectors"] * np.nan}), "NaN|length"),
        (lambda d: d.update({"names.v2": {}}), None, "newer version"),
    ],
)
def test_damaged_files(
    model: FewShotClassifier, tmp_path: Path, document: Any, tensors: Any, message: str
) -> None:
    model.save(tmp_path / "a.miv")
    with pytest.raises(ModelFileError, match=message):
        mivhead.load(damaged(tmp_path / "a.miv", document, tensors))


def test_decisions_accept_a_class_without_shots() -> None:
    table, new = draw([0, 5, 5, 5, 0], seed=4), draw([20] * 5, seed=5)
    model = FewShotClassifier(None).fit_table(table, class_vectors=VECTORS)
    accepted = np.array([each.decision != NONE for each in model.classify(new)])
    unseen = np.isin(new.labels, ["ant", "elk"])
    assert accepted[~unseen].mean() > 0.7
    assert accepted[unseen].mean() > 0.6
    other = 2 * np.random.default_rng(5).normal(size=(40, WIDTH))
    found = model.classify(Features(other.astype(np.float32)))
    assert np.mean([each.decision == NONE for each in found]) > 0.7


def test_reasons_add_up_and_show_the_name(model: FewShotClassifier) -> None:
    for found in model.explain(NEW):  # type: ignore[union-attr]
        p = found.prediction.probabilities
        odds = np.log(p[found.prediction.label] / p[found.runner_up])
        votes = {vote.member: vote.separates for vote in found.votes}
        assert sum(votes.values()) == pytest.approx(odds, abs=1e-4)  # type: ignore[arg-type]
        assert "class name" in votes
    ant = model.explain(NEW)[0]  # type: ignore[index]
    assert ant.prediction.label == "ant"
    assert "class name" in ant.words.lower()


def test_an_export_gives_the_same(model: FewShotClassifier, tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    from mivhead.export.model import export_model

    export_model(model, tmp_path / "a.onnx")
    exported = mivhead.load(tmp_path / "a.onnx")
    np.testing.assert_allclose(exported.predict_proba(NEW), model.predict_proba(NEW), atol=1e-5)
    assert [p.decision for p in exported.classify(NEW)] == [p.decision for p in model.classify(NEW)]


def same(one: FewShotClassifier, other: FewShotClassifier) -> None:
    np.testing.assert_array_equal(one.classes_, other.classes_)
    np.testing.assert_array_equal(one.predict_proba(NEW), other.predict_proba(NEW))


def test_shots_of_a_class_without_give_the_same_as_a_fit() -> None:
    model, more = fitted(), draw([2, 0, 0, 0, 0], seed=7)
    assert model.add(more).text == "added 2 shots: ant 2"
    both = FeatureTable(
        Features.concat([draw(SHOTS).features, more.features]),
        (*draw(SHOTS).ids, *more.ids),
        (*draw(SHOTS).labels, *more.labels),  # type: ignore[misc]
    )
    same(model, FewShotClassifier(None).fit_table(both, class_vectors=VECTORS))


@pytest.mark.parametrize("counts", [[0] * 5, [0, 0, 3, 0, 0], [0, 1, 0, 0, 0]])
def test_names_alone(counts: list[int], tmp_path: Path) -> None:
    few = FewShotClassifier(None, verbose=False).fit_table(draw(counts), class_vectors=VECTORS)
    assert few.shot_counts == dict(zip(NAMES, counts, strict=True))
    assert (few.predict(NEW) == np.array(NEW.labels)).mean() > 0.9
    decisions = [each.decision for each in few.classify(NEW)]
    assert NONE not in decisions
    few.save(tmp_path / "a.miv")
    loaded = mivhead.load(tmp_path / "a.miv")
    same(loaded, few)
    assert [each.decision for each in loaded.classify(NEW)] == decisions
    assert few.check().score.images == 0
    assert few.estimate_ is not None
    assert few.estimate_.accuracy is None
    assert [vote.member for vote in few.explain(NEW)[0].votes] == ["class name"]  # type: ignore[index]
    # As soon as two classes have shots, the model is that of a fit from scratch.
    more = draw([2, 0, 0, 2, 0], seed=7)
    loaded.add(more)
    first = draw(counts)
    both = FeatureTable(
        Features.concat([first.features, more.features]),
        (*first.ids, *more.ids),
        (*first.labels, *more.labels),  # type: ignore[misc]
    )
    same(loaded, FewShotClassifier(None).fit_table(both, class_vectors=VECTORS))


def test_names_alone_are_exported(tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    few = FewShotClassifier(None, verbose=False)
    few.fit_table(draw([0, 0, 3, 0, 0]), class_vectors=VECTORS)
    few.export(tmp_path / "a.onnx")
    exported = mivhead.load(tmp_path / "a.onnx")
    np.testing.assert_allclose(exported.predict_proba(NEW), few.predict_proba(NEW), atol=1e-5)
    assert [p.decision for p in exported.classify(NEW)] == [p.decision for p in few.classify(NEW)]


def test_names_alone_change_like_others() -> None:
    few = FewShotClassifier(None, verbose=False)
    few.fit_table(draw([0, 1, 0, 0, 0]), class_vectors=VECTORS)
    few.rename("ant", "ape")
    few.remove("bee")
    assert few.shot_counts == {"ape": 0, "cat": 0, "dog": 0, "elk": 0}
    with pytest.raises(InputError, match="would have 1 class"):
        few.remove("ape", "cat", "dog")


def test_a_file_with_shots_of_one_class_needs_names(tmp_path: Path) -> None:
    few = FewShotClassifier(None, verbose=False)
    few.fit_table(draw([0, 0, 3, 0, 0]), class_vectors=VECTORS).save(tmp_path / "a.miv")
    path = damaged(tmp_path / "a.miv", lambda d: d.pop("names.v1"), without_names)
    with pytest.raises(ModelFileError, match="neither shots nor a name"):
        mivhead.load(path)


def test_a_new_class_needs_a_vector() -> None:
    model, more = fitted(), draw([2, 0, 0, 0, 0], seed=7)
    labels = ["fox", "fox"]
    with pytest.raises(InputError, match="none for 'fox': give one when you add it"):
        model.add(more, labels)
    assert model.classes_.tolist() == NAMES
    model.add(more, labels, class_vectors={"fox": MEANS[0]})
    assert model.shot_counts["fox"] == 2  # type: ignore[index]


def test_vectors_of_a_table_suit_classes_that_are_numbers() -> None:
    vectors = dict(enumerate(VECTORS.values()))
    shots = draw(SHOTS)
    labels = [NAMES.index(name) for name in shots.labels or ()]
    model = FewShotClassifier(None, verbose=False).fit_table(shots, labels, class_vectors=vectors)
    given = FeatureTable(Features(MEANS[:1].astype(np.float32)), ("7",), ("7",))
    model.add(draw([1, 0, 0, 0, 0], seed=7), [7], class_vectors=given)
    assert model.classes_.tolist() == [0, 1, 2, 3, 4, 7]


def test_shots_of_one_numbered_class_cannot_be_tested() -> None:
    vectors = dict(zip((9, 10), [*VECTORS.values()][:2], strict=True))  # as strings, 10 comes first
    few = FewShotClassifier(None, verbose=False)
    few.fit_table(draw([2, 0, 0, 0, 0]), [9, 9], class_vectors=vectors)
    assert np.isnan(few.check().accuracy)
    assert few.estimate_ is not None
    assert few.estimate_.per_class == (None, None)


def test_a_class_stays_without_its_shots(tmp_path: Path) -> None:
    model, expected = fitted(), fitted()
    unseen = NAMES[SHOTS.index(0)]
    label = [unseen] * 2
    model.add(draw([0, 0, 0, 0, 2], seed=7), label)
    added = [name for name in model.shots_.names if name not in expected.shots_.names]
    model.remove(*added)
    assert model.shot_counts == expected.shot_counts
    same(model, expected)
    model.save(tmp_path / "m.miv")
    same(mivhead.load(tmp_path / "m.miv"), expected)


def test_removing_and_moving() -> None:
    model = fitted()
    model.remove("elk")
    assert model.classes_.tolist() == NAMES[:4]
    model.remove("ant", "bee")
    assert model.shot_counts == {"cat": 3, "dog": 2}
    with pytest.raises(InputError, match="would have 1 class"):
        model.remove("dog")
    model = fitted()
    assert model.shots_ is not None
    cat = next(
        n for n, c in zip(model.shots_.names, model.shots_.labels, strict=True) if c == "cat"
    )
    model.relabel(cat, "elk")  # a class without shots is no new class
    assert model.shot_counts == {"ant": 0, "bee": 1, "cat": 2, "dog": 2, "elk": 1}


def test_renaming_keeps_the_vector_if_there_is_no_tower() -> None:
    model = fitted()
    before = model.predict_proba(NEW)
    change = model.rename("ant", "formica")
    assert change.notes == ("formica keeps the vector of the name ant.",)
    after = dict(zip(model.classes_.tolist(), model.predict_proba(NEW).T, strict=True))
    np.testing.assert_allclose(after["formica"], before[:, 0], rtol=1e-5)
    with pytest.raises(InputError, match="The class 'elk' already exists"):
        model.rename("formica", "elk")
    model.rename("bee", "elk", merge=True)
    assert model.shot_counts == {"cat": 3, "dog": 2, "elk": 1, "formica": 0}


def test_vectors_of_a_store(tmp_path: Path) -> None:
    rows = np.stack(list(VECTORS.values())).astype(np.float32)
    table = FeatureTable(Features(rows), tuple(NAMES), tuple(NAMES))
    table.save(tmp_path / "names.safetensors")
    with mivhead.stores.open(tmp_path / "names.safetensors") as store:
        from_file = FewShotClassifier(None).fit_table(draw(SHOTS), class_vectors=store.read())
    given = {name: row.astype(np.float32) for name, row in VECTORS.items()}
    same(from_file, FewShotClassifier(None).fit_table(draw(SHOTS), class_vectors=given))


def test_vectors_of_a_database(tmp_path: Path) -> None:
    pytest.importorskip("lancedb")
    rows = np.stack(list(VECTORS.values())).astype(np.float32)
    table = FeatureTable(Features(rows), tuple(NAMES), tuple(NAMES))
    with mivhead.stores.open(f"lancedb://{tmp_path}/names") as store:
        store.write(table)
        found = store.read()
    model = FewShotClassifier(None).fit_table(draw(SHOTS), class_vectors=found)
    assert model.shot_counts == dict(zip(NAMES, SHOTS, strict=True))


def test_cross_validation_uses_the_names(model: FewShotClassifier) -> None:
    estimate = model.check()
    assert estimate.classes.tolist() == ["bee", "cat", "dog"]
    assert estimate.score.images == 5


class Tower:
    """A backbone of one's own that embeds colours: the mean colour, and what a name stands for."""

    identity = Identity("tower", "0" * 64, Preprocessing(32), ("embedding",))
    preset = Preset(("embedding",), (BlockPreset(form="vit"),), Preprocessing(32))

    def extract(self, images: Any) -> Features:
        return Features(np.stack([np.asarray(x).mean((0, 1)) - 110 for x in images]).astype("f4"))

    def embed_texts(self, sentences: list[str]) -> Any:
        rows = [next((c for n, c in COLOURS.items() if n in s), (1, 2, 3)) for s in sentences]
        return np.array(rows, np.float32) - 110


IMAGES = [picture(name, i) for name in ("red", "green", "blue") for i in range(2)]
LABELS = ["red", "red", "green", "green", "blue", "blue"]


def test_a_backbone_of_ones_own_may_embed_texts() -> None:
    model = FewShotClassifier(Tower(), threshold=0, verbose=False)
    model.fit(IMAGES, LABELS, classes=["yellow", "red"])
    assert model.names_used
    assert model.templates_
    assert model.predict([picture("yellow", 9)]).tolist() == ["yellow"]
    model.rename("yellow", "a yellow thing")
    assert model.predict([picture("yellow", 9)]).tolist() == ["a yellow thing"]
    model.add([picture("yellow", 3)], ["a yellow thing"])
    names = names_of(model.classifier_)
    assert names is not None
    assert len(names.seen) == 4


def test_names_that_the_tower_does_not_know_do_no_harm() -> None:
    translate = {"red": "赤", "green": "๛", "blue": "🜂"}
    new = [picture(name, 20 + i) for name in translate for i in range(4)]
    plain = FewShotClassifier(Tower(), threshold=0, names=False).fit(IMAGES, LABELS)
    named = FewShotClassifier(Tower(), threshold=0).fit(IMAGES, [translate[n] for n in LABELS])
    assert named.names_used is False  # all get the same vector
    expected = [translate[name] for name in plain.predict(new).tolist()]
    assert named.predict(new).tolist() == expected


@pytest.mark.parametrize(
    ("settings", "how", "message"),
    [
        ({"names": False}, {"classes": ["yellow"]}, "its name is all that is known"),
        ({}, {"classes": ["yellow", "yellow"]}, "'yellow' is listed twice"),
        ({"templates": ["a photo"]}, {}, "does not say where the name goes"),
        ({"method": "ncc"}, {"classes": ["yellow"]}, "text-and-image backbone"),
        ({"recipe": "paper", "names": True}, {}, "default recipe"),
        ({}, {"class_vectors": {"red": [1.0, 2.0, 3.0]}}, "no vector for the class 'blue'"),
        ({}, {"class_vectors": {"red": [1], "green": [1], "blue": [1]}}, "has the shape"),
    ],
)
def test_bad_input(settings: Any, how: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        FewShotClassifier(Tower(), threshold=0, **settings).fit(IMAGES, LABELS, **how)


def test_names_need_a_text_tower() -> None:
    model = FewShotClassifier(threshold=0, names=True)
    with pytest.raises(InputError, match="Names of classes need a text-and-image backbone"):
        model.fit(IMAGES, LABELS)
    assert FewShotClassifier(threshold=0).fit(IMAGES, LABELS).names_used is None


def test_a_tower_that_cannot_be_loaded_is_left_out_unless_it_is_asked_for() -> None:
    class Missing(Tower):
        def embed_texts(self, sentences: list[str]) -> Any:
            raise NotAvailableError(f"{len(sentences)} sentences, and no tokenizer.")

    assert FewShotClassifier(Missing(), threshold=0).fit(IMAGES, LABELS).names_used is None
    with pytest.raises(NotAvailableError, match="no tokenizer"):
        FewShotClassifier(Missing(), threshold=0, names=True).fit(IMAGES, LABELS)


def test_no_images_at_all() -> None:
    model = FewShotClassifier(Tower(), threshold=0).fit(classes=["red", "green", "blue"])
    assert model.predict([picture("green", 9)]).tolist() == ["green"]
    one = FewShotClassifier(Tower(), threshold=0)
    one.fit(IMAGES[:1], LABELS[:1], classes=["red", "green", "blue"])
    assert one.predict([picture("green", 9)]).tolist() == ["green"]
    with pytest.raises(InputError, match="There are no images"):
        FewShotClassifier(Tower()).fit()


def post(url: str, document: Any) -> tuple[int, Any]:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(document).encode(), headers)
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(request)
    with error.value as answer:
        return answer.code, json.load(answer)


def test_a_server_embeds_texts() -> None:
    pytest.importorskip("starlette")
    import threading

    from mivhead.backbones import load_backbone
    from mivhead.service import BackboneServer

    server = BackboneServer(Tower(), port=0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        remote = load_backbone(server.url)
        names = ["red", "green"] * 200  # more than one request
        np.testing.assert_array_equal(class_vectors(remote, names), class_vectors(Tower(), names))
        np.testing.assert_array_equal(
            class_vectors(server.url, ["red"]), class_vectors(Tower(), ["red"])
        )
        model = FewShotClassifier(server.url, threshold=0, cache=False)
        model.fit(IMAGES, LABELS, classes=["yellow"])
        assert model.predict([picture("yellow", 9)]).tolist() == ["yellow"]
        for texts in ([], ["x" * 1001], ["x"] * 257, [1], "x"):
            status, answer = post(f"{server.url}/v1/texts", {"texts": texts})
            assert status == 400
            assert "texts" in answer["error"]
    finally:
        server.stop()
