"""A client of `miv serve`: predicts on another machine, without a model on this one."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, Self

import httpx
from PIL import Image

from mivhead._util.text import one_line
from mivhead.errors import ImageError, InputError, NotAvailableError
from mivhead.images.decoding import ImageLike, load_image, read_capped, read_file
from mivhead.images.imageset import Skipped
from mivhead.prediction import Prediction

KEY = "MIV_KEY"  # environment variable
IMAGES = 16  # per request
REQUEST_BYTES = 16 * 2**20  # of images; a larger image is sent alone
BUSY = (429, 503)
LONGEST_WAIT = 60.0  # seconds that a server may ask the client to wait


class Client:
    """Uses the models of a service.

    Parameters
    ----------
    url : str, default="http://127.0.0.1:8765"
        URL of the service.
    key : str, optional
        The key that the service requires; by default the value of the environment variable
        `MIV_KEY`, if it is set.
    timeout : float, default=60.0
        Seconds that connecting, and each wait for a part of an answer, may take.
    attempts : int, default=5
        Maximum number of attempts per request: a busy server and lost connections are retried.

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
    ) -> None:
        self.url = url.rstrip("/")
        self._attempts = attempts
        key = key or os.environ.get(KEY, "").strip()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            self._http = httpx.Client(base_url=self.url, headers=headers, timeout=timeout)
        except httpx.InvalidURL as error:
            raise InputError(f"{url!r} is not the URL of a service.") from error
        self.skipped: list[Skipped] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def models(self) -> list[dict[str, Any]]:
        """List the models: name, classes, shots, version and other facts of each."""
        return self._rows("models", "GET", "/v1/models")

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
            class_prior = json.dumps({str(name): value for name, value in class_prior.items()})
        options = {"model": model, "top": top, "prior": class_prior}
        params = {name: value for name, value in options.items() if value is not None}
        self.skipped = []
        predictions: list[Prediction] = []
        for part in _requests(_files(images)):
            files = [("images", file) for file in part]
            for row in self._rows("predictions", "POST", "/v1/predict", params=params, files=files):
                if "error" not in row:
                    try:
                        predictions.append(Prediction.from_json(row))
                    except (KeyError, TypeError):
                        raise InputError(f"{self.url} is not a mivhead service.") from None
                elif skip_bad:
                    self.skipped.append(Skipped(str(row.get("file")), _message(row)))
                else:
                    raise ImageError(_message(row))
        return predictions

    def _send(self, method: str, path: str, **what: Any) -> httpx.Response:
        """Send a request, again if that may help."""
        for attempt in range(self._attempts):
            wait = 0.5 * 2**attempt
            try:
                response = self._http.request(method, path, **what)
            except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
                raise InputError(f"{self.url!r} is not the URL of a service.") from error
            except httpx.HTTPError as error:
                reason = one_line(str(error)) or type(error).__name__
            else:
                if response.status_code not in BUSY:
                    return response
                reason = f"HTTP {response.status_code}"
                asked = response.headers.get("retry-after", "")
                wait = max(wait, float(asked)) if asked.isdecimal() else wait
            if attempt + 1 < self._attempts:
                time.sleep(min(wait, LONGEST_WAIT))
        raise NotAvailableError(
            f"{self.url} failed {self._attempts} times in a row ({reason}): check that the service "
            "is running and reachable, and try again."
        )

    def _rows(self, name: str, method: str, path: str, **what: Any) -> list[dict[str, Any]]:
        """Send a request, and return a list of objects in its answer."""
        response = self._send(method, path, **what)
        status = response.status_code
        try:
            document = response.json()
        except (ValueError, RecursionError):
            document = None
        rows = document.get(name) if isinstance(document, dict) else None
        if status == 401:
            raise NotAvailableError(
                f"{self.url} requires a key: pass it as `key`, or set the variable {KEY}."
            )
        if isinstance(rows, list) and all(isinstance(row, dict) for row in rows):
            return rows
        if status >= 500:
            raise NotAvailableError(f"{self.url} failed (HTTP {status}): {_message(document)}")
        if status >= 400:
            raise InputError(f"{self.url} refused the request: {_message(document)}")
        raise InputError(f"{self.url} is not a mivhead service.")


def _message(document: Any) -> str:
    text = document.get("error") if isinstance(document, dict) else None
    return "no reason was given." if text is None else one_line(str(text))[:300]


def _files(images: ImageLike | Iterable[ImageLike]) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the bytes of every image; files are sent as they are."""
    alone = isinstance(images, str | bytes | os.PathLike | Image.Image) or hasattr(images, "shape")
    many: Any = [images] if alone or hasattr(images, "read") else images
    for position, image in enumerate(many):
        name = f"image {position}"
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


def _requests(files: Iterable[tuple[str, bytes]]) -> Iterator[list[tuple[str, bytes]]]:
    """Split images into requests."""
    part: list[tuple[str, bytes]] = []
    size = 0
    for name, data in files:
        if part and (len(part) == IMAGES or size + len(data) > REQUEST_BYTES):
            yield part
            part, size = [], 0
        part.append((name, data))
        size += len(data)
    if part:
        yield part
