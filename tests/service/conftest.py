"""Models for the tests of the service, on the toy backbone, and the service that has them."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from mivhead import FewShotClassifier
from mivhead.service.application import create_app
from mivhead.service.engine import ModelLoader
from mivhead.service.middleware import Limits
from mivhead.service.server import Server
from tests.conftest import COLOURS
from tests.helpers.services import serving, toy
from tests.helpers.tiny_backbone import TinyBackbone

PATH = "/v1/predict"


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
    """The URL of a server with this model."""
    limits = Limits(max_images=8, max_bytes=200_000)
    app = create_app([model_file], load=ModelLoader(backbone=toy()), limits=limits)
    with serving(Server(app, port=0)) as address:
        yield address


@asynccontextmanager
async def clients(
    *models: Any, backbone: Any = None, limits: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """A service in this event loop, and a client that calls it without a network."""
    load = ModelLoader(backbone=backbone or toy())
    app = create_app(models, load=load, limits=Limits(**(limits or {})), **settings)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
        asyncio.timeout(60),
    ):
        yield client


class Waiting(TinyBackbone):
    """Waits for a signal, after the trial at the start; notes the sizes of batches."""

    def __init__(self) -> None:
        super().__init__("toy", token=True)
        self.batches: list[int] = []
        self.entered, self.go = threading.Event(), threading.Event()

    def extract(self, images: Any) -> Any:
        self.batches.append(len(images))
        if len(self.batches) > 1:
            self.entered.set()
            assert self.go.wait(60)
        return super().extract(images)
