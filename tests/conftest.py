"""Fixtures of all tests: small folders of images, kernels compiled or not, numbers of threads."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from PIL import Image

from mivhead._util.threads import set_threads, wanted_threads
from mivhead.engine import library

settings.register_profile("mivhead", deadline=None)  # a busy machine is not a failure
settings.load_profile("mivhead")
set_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))

COLOURS = {"red": (220, 40, 40), "green": (40, 200, 60), "blue": (50, 60, 230)}


def write_images(folder: Path, per_class: int, seed: int = 0) -> Path:
    """Write class folders of noisy images, one colour per class."""
    rng = np.random.default_rng(seed)
    for name, colour in COLOURS.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(per_class):
            pixels = np.clip(np.array(colour) + rng.normal(0, 30, (20, 24, 3)), 0, 255)
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{i}.png")
    return folder


@pytest.fixture
def shots(tmp_path: Path) -> Path:
    """A folder with three classes of four images."""
    return write_images(tmp_path / "shots", 4)


@pytest.fixture
def queries(tmp_path: Path) -> Path:
    """Other images of the same classes."""
    return write_images(tmp_path / "queries", 5, seed=1)


@pytest.fixture(params=["compiled", "plain"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Run a test twice: with the compiled kernels, and as if they had not been built."""
    compiled = request.param == "compiled"
    if compiled and os.environ.get(library.SWITCH, "").lower() == "off":
        pytest.skip("the kernels are switched off")
    if not compiled:
        monkeypatch.setattr(library, "PATH", Path("not-built.so"))
    library.library.cache_clear()
    assert (library.library() is not None) == compiled
    yield compiled
    library.library.cache_clear()


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Run a test with several numbers of threads."""
    before = wanted_threads()
    monkeypatch.setattr("mivhead._util.threads.available_cores", lambda: 8)
    set_threads(request.param)
    yield request.param
    set_threads(before)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A Ray cluster: two nodes of two processors; their workers can import what the tests can."""
    import ray
    from ray.cluster_utils import Cluster

    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    cluster.second = cluster.add_node(num_cpus=2)
    cluster.wait_for_nodes()
    yield cluster
    ray.shutdown()
    cluster.shutdown()
