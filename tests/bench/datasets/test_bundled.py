"""The sets made from images that scikit-learn ships."""

import shutil

import numpy as np
import pytest

from mivhead_bench.datasets.bundled import BUNDLED, PER_CLASS, write_bundled
from mivhead_bench.datasets.sets import find_sets, open_set


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The bundled sets; do not change them."""
    return write_bundled(tmp_path_factory.mktemp("bundled"))


def test_bundled_sets_are_complete(data):
    assert set(find_sets(data)) == set(BUNDLED)
    for name in BUNDLED:
        images = open_set(name, data)
        counts = {label: images.labels.count(label) for label in images.classes}
        assert set(counts.values()) == {PER_CLASS}
        assert len(counts) >= 10


def test_upright_and_turned_digits_share_no_image(data):
    upright, turned = (open_set(name, data) for name in ("digits", "turned_digits"))
    seen = {np.asarray(upright.load(i)).tobytes() for i in range(len(upright))}
    back = {(255 - np.rot90(np.asarray(turned.load(i)), -1)).tobytes() for i in range(len(turned))}
    assert len(seen) == len(back) == 10 * PER_CLASS
    assert not seen & back


def test_existing_sets_are_kept(data, tmp_path):
    shutil.copytree(data / "turned_digits", tmp_path / "turned_digits")
    (tmp_path / "digits").mkdir()
    write_bundled(tmp_path)
    assert not list((tmp_path / "digits").iterdir())
    assert (tmp_path / "photographs").is_dir()
    assert not list(tmp_path.glob(".*"))
