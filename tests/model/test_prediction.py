"""`Prediction` and `Predictions`: short forms, tables, thumbnails."""

import pickle
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

import mivhead
from mivhead.model.prediction import MAX_ROWS, Prediction, Predictions, predictions
from tests.helpers.extras import needs
from tests.helpers.tiny_backbone import TinyBackbone


def made(count=3, classes=50):
    rng = np.random.default_rng(0)
    probabilities = rng.dirichlet(np.ones(classes), count)
    names = np.array([f"class {i:02}" for i in range(classes)])
    return predictions([f"{i}.jpg" for i in range(count)], names, probabilities)


def test_a_prediction_is_one_short_line():
    text = repr(made()[0])
    assert text.startswith("<Prediction of '0.jpg': class ")
    assert text.endswith("47 more>")
    assert len(text) < 100


def test_a_prediction_without_a_name_says_so():
    unsure = Prediction("a.jpg", "cat", 0.6, {"cat": 0.6, "dog": 0.4}, "unsure")
    assert repr(unsure) == "<Prediction of 'a.jpg': unsure; cat 60.0 %, dog 40.0 %>"
    assert "<b>unsure</b> (cat?)" in Predictions([unsure])._repr_html_()


def test_the_most_probable_classes():
    each = made()[0]
    assert each.top(3) == list(each.probabilities.items())[:3]
    assert each.top(1) == [(each.label, each.probability)]
    assert len(each.top(99)) == 50


@needs("pandas")
def test_tables_of_pandas():
    found = made()
    frame = found[0].to_frame()
    assert frame.columns.tolist() == ["label", "probability"]
    assert frame["probability"].sum() == pytest.approx(1)
    frame = Predictions(found).to_frame(top=2)
    names = ["file", "decision", "label", "probability", "label_2", "probability_2"]
    assert frame.columns.tolist() == names
    assert frame["label"].tolist() == [each.label for each in found]
    assert frame.loc[1, "probability_2"] == found[1].top(2)[1][1]
    assert len(Predictions([]).to_frame()) == 0


def test_a_notebook_shows_a_table_with_thumbnails(shots, queries):
    model = mivhead.FewShotClassifier(TinyBackbone()).fit_folder(shots)
    found = model.classify(queries)
    html = found._repr_html_()
    assert html.count("<img ") == 15
    assert "red/0.png" in html
    assert found[:2]._repr_html_().count("<img ") == 2
    (queries / "blue" / "0.png").unlink()  # its row stays, without a picture
    assert found._repr_html_().count("<img ") == 14
    assert found._repr_html_().count("<tr>") == 16
    again = pickle.loads(pickle.dumps(found))
    assert again == found
    assert "<img" not in again._repr_html_()


def test_a_slice_shows_its_own_images():
    pictures = [Image.new("RGB", (4, 4), (value, 0, 0)) for value in (0, 100, 200)]
    seen = []

    def load(row):
        seen.append(row)
        return pictures[row]

    Predictions(made(), load)[::-1][1:]._repr_html_()
    assert seen == [1, 0]


def test_names_are_escaped_and_long_tables_are_cut():
    evil = Prediction("<script>a</script>.jpg", "<b>", 1.0, {"<b>": 1.0})
    assert "<script>" not in Predictions([evil])._repr_html_()
    html = Predictions(made(MAX_ROWS + 7))._repr_html_()
    assert html.count("<tr>") == MAX_ROWS + 1
    assert "and 7 more" in html


def test_a_fitted_model_says_what_it_knows(shots, tmp_path):
    model = mivhead.FewShotClassifier(TinyBackbone())
    assert repr(model).startswith("FewShotClassifier(")
    model.fit_folder(shots).save(tmp_path / "m.miv")
    text = repr(mivhead.load(tmp_path / "m.miv", backbone=TinyBackbone()))
    assert text.startswith("<FewShotClassifier: miv on ")
    assert text.endswith(", 3 classes: blue, green, red>")


def test_an_estimator_on_features_saves_itself(tmp_path):
    X = np.eye(4, 8, dtype=np.float32)
    classifier = mivhead.MIVClassifier(random_state=0).fit(X, ["a", "a", "b", "b"])
    classifier.save(tmp_path / "m.miv")
    loaded = mivhead.load(tmp_path / "m.miv")
    np.testing.assert_array_equal(loaded.predict_proba(X), classifier.predict_proba(X))


def test_modules_are_reached_after_one_import():
    code = (
        "import mivhead, sys; assert 'torch' not in sys.modules\n"
        "assert {'stores', 'backbones', 'methods', 'FeatureTable'} <= set(dir(mivhead))\n"
        "mivhead.stores.open, mivhead.methods.list_methods, mivhead.backbones.load_backbone\n"
        "for name in dir(mivhead): getattr(mivhead, name)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
