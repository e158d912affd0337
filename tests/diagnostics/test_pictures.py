"""Drawings: formats, files that cannot be written, and the confusion matrix."""

import numpy as np
import pytest

from mivhead.diagnostics.pictures import draw_confusion
from mivhead.errors import InputError, NotAvailableError
from tests.helpers.extras import needs

pytestmark = needs("matplotlib", "plot")


def test_pictures_of_strange_names_and_sizes(tmp_path):
    names = ["a $ and $ b", "猫", "x" * 60, "$\\frac$"]
    draw_confusion(np.eye(4, dtype=int), names, tmp_path / "names.svg")
    many = [str(i) for i in range(90)]
    draw_confusion(np.eye(90, dtype=int), many, tmp_path / "many.png")
    draw_confusion(np.zeros((2, 2), int), ["a", "b"], tmp_path / "none.pdf")
    assert {path.name for path in tmp_path.iterdir()} == {"names.svg", "many.png", "none.pdf"}


def test_a_picture_that_cannot_be_written(tmp_path):
    with pytest.raises(NotAvailableError, match=r"c\.png"):
        draw_confusion(np.eye(2), ["a", "b"], tmp_path / "no" / "c.png")
    with pytest.raises(InputError, match="must be a"):
        draw_confusion(np.eye(2), ["a", "b"], tmp_path / "c.bmp")
