"""Images in folders, a model of them with the default backbone, and a way to call miv."""

import shutil
from collections import namedtuple

import numpy as np
import pytest
from PIL import Image

from mivhead.cli.main import main

Answer = namedtuple("Answer", "code out err")
CLASSES = ("checks", "rings", "stripes")


def draw(kind, number):
    """Three patterns that differ in kind, each in several sizes and shades."""
    x, y = np.meshgrid(np.arange(48), np.arange(48))
    step = 5 + number
    value = {
        "stripes": (x // step) % 2,
        "checks": (x // step + y // step) % 2,
        "rings": (np.hypot(x - 24, y - 24) // (step / 1.5)).astype(int) % 2,
    }[kind]
    shade = np.array([200, 180 - 9 * number, 90 + 13 * number])
    return Image.fromarray((40 + value[:, :, None] * (shade - 40)).astype(np.uint8))


def write_images(root, classes=CLASSES, numbers=range(3)):
    for kind in classes:
        (root / kind).mkdir(parents=True)
        for number in numbers:
            draw(kind, number).save(root / kind / f"{number}.png")
    return root


@pytest.fixture(scope="session")
def shots(tmp_path_factory):
    """Three classes of three images; do not change them."""
    return write_images(tmp_path_factory.mktemp("cli") / "shots")


@pytest.fixture(scope="session")
def new(tmp_path_factory):
    """Three classes of two other images; do not change them."""
    return write_images(tmp_path_factory.mktemp("cli") / "new", numbers=(5, 6))


@pytest.fixture(scope="session")
def model(shots, tmp_path_factory):
    """A model of `shots`; do not change it."""
    path = tmp_path_factory.mktemp("cli") / "model.miv"
    assert main(["fit", str(shots), "-o", str(path), "--no-augmentation", "--no-check"]) == 0
    return path


@pytest.fixture(scope="session")
def features(shots, tmp_path_factory):
    """Features of `shots` with views; do not change them."""
    path = tmp_path_factory.mktemp("cli") / "shots.safetensors"
    assert main(["extract", str(shots), "-o", str(path), "--threshold", "3"]) == 0
    return path


@pytest.fixture
def copy(shots, tmp_path):
    """A copy of `shots` to spoil."""
    return shutil.copytree(shots, tmp_path / "copy")


@pytest.fixture
def miv(capsys):
    """Run `miv` in this process; return its exit code and what it printed."""

    def run(*arguments):
        capsys.readouterr()
        code = main([str(each) for each in arguments])
        return Answer(code, *capsys.readouterr())

    return run


@pytest.fixture
def fails(miv):
    """Run `miv`; check that it fails with one sentence and no traceback; return it."""

    def run(*arguments):
        answer = miv(*arguments)
        assert answer.code == 2, answer
        assert answer.out == ""
        assert answer.err.startswith("miv: error: ")
        assert answer.err.count("\n") == 1
        assert "Traceback" not in answer.err
        assert "this is a bug" not in answer.err
        return answer.err

    return run
