"""What a fitted model shows of itself: evaluation, check and drawings, as in a notebook."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.exceptions import NotFittedError

import mivhead
from mivhead import FewShotClassifier
from mivhead.diagnostics.evaluation import Evaluation, Mistake
from mivhead.errors import InputError
from tests.helpers.extras import needs
from tests.helpers.tiny_backbone import TinyBackbone

drawn = needs("matplotlib", "plot")


@pytest.fixture
def model(shots: Path) -> FewShotClassifier:
    return FewShotClassifier(TinyBackbone(), verbose=False).fit_folder(shots)


def test_evaluate_a_folder_or_images(model, shots, queries):
    result = model.evaluate(queries)
    assert result.score.images == 15
    assert result.accuracy == result.score.right / 15
    assert repr(result).startswith(f"<Evaluation: {result.score.right} of 15 images right, ")
    assert model.evaluate(sorted(queries.glob("red/*")), ["red"] * 5).score.images == 5
    with pytest.raises(InputError, match="trained on all of the 12 images"):
        model.evaluate(shots)
    assert model.evaluate(shots, include_shots=True).score.images == 12


def test_evaluation_in_a_notebook_is_escaped():
    mistakes = tuple(Mistake(f"<b>{i}", "a", "<i>", 0.9) for i in range(60))
    result = Evaluation(("a", "<i>"), np.array([[1, 60], [0, 1]]), mistakes, shots=("x",))
    html = result._repr_html_()
    assert "<b>0" not in html
    assert "<i>" not in html
    assert "and 10 more" in html
    assert "1 images were left out" in html


def test_check_is_the_cross_validation_of_fit(model, shots, tmp_path):
    result = model.check(folds=2)
    assert (result.folds, result.score.images) == (2, 12)
    assert repr(result).startswith("<CrossValidation: 2-fold, ")
    assert repr(result)[1:-1] in result._repr_html_()
    model.save(tmp_path / "m.miv")  # a loaded model knows its shots, too
    again = mivhead.load(tmp_path / "m.miv", backbone=TinyBackbone()).check(folds=2)
    np.testing.assert_allclose(again.probabilities, result.probabilities, atol=1e-6)


@drawn
def test_drawings_are_shown_and_written_only_on_request(model, queries, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    image = queries / "red" / "0.png"
    figures = [
        model.plot_attention(image),
        model.plot_attention(Image.open(image)),
        model.plot_tsne(image, truth="red"),
        model.evaluate(queries).plot(),
        model.evaluate(queries).plot_mistakes(),
    ]
    for figure in figures:
        with Image.open(io.BytesIO(figure._repr_png_())) as picture:
            assert picture.format == "PNG"
    assert sorted(tmp_path.rglob("*")) == before
    model.plot_attention(image, "attention.svg")
    assert (tmp_path / "attention.svg").exists()


@drawn
def test_what_cannot_be_drawn(model, shots, queries):
    image = queries / "red" / "0.png"
    with pytest.raises(NotFittedError):
        FewShotClassifier().plot_tsne(image)
    with pytest.raises(InputError, match="15 images; give one"):
        model.plot_tsne(queries)
    with pytest.raises(InputError, match="truth must be one of"):
        model.plot_tsne(image, truth="pink")
    other = FewShotClassifier(TinyBackbone(), method="ncc").fit_folder(shots)
    with pytest.raises(InputError, match="not a MIV-head"):
        other.plot_attention(image)


@drawn
def test_wrong_images_are_drawn(model, queries, tmp_path):
    labels = ["blue"] * 5
    result = model.evaluate(sorted(queries.glob("red/*")), labels)
    assert len(result.mistakes) == 5
    figure = result.plot_mistakes(count=2)
    assert len(figure.axes) == 2
    assert "2 most confident mistakes" in figure.get_suptitle()
