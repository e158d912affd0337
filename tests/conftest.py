"""Fixtures of all tests: small folders of images, kernels compiled or not, numbers of threads."""

import os
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from PIL import Image

from mivhead._util.threads import set_threads, wanted_threads
from mivhead.head import kernels as head_kernels

# A busy machine is not a failure. HYPOTHESIS_PROFILE=free looks for examples not tried before.
PATIENT = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("same", derandomize=True, **PATIENT)
settings.register_profile("free", print_blob=True, **PATIENT)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))
if settings.default.derandomize:  # or it would also try constants of what is imported until then
    providers._get_local_constants = lambda: providers._local_constants
SHUFFLE = os.environ.get("MIV_SHUFFLE")
set_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))

COLOURS = {"red": (220, 40, 40), "green": (40, 200, 60), "blue": (50, 60, 230)}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "ignore:::PIL")  # as `mivhead.images.decoding` does


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if SHUFFLE:
        terminalreporter.write_line(f"The order was that of MIV_SHUFFLE={SHUFFLE}.")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With MIV_SHUFFLE, run the files, and the tests of each, in an order that it decides."""
    if SHUFFLE:
        items.sort(key=lambda item: [_place(item.nodeid.split("::")[0]), _place(item.nodeid)])


def _place(name: str) -> str:
    return sha256(f"{SHUFFLE} {name}".encode()).hexdigest()


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
    if not compiled:
        monkeypatch.setattr(head_kernels, "PATH", Path("not-built.so"))
    head_kernels.library.cache_clear()
    if compiled and head_kernels.library() is None:
        pytest.skip("the kernels are not built, or switched off")
    yield compiled
    head_kernels.library.cache_clear()


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
