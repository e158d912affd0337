"""A machine-learning backend for Label Studio: its users get predictions as pre-labels.

Connect it in the settings of a project, under Model, with the address of the service (or
`/label-studio/NAME` of it, for one of several models). The labelling interface needs one `Choices`
for an `Image`.

Images are read from `data:` URLs and from the one Label Studio server that the operator names; no
request can make the service fetch anything else.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any
from urllib.parse import urljoin, urlsplit
from xml.etree import ElementTree

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from mivhead._util.http import HttpClient
from mivhead.errors import ImageError, InputError, MivError, NotAvailableError
from mivhead.service.engine import Engine, Unreadable
from mivhead.service.models import ServedModel
from mivhead.service.observation import note
from mivhead.service.requests import MAX_NAME, Upload, decode_base64, read_json

NONE_OF_THESE = "none of these"
FETCH_SECONDS = 20.0


@dataclass(frozen=True)
class LabelStudio:
    """The Label Studio server whose images may be fetched."""

    url: str  # its address, such as `http://localhost:8080`
    # Name of the environment variable that holds an access token of Label Studio
    key: str | None = None

    def __post_init__(self) -> None:
        if urlsplit(self.url).scheme not in ("http", "https") or not urlsplit(self.url).hostname:
            raise InputError(f"The address of Label Studio must be a URL, got {self.url!r:.80}.")
        if self.key is not None and not os.environ.get(self.key, "").strip():
            raise NotAvailableError(
                f"The environment variable {self.key}, which holds the access token of Label "
                "Studio, is not set."
            )

    def resolve(self, address: str) -> str:
        """Return the full address of an image, if it is on this server."""
        try:
            full = urljoin(self.url.rstrip("/") + "/", address)
            same = urlsplit(full)[:2] == urlsplit(self.url)[:2]
        except ValueError:
            same = False
        if not same:
            raise ImageError(
                f"{address!r:.80} is not an image on {self.url}: only images of this server are "
                "fetched."
            )
        return full

    def fetch(self, address: str, max_bytes: int) -> bytes:
        """Return an image of this server."""
        url = self.resolve(address)
        token = os.environ.get(self.key or "", "").strip()
        headers = {"Authorization": f"Token {token}"} if token else {}
        client = HttpClient(self.url, extra="serve", timeout=FETCH_SECONDS, attempts=1)
        try:
            answer = client.send("GET", url, max_bytes=max_bytes, headers=headers)
        except MivError as error:
            reason = str(error).replace(token, "***") if token else str(error)
            shown = urlsplit(url).path
            raise ImageError(
                f"{shown:.200} cannot be fetched from Label Studio: {reason}"
            ) from error
        finally:
            client.http.close()
        if answer.status != 200:
            shown = urlsplit(url).path
            raise ImageError(f"Label Studio answered {answer.status} for {shown:.200}.")
        return answer.body


def label_studio_routes(engine: Engine, source: LabelStudio | None) -> list[BaseRoute]:
    """Return the endpoints that Label Studio calls."""

    async def health(request: Request) -> Response:
        """Report to Label Studio that the backend runs."""
        served = engine.models.get(request.path_params.get("name"))
        return JSONResponse({"status": "UP", "model_class": served.name})

    async def setup(request: Request) -> Response:
        """Accept a project whose labelling interface can be predicted."""
        served = engine.models.get(request.path_params.get("name"))
        document = read_json(await request.body())
        if document.get("schema", "") != "":  # empty until the project has an interface
            read_config(document["schema"])
        return JSONResponse({"model_version": served.version})

    async def predict(request: Request) -> Response:
        """Predict the images of tasks."""
        served = engine.models.get(request.path_params.get("name"))
        document = await to_thread.run_sync(read_json, await request.body())
        tasks = document.get("tasks")
        if not isinstance(tasks, list) or not all(isinstance(each, dict) for each in tasks):
            raise InputError('Send {"tasks": [{"data": {...}}, ...], "label_config": "..."}.')
        if len(tasks) > engine.limits.max_images:
            raise InputError(f"At most {engine.limits.max_images} tasks per request are allowed.")
        config = read_config(document.get("label_config"))
        note(request.scope, model=served.name, images=len(tasks))
        addresses = [_address(task, config.variable) for task in tasks]
        uploads = await fetch_all(addresses, source, engine.limits.max_bytes)
        found = await engine.predict(served, uploads) if uploads else []
        for each in found:
            if isinstance(each, Unreadable):
                raise ImageError(each.reason)
        results = [_result(each, config, served) for each in found]
        return JSONResponse({"results": results, "model_version": served.version})

    routes: list[BaseRoute] = []
    for prefix in ("", "/label-studio/{name}"):
        routes += [
            Route(f"{prefix}/health", health),
            Route(f"{prefix}/setup", setup, methods=["POST"]),
            Route(f"{prefix}/predict", predict, methods=["POST"]),
        ]
    return routes


@dataclass(frozen=True)
class Config:
    """What matters in a labelling interface."""

    choices: str  # name of the tag
    image: str  # name of the tag
    variable: str  # key of the image in the data of a task
    labels: frozenset[str]  # that can be chosen; empty if they come from the tasks


def read_config(text: Any) -> Config:
    """Read a labelling interface.

    >>> read_config('<View><Image name="i" value="$image"/><Choices name="c" toName="i">'
    ...             '<Choice value="cat"/></Choices></View>')
    Config(choices='c', image='i', variable='image', labels=frozenset({'cat'}))
    """
    if not isinstance(text, str) or "<!" in text:  # no entities, which can expand without end
        raise InputError("The labelling interface must be XML, without declarations.")
    try:
        root = ElementTree.fromstring(text)
    except (ElementTree.ParseError, ValueError, RecursionError) as error:
        raise InputError("The labelling interface is not XML.") from error
    images = {tag.get("name"): tag.get("value", "") for tag in root.iter("Image")}
    for tag in root.iter("Choices"):
        image = tag.get("toName")
        value = images.get(image, "")
        if tag.get("name") and image and value.startswith("$"):
            labels = {each.get("value", "") for each in tag.iter("Choice")}
            return Config(tag.get("name", ""), image, value[1:], frozenset(labels))
    raise InputError(
        "The labelling interface has no <Choices> for an <Image>: add both, and connect them with "
        "toName."
    )


def _address(task: dict[str, Any], variable: str) -> str:
    data = task.get("data")
    address = data.get(variable) if isinstance(data, dict) else None
    if not isinstance(address, str):
        raise InputError(f"A task has no image in its data under {variable!r:.80}.")
    return address


def _result(prediction: Any, config: Config, served: ServedModel) -> dict[str, Any]:
    label = str(prediction.label)
    known = not config.labels or label in config.labels
    result = []
    if known and prediction.decision != NONE_OF_THESE:
        result.append(
            {
                "from_name": config.choices,
                "to_name": config.image,
                "type": "choices",
                "value": {"choices": [label]},
                "score": prediction.probability,
            }
        )
    return {
        "result": result,
        "score": prediction.probability,
        "model_version": served.version,
    }


async def fetch_all(
    addresses: list[str], source: LabelStudio | None, max_bytes: int
) -> list[Upload]:
    """Fetch images from `data:` URLs and from Label Studio, within a number of bytes."""
    uploads: list[Upload] = []
    for i, address in enumerate(addresses):
        if address.startswith("data:"):
            uploads.append(Upload(f"image {i}", decode_base64(address, i)))
            continue
        if source is None:
            raise InputError(
                "Images on Label Studio cannot be fetched: start the service with "
                "--label-studio URL."
            )
        data = await to_thread.run_sync(source.fetch, address, max_bytes, abandon_on_cancel=True)
        max_bytes -= len(data)
        uploads.append(Upload(address.rpartition("/")[2][:MAX_NAME], data))
    return uploads
