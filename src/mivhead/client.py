"""A client of `miv serve`: predicts on another machine, without PyTorch on this one."""

from __future__ import annotations

import os
import random
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from io import BytesIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from PIL import Image

from mivhead._util.optional import need
from mivhead._util.schema import parse_json
from mivhead.errors import ImageError, InputError, NotAvailableError
from mivhead.images.decoding import ImageLike, load_image, read_capped, read_file
from mivhead.images.imageset import Skipped
from mivhead.model.prediction import Prediction

KEY = "MIV_KEY"  # environment variable
__all__ = ["Client"]

IMAGES = 16  # per request
REQUEST_BYTES = 16 * 2**20  # of images; a larger image is sent alone
ANSWER_BYTES = 64 * 2**20
LONGEST_WAIT = 60.0  # seconds that a server may ask for


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
        Seconds to wait for a response, and then for the rest of it.
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
        self._httpx = need("httpx", "serve")
        self.url = url.rstrip("/")
        self._attempts, self._concurrency, self._timeout = attempts, concurrency, timeout
        key = key or os.environ.get(KEY, "").strip()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            self._http = self._httpx.Client(
                base_url=self.url, headers=headers, timeout=timeout, follow_redirects=False
            )
        except (ValueError, TypeError, self._httpx.InvalidURL) as error:
            raise InputError(f"{url!r} is not the address of a service.") from error
        weakref.finalize(self, self._http.close)  # for those who never call `close`
        self._random = random.Random(0)
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
        self._http.close()

    def __repr__(self) -> str:
        return f"Client({self.url!r})"

    def models(self) -> list[dict[str, Any]]:
        """List the models.

        Returns
        -------
        list of dict
            Per model its name, classes, shots and version, and what else the service says.
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
            Its name, classes, shots and version, and what else the service says.
        """
        found: dict[str, Any] = self._send("GET", f"/v1/models/{_quoted(name)}")
        return found

    def predict(
        self,
        images: ImageLike | Iterable[ImageLike],
        *,
        model: str | None = None,
        top: int | None = None,
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
        skip_bad : bool, default=False
            Leave out images that cannot be read, and list them in `skipped`.

        Returns
        -------
        list of Prediction
            One per image, in their order.
        """
        options = {k: v for k, v in (("model", model), ("top", top)) if v is not None}
        self.skipped = []
        results: list[Prediction] = []

        def ask(part: list[tuple[str, bytes]]) -> list[dict[str, Any]]:
            files = [("images", each) for each in part]
            answer = self._send("POST", "/v1/predict", params=options, files=files, bad_images=True)
            return self._list(answer, "predictions")

        parts = _requests(_files(images), min(IMAGES, self._max_images))
        with ThreadPoolExecutor(self._concurrency) as pool:
            for part in pool.map(ask, parts):
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
        for attempt in range(1, self._attempts + 1):
            wait = 0.5 * 2 ** (attempt - 1)
            try:
                response, document = self._exchange(method, path, **what)
            except (self._httpx.InvalidURL, self._httpx.UnsupportedProtocol) as error:
                raise InputError(f"{self.url} is not the address of a service.") from error
            except self._httpx.RequestError as error:
                reason = f"connection lost: {error or type(error).__name__}"
            else:
                if response.status_code not in (408, 429, 502, 503, 504):
                    return self._read(response.status_code, document, bad_images)
                reason = f"HTTP {response.status_code}: {_message(document)}"
                asked = response.headers.get("Retry-After", "")
                wait = max(wait, float(asked) if asked.isdecimal() else 0.0)
            if attempt < self._attempts:
                time.sleep(min(wait, LONGEST_WAIT) * self._random.uniform(0.5, 1.5))
        raise NotAvailableError(
            f"{self.url} was asked {self._attempts} times without success ({reason}): check that "
            "the service is running and reachable, and try again."
        )

    def _exchange(self, method: str, path: str, **what: Any) -> tuple[Any, Any]:
        """Return a response and its JSON document, or None if it has none."""
        body = bytearray()
        with self._http.stream(method, path, **what) as response:
            end = time.monotonic() + self._timeout
            for chunk in response.iter_bytes():
                body += chunk
                if len(body) > ANSWER_BYTES:
                    raise InputError(f"{self.url} sent more than {ANSWER_BYTES:,} bytes.")
                if time.monotonic() > end:
                    raise self._httpx.ReadTimeout("the response took too long")
        try:
            return response, parse_json(bytes(body))
        except ValueError:
            return response, None

    def _read(self, status: int, document: Any, bad_images: bool) -> Any:
        if status == 401:
            raise NotAvailableError(
                f"{self.url} requires a key: give it as `key`, or in the variable {KEY}."
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
            return Prediction(
                document["file"],
                document["label"],
                document["probability"],
                {each["label"]: each["probability"] for each in document["top"]},
                document["decision"],
                document["unknown"],
            )
        except (KeyError, TypeError):
            raise self._stranger() from None

    def _stranger(self) -> InputError:
        return InputError(f"{self.url} is not a mivhead service.")


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
