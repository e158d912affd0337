"""What all endpoints share: decoding within a budget, and the queue."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from anyio import CapacityLimiter, to_thread
from PIL import Image

from mivhead.errors import ImageError, InputError
from mivhead.images.decoding import count_pixels, load_image
from mivhead.service.batching import Batcher, Budget, Steps
from mivhead.service.models import Models, ServedModel
from mivhead.service.observation import Metrics
from mivhead.service.protection import Limits
from mivhead.service.requests import Upload

if TYPE_CHECKING:
    from mivhead.model.prediction import Prediction

T = TypeVar("T")

DECODERS = max(2, os.cpu_count() or 2)  # threads


@dataclass(frozen=True)
class Unreadable:
    """An image that cannot be used, and the reason."""

    name: str
    reason: str


class Engine:
    """The models of a service, and the limited resources that its requests share."""

    def __init__(self, models: Models, limits: Limits, metrics: Metrics) -> None:
        self.models, self.limits, self.metrics = models, limits, metrics
        self.batcher = Batcher(limits.max_queue, on_batch=metrics.count_batch)
        metrics.queue.set_function(lambda: self.batcher.admitted)
        self._pixels = Budget(limits.max_pixels)
        self._threads = CapacityLimiter(DECODERS)

    def close(self) -> None:
        """Stop computing."""
        self.batcher.close()

    async def predict(
        self, served: ServedModel, images: Sequence[Upload | Image.Image]
    ) -> list[Prediction | Unreadable]:
        """Predict images of one request; an unreadable one does not affect the others."""
        steps = served.read, served.classify
        found = await self._run(served, steps, images)
        results: list[Prediction | Unreadable] = [
            each if isinstance(each, Unreadable) else replace(each, id=getattr(image, "name", ""))
            for image, each in zip(images, found, strict=True)
        ]
        self._count(served, results)
        return results

    async def explain(
        self, served: ServedModel, images: Sequence[Upload]
    ) -> list[dict[str, Any] | Unreadable]:
        """Explain the predictions for images of one request."""
        return await self._run(served, (served.explain,), images)

    async def _run(
        self,
        served: ServedModel,
        steps: Steps,
        images: Sequence[Upload | Image.Image],
    ) -> list[Any]:
        """Decode images and pass those that can be read through the steps of a computation."""
        if served.size is None:
            raise InputError(
                f"The model {served.name} was trained on features of unknown origin: send features."
            )
        with self.batcher.admit(len(images)):
            decoded = await self.decode(images, served.size)
            pictures = [each for each in decoded if isinstance(each, Image.Image)]
            found = iter(await self.batcher.run(steps, pictures) if pictures else [])
        return [next(found) if isinstance(each, Image.Image) else each for each in decoded]

    async def predict_features(self, served: ServedModel, features: Any) -> list[Prediction]:
        """Predict features of one request."""
        with self.batcher.admit(1):

            def compute(items: list[Any]) -> list[Any]:
                return [served.classify_features(*items)]

            results: list[Prediction]
            (results,) = await self.batcher.run((compute,), [features])
        self._count(served, results)
        return results

    async def decode(
        self, images: Sequence[Upload | Image.Image], size: int
    ) -> list[Image.Image | Unreadable]:
        """Decode images and resize each at once, so that few large ones are in memory."""
        return await asyncio.gather(*(self._decode(each, size) for each in images))

    @asynccontextmanager
    async def checked(self, images: Sequence[Upload]) -> AsyncIterator[None]:
        """Hold the pixels of images that are decoded elsewhere, one after the other."""
        counts = [await self._count_pixels(each) for each in images]
        async with self._pixels.take(max(counts)):
            yield

    async def _decode(self, image: Upload | Image.Image, size: int) -> Image.Image | Unreadable:
        if isinstance(image, Image.Image):
            return await self._in_thread(_resize, image, size)
        try:
            async with self._pixels.take(await self._count_pixels(image)):
                return await self._in_thread(_decode_file, image, size)
        except ImageError as error:
            error.__traceback__ = None  # whose frames hold the image and the exception: a cycle
            return Unreadable(image.name, str(error))

    async def _count_pixels(self, image: Upload) -> int:
        if not image.data:
            raise ImageError(f"{image.name} is empty (0 bytes).")
        pixels = await self._in_thread(partial(count_pixels, name=image.name), image.data)
        if pixels > self.limits.max_pixels:
            raise ImageError(
                f"{image.name} has {pixels:,} pixels; at most {self.limits.max_pixels:,} are "
                "allowed here: shrink it first."
            )
        return pixels

    async def _in_thread(self, function: Callable[..., T], *args: Any) -> T:
        return await to_thread.run_sync(function, *args, limiter=self._threads)

    def _count(self, served: ServedModel, results: Sequence[Prediction | Unreadable]) -> None:
        found = [each for each in results if not isinstance(each, Unreadable)]
        for each in found:
            self.metrics.predictions.labels(served.name, str(each.decision)).inc()
        scores = [each.unknown for each in found if each.unknown is not None]
        self.metrics.watch_drift(served.name, served.version, served.scores, scores)


def _decode_file(image: Upload, size: int) -> Image.Image:
    return _resize(load_image(image.data, name=image.name), size)


def _resize(picture: Image.Image, size: int) -> Image.Image:
    """Resize an image as its backbone would."""
    from mivhead.backbones.preprocessing import to_picture

    return to_picture(picture, 0, size)
