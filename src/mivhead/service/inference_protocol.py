"""The Open Inference Protocol, version 2, as KServe, Triton and others speak it (`/v2/models/...`).

Inputs are `images` (BYTES: base64 of image files; or UINT8: pixels of shape [n, height, width, 3]),
or features (`features` of shape [n, channels], or `block0.map`, `block0.token`, ...). Outputs are
`label`, `probability`, `decision` (one per image) and `probabilities` [n, classes].
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from anyio import to_thread
from numpy.typing import NDArray
from PIL import Image
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from mivhead._version import __version__
from mivhead.errors import ImageError, InputError
from mivhead.service.engine import Engine, Unreadable
from mivhead.service.models import ServedModel
from mivhead.service.observation import note
from mivhead.service.protection import Refusal
from mivhead.service.requests import Upload, decode_base64, read_json

FLOATS = {"FP16": np.float16, "FP32": np.float32, "FP64": np.float64}


def protocol_routes(engine: Engine) -> list[BaseRoute]:
    """Return the endpoints of the protocol."""
    models = engine.models

    def find(request: Request) -> ServedModel:
        served = models.get(request.path_params["name"])
        version = request.path_params.get("version", served.version)
        if version != served.version:
            raise Refusal(404, f"{served.name} has only the version {served.version}.")
        return served

    async def server(_: Request) -> Response:
        """Describe the server."""
        return JSONResponse({"name": "mivhead", "version": __version__, "extensions": []})

    async def live(_: Request) -> Response:
        """Report that the server runs."""
        return JSONResponse({"live": True})

    async def ready(_: Request) -> Response:
        """Report that the server is ready."""
        return JSONResponse({"ready": True})

    async def model(request: Request) -> Response:
        """Describe a model."""
        return JSONResponse(_metadata(find(request)))

    async def model_ready(request: Request) -> Response:
        """Report that a model is loaded."""
        return JSONResponse({"name": find(request).name, "ready": True})

    async def infer(request: Request) -> Response:
        """Predict."""
        served = find(request)
        document = await to_thread.run_sync(read_json, await request.body())
        inputs = _read_inputs(document, engine.limits.max_images)
        note(request.scope, model=served.name)
        if set(inputs) == {"images"}:
            found = await _predict_images(engine, served, inputs["images"])
        elif inputs and "images" not in inputs:
            only = inputs.get("features") if len(inputs) == 1 else None
            found = await engine.predict_features(served, inputs if only is None else only)
        else:
            raise InputError("Send either the input `images` or features.")
        return JSONResponse(_answer(document, served, found))

    routes: list[BaseRoute] = [
        Route("/v2", server),
        Route("/v2/health/live", live),
        Route("/v2/health/ready", ready),
    ]
    for prefix in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
        routes += [
            Route(prefix, model),
            Route(f"{prefix}/ready", model_ready),
            Route(f"{prefix}/infer", infer, methods=["POST"]),
        ]
    return routes


def _metadata(served: ServedModel) -> dict[str, Any]:
    classes = served.facts["classes"]
    return {
        "name": served.name,
        "versions": [served.version],
        "platform": "mivhead",
        "inputs": [{"name": "images", "datatype": "BYTES", "shape": [-1]}],
        "outputs": [
            {"name": "label", "datatype": "BYTES", "shape": [-1]},
            {"name": "probability", "datatype": "FP64", "shape": [-1]},
            {"name": "decision", "datatype": "BYTES", "shape": [-1]},
            {"name": "probabilities", "datatype": "FP64", "shape": [-1, len(classes)]},
        ],
        "parameters": {"classes": classes},
    }


def _read_inputs(document: dict[str, Any], max_images: int) -> dict[str, Any]:
    if not isinstance(document.get("id", ""), str):
        raise InputError("The id of a request must be a string.")
    inputs = document.get("inputs")
    if not isinstance(inputs, list) or not all(isinstance(each, dict) for each in inputs):
        raise InputError('Send {"inputs": [{"name", "shape", "datatype", "data"}, ...]}.')
    found: dict[str, Any] = {}
    for each in inputs:
        name, kind, data = (each.get(key) for key in ("name", "datatype", "data"))
        shape = each.get("shape")
        if not isinstance(name, str) or name in found:
            raise InputError("Every input must have its own name.")
        if not isinstance(shape, list) or not _is_shape(shape):
            raise InputError(f"The shape of {name!r:.80} must be a list of positive integers.")
        if not isinstance(data, list):
            raise InputError(f"The data of {name!r:.80} must be a list.")
        if name == "images" and not 1 <= shape[0] <= max_images:
            raise InputError(f"A request must have 1 to {max_images} images, got {shape[0]}.")
        if name == "images" and kind == "BYTES":
            found[name] = _read_files(data, shape)
        elif name == "images" and kind == "UINT8":
            found[name] = _read_pixels(data, shape)
        elif name != "images" and isinstance(kind, str) and kind in FLOATS:
            found[name] = _read_numbers(data, shape, name, np.dtype(FLOATS[kind]))
        else:
            raise InputError(
                f"The input {name!r:.80} has the datatype {kind!r:.20}: images are BYTES or UINT8, "
                f"features {', '.join(FLOATS)}."
            )
    return found


def _is_shape(values: list[Any]) -> bool:
    return bool(values) and all(type(n) is int and n > 0 for n in values)


def _read_files(data: list[Any], shape: list[int]) -> list[Upload]:
    if shape != [len(data)] or not all(isinstance(text, str) for text in data):
        raise InputError(
            "The BYTES of images must be strings of base64, as many as the shape says."
        )
    return [Upload(f"image {i}", decode_base64(text, i)) for i, text in enumerate(data)]


def _read_pixels(data: list[Any], shape: list[int]) -> list[Image.Image]:
    if len(shape) != 4 or shape[3] != 3:
        raise InputError(f"Pixels must have the shape [n, height, width, 3], got {shape}.")
    pixels = _read_numbers(data, shape, "images", np.dtype(np.float64))
    if ((pixels < 0) | (pixels > 255) | (pixels != np.round(pixels))).any():
        raise InputError("Pixels must be integers from 0 to 255.")
    return [Image.fromarray(each) for each in pixels.astype(np.uint8)]


def _read_numbers(
    data: list[Any], shape: list[int], name: str, dtype: np.dtype[Any]
) -> NDArray[Any]:
    """Read a tensor whose data is flat or nested."""
    try:
        values = np.asarray(data)
    except ValueError:  # rows of different lengths
        values = np.empty(0, object)
    if values.dtype.kind not in "iuf" or values.size != math.prod(shape):
        raise InputError(f"The data of {name!r:.80} must be as many numbers as its shape says.")
    with np.errstate(over="ignore"):  # an infinite value is refused with a better message later
        return values.reshape(shape).astype(dtype)


async def _predict_images(engine: Engine, served: ServedModel, images: list[Any]) -> list[Any]:
    results = await engine.predict(served, images)
    for each in results:
        if isinstance(each, Unreadable):
            raise ImageError(each.reason)
    return results


def _answer(document: dict[str, Any], served: ServedModel, found: list[Any]) -> dict[str, Any]:
    classes = served.model.classes_.tolist()
    n = len(found)
    outputs = [
        _output("label", "BYTES", [n], [str(each.label) for each in found]),
        _output("probability", "FP64", [n], [each.probability for each in found]),
        _output("decision", "BYTES", [n], [str(each.decision) for each in found]),
        _output(
            "probabilities",
            "FP64",
            [n, len(classes)],
            [each.probabilities[label] for each in found for label in classes],
        ),
    ]
    if "outputs" in document:
        known = {each["name"]: each for each in outputs}
        given = document["outputs"] if isinstance(document["outputs"], list) else [None]
        names = [str(each.get("name")) if isinstance(each, dict) else "" for each in given]
        if any(name not in known for name in names):
            raise InputError(f"The outputs are {', '.join(known)}.")
        outputs = [known[name] for name in names]
    answer: dict[str, Any] = {"model_name": served.name, "model_version": served.version}
    if "id" in document:
        answer["id"] = document["id"]
    return {**answer, "outputs": outputs}


def _output(name: str, kind: str, shape: list[int], data: list[Any]) -> dict[str, Any]:
    return {"name": name, "datatype": kind, "shape": shape, "data": data}
