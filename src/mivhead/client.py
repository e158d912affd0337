"""A client of `miv serve`: predicts on another machine, without a model on this one."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from io import BytesIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from PIL import Image

from mivhead._util.http import HttpClient
from mivhead._util.schema import parse_json
from mivhead.errors import ImageError, InputError, NotAvailableError
from mivhead.images.decoding import ImageLike, load_image, read_capped, read_file
from mivhead.images.imageset import Skipped
from mivhead.model.prediction import Prediction

__all__ = ["Client"]

T = TypeVar("T")
R = TypeVar("R")

KEY = "MIV_KEY"  # environment variable
IMAGES = 16  # per request
REQUEST_BYTES = 16 * 2**20  # of images; a larger image is sent alone
ANSWER_BYTES = 64 * 2**20


class Client:
    """Uses the models of a service.

    Parameters
    ----------
    url : str, default="http://127.0.0.1:8765"
        Address of the service.
    key : str, optional
        The key that the service requires; by default the value of the environment variable
        `MIV_KEY`, if it is set.
    timeout : float, default=60.0
        Seconds that one exchange may take, from connecting to the last byte of the answer.
    attempts : int, default=5
        Maximum number of attempts per request: a busy server and lost connections are retried.
    concurrency : int, default=4
        Number of requests that are sent at the same time.

    Attributes
    ----------
    skipped : list of Skipped
        Images that the last `predict` with `skip_bad` left out.

    Examples
    --------
    >>> client = Client("http://127.0.0.1:8765")
    >>> client.predict(["photo.jpg"])[0].label                      # doctest: +SKIP
    'robin'
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8765",
        *,
        key: str | None = None,
        timeout: float = 60.0,
        attempts: int = 5,
        concurrency: int = 4,
    ) -> None:
        if attempts < 1 or concurrency < 1 or not timeout > 0:
            raise InputError(
                "attempts and concurrency must be at least 1 and timeout positive, got "
                f"{attempts}, {concurrency} and {timeout}."
            )
        self.url = url.rstrip("/")
        self._concurrency = concurrency
        self._key = key or os.environ.get(KEY, "").strip()
        try:
            self._client = HttpClient(self.url, extra="serve", timeout=timeout, attempts=attempts)
        except ValueError as error:
            raise InputError(f"{url!r} is not the address of a service.") from error
        self.skipped: list[Skipped] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._client.http.close()

    def __repr__(self) -> str:
        return f"Client({self.url!r})"

    def models(self) -> list[dict[str, Any]]:
        """List the models.

        Returns
        -------
        list of dict
            Per model its name, classes, shots, version and other facts.
        """
        return self._list(self._send("GET", "/v1/models"), "models")

    def model(self, name: str) -> dict[str, Any]:
        """Describe one model.

        Parameters
        ----------
        name : str
            Its name in the service.

        Returns
        -------
        dict
            Its name, classes, shots, version and other facts.
        """
        found: dict[str, Any] = self._send("GET", f"/v1/models/{_quoted(name)}")
        return found

    def predict(
        self,
        images: ImageLike | Iterable[ImageLike],
        *,
        model: str | None = None,
        top: int | None = None,
        class_prior: str | Mapping[str, float] | None = None,
        skip_bad: bool = False,
    ) -> list[Prediction]:
        """Predict names, probabilities and decisions.

        Parameters
        ----------
        images : an image, or an iterable of images
            Paths, bytes of image files, binary files, PIL images or uint8 arrays.
        model : str, optional
            Name of the model; needed if the service has several.
        top : int, optional
            Number of probabilities per image, the largest first; by default all.
        class_prior : {"uniform", "shots"} or mapping of class to frequency, optional
            How frequent the classes are among the images; by default all alike.
        skip_bad : bool, default=False
            Leave out images that cannot be read, and list them in `skipped`.

        Returns
        -------
        list of Prediction
            One per image, in their order.
        """
        if isinstance(class_prior, Mapping):
            class_prior = ",".join(f"{name}={share}" for name, share in class_prior.items())
        given = {"model": model, "top": top, "prior": class_prior}
        options = {name: value for name, value in given.items() if value is not None}
        self.skipped = []
        results: list[Prediction] = []

        def ask(part: list[tuple[str, bytes]]) -> list[dict[str, Any]]:
            files = [("images", each) for each in part]
            answer = self._send("POST", "/v1/predict", params=options, files=files, bad_images=True)
            return self._list(answer, "predictions")

        parts = _requests(_files(images), min(IMAGES, self._max_images))
        with ThreadPoolExecutor(self._concurrency) as pool:
            for part in _in_turn(pool, ask, parts, self._concurrency):
                for each in part:
                    if "error" not in each:
                        results.append(self._prediction(each))
                    elif skip_bad:
                        self.skipped.append(Skipped(str(each.get("file")), _message(each)))
                    else:
                        raise ImageError(_message(each))
        return results

    @cached_property
    def _max_images(self) -> int:
        """How many images the service takes per request."""
        limits = self._send("GET", "/v1/models").get("limits")
        limit = limits.get("max_images") if isinstance(limits, dict) else None
        return limit if isinstance(limit, int) and limit > 0 else IMAGES

    def _send(self, method: str, path: str, *, bad_images: bool = False, **what: Any) -> Any:
        """Send a request and return the JSON of the answer."""
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else None
        answer = self._client.send(
            method, self.url + path, max_bytes=ANSWER_BYTES, headers=headers, **what
        )
        try:
            document = parse_json(answer.body)
        except ValueError:
            document = None
        return self._read(answer.status, document, bad_images)

    def _read(self, status: int, document: Any, bad_images: bool) -> Any:
        if status == 401:
            raise NotAvailableError(
                f"{self.url} requires a key: pass it as `key`, or set the variable {KEY}."
            )
        if bad_images and isinstance(document, dict) and "predictions" in document:
            return document
        if status >= 500:
            raise NotAvailableError(f"{self.url} failed (HTTP {status}): {_message(document)}")
        if status >= 400:
            raise InputError(f"{self.url} refused the request: {_message(document)}")
        if not isinstance(document, dict) or status >= 300:
            raise self._stranger()
        return document

    def _list(self, document: dict[str, Any], name: str) -> list[dict[str, Any]]:
        """Return a list of objects in an answer."""
        found = document.get(name)
        if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
            raise self._stranger()
        return found

    def _prediction(self, document: Mapping[str, Any]) -> Prediction:
        try:
            return Prediction.from_json(document)
        except (KeyError, TypeError):
            raise self._stranger() from None

    def _stranger(self) -> InputError:
        return InputError(f"{self.url} is not a mivhead service.")


def _in_turn(
    pool: ThreadPoolExecutor, function: Callable[[T], R], items: Iterable[T], ahead: int
) -> Iterator[R]:
    """Yield the results of calls in threads; unlike `pool.map`, take only a few items ahead."""
    waiting: deque[Future[R]] = deque()
    try:
        for each in items:
            waiting.append(pool.submit(function, each))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


def _message(document: Any) -> str:
    text = document.get("error") if isinstance(document, dict) else None
    if text is None:
        return "no reason was given."
    return "".join(c if c.isprintable() else " " for c in str(text))[:300]


def _quoted(name: str) -> str:
    from urllib.parse import quote

    return quote(name, safe="")


def _files(images: ImageLike | Iterable[ImageLike]) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the bytes of every image; files are sent as they are."""
    alone = isinstance(images, str | bytes | os.PathLike | Image.Image) or hasattr(images, "shape")
    given: Any = [images] if alone or hasattr(images, "read") else images
    for i, image in enumerate(given):
        name = f"image {i}"
        if isinstance(image, bytes):
            yield name, image
        elif isinstance(image, str | os.PathLike):
            yield os.fspath(image), read_file(Path(image), os.fspath(image))
        elif isinstance(image, Image.Image) or hasattr(image, "shape"):
            file = BytesIO()
            load_image(image, name=name).save(file, "PNG", compress_level=1)
            yield name, file.getvalue()
        else:
            yield name, read_capped(image, name)


def _requests(files: Iterable[tuple[str, bytes]], count: int) -> Iterator[list[tuple[str, bytes]]]:
    """Split images into requests of at most `count` images."""
    part: list[tuple[str, bytes]] = []
    size = 0
    for name, data in files:
        if part and (len(part) == count or size + len(data) > REQUEST_BYTES):
            yield part
            part, size = [], 0
        part.append((name, data))
        size += len(data)
    if part:
        yield part
