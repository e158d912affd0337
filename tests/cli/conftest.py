"""Images in folders, a model of them with the default backbone, and a way to call miv."""

import shutil
from collections import namedtuple

import pytest

import mivhead
from mivhead.cli.main import main
from mivhead.images.sources import open_labelled
from tests.helpers.patterns import write_images

Answer = namedtuple("Answer", "code out err")


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
    mivhead.FewShotClassifier(threshold=0, verbose=False).fit(shots).save(path)
    return path


@pytest.fixture(scope="session")
def features(shots, tmp_path_factory):
    """Features of `shots` with a view of each; do not change them."""
    path = tmp_path_factory.mktemp("cli") / "shots.safetensors"
    mivhead.FewShotClassifier(threshold=3, verbose=False).extract(open_labelled(shots)).save(path)
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
        code = main([str(argument) for argument in arguments])
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
