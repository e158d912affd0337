"""`miv plot`: pictures of a model and an image."""

import pytest
from PIL import Image

from mivhead_bench.datasets.bundled import write_bundled
from tests.helpers.extras import needs

pytestmark = needs("matplotlib", "plot")


@pytest.mark.parametrize("action", ["tsne", "attention"])
def test_a_picture_is_written(action, miv, model, new, tmp_path):
    path = tmp_path / "picture.png"
    answer = miv("bench", "plot", action, model, new / "rings" / "5.png", "-o", path)
    assert answer.code == 0, answer.err
    assert f"Saved {path}." in answer.out
    with Image.open(path) as picture:
        assert picture.size[0] > 500


def test_bad_input(fails, model, new, tmp_path):
    image = new / "rings" / "5.png"
    plot = ("bench", "plot", "tsne", model)
    assert "rings" in fails(*plot, image, "--truth", "ring", "-o", tmp_path / "t.png")
    assert ".svg" in fails(*plot, image, "-o", tmp_path / "t.gif")
    assert "6 images" in fails(*plot, new, "-o", tmp_path / "t.png")


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    return write_bundled(tmp_path_factory.mktemp("sets"))


@needs("timm")
@pytest.mark.parametrize("compare", ["none", "tsa"])
def test_an_episode_by_one_command(compare, miv, fails, sets, tmp_path):
    """Samples a task, fits both methods, draws: one panel per block and one for the other."""
    path = tmp_path / "episode.svg"
    plot = ("bench", "plot", "episode", "digits", "--data", sets, "-o", path)
    plot += ("--backbone", "timm:resnet10t", "--weights", "random", "--protocol", "2-way 1-shot")
    assert miv(*plot, "--compare", compare).code == 0
    drawn = path.read_text()
    assert "block 1 of" in drawn
    assert ("nearest centroids" if compare == "none" else "tsa") in drawn
    fails(*plot, "--compare", compare, "--query", "999")
    fails(*plot, "--compare", "ncc")
