"""Models for the tests of the service, on the toy backbone, and the server that serves them."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mivhead import FewShotClassifier
from tests.conftest import COLOURS
from tests.helpers.services import serving, toy


def photo(colour: str | tuple[int, int, int] = "red", seed: int = 0, kind: str = "PNG") -> bytes:
    """An image file of one noisy colour."""
    rng = np.random.default_rng(seed)
    mean = COLOURS[colour] if isinstance(colour, str) else colour
    pixels = np.clip(np.array(mean) + rng.normal(0, 30, (24, 30, 3)), 0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def train(names: tuple[str, ...] = ("red", "green", "blue"), seed: int = 0) -> FewShotClassifier:
    """A classifier of colours."""
    shots = [(name, 10 * seed + i) for name in names for i in range(3)]
    images = [Image.open(io.BytesIO(photo(name, i))) for name, i in shots]
    model = FewShotClassifier(toy(), threshold=0, recipe="paper", verbose=False)
    return model.fit(images, [name for name, _ in shots])


@pytest.fixture(scope="session")
def colours() -> FewShotClassifier:
    """A classifier of three colours."""
    return train()


@pytest.fixture(scope="session")
def model_file(colours: FewShotClassifier, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its file."""
    path = tmp_path_factory.mktemp("models") / "colours.miv"
    colours.save(path)
    return path


@pytest.fixture(scope="session")
def url(model_file: Path) -> Iterator[str]:
    """The address of a server with this model."""
    pytest.importorskip("starlette")
    from mivhead.service.application import create_app
    from mivhead.service.models import ModelLoader
    from mivhead.service.protection import Limits
    from mivhead.service.server import Server

    limits = Limits(max_images=8, max_bytes=200_000)
    app = create_app([model_file], load=ModelLoader(backbone=toy()), limits=limits)
    with serving(Server(app, port=0)) as address:
        yield address
