"""The OpenAPI schema of the service: a table of its operations, and the types of what they take.

A type is a Python type; `{"name": type}` is an object, with `?` after the names of what may be
missing; `[type]` is a list; a string names another schema; `(any, type, type)` is one of several;
and any other tuple adds a description or other facts to a type. In the tests, schemathesis checks
that the service does what the schema says.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from types import NoneType, UnionType
from typing import Any, NamedTuple

from mivhead._version import __version__
from mivhead.service.protection import Limits

_NAMES = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object"}
_NAMES |= {list: "array", NoneType: "null"}
_SHARE = (float, {"minimum": 0, "maximum": 1})
_FILE = (str, {"format": "binary"})
_BASE64 = (str, {"contentEncoding": "base64"})
_PIXEL = (  # a PNG of one red pixel
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
)

_SCHEMAS: dict[str, Any] = {
    "Error": (
        {"error": (str, "One sentence.")},
        {"example": {"error": "photo.jpg is empty (0 bytes)."}},
    ),
    "Prediction": (
        {
            "file": (str, "The name that was sent with the image."),
            "label?": (str | int, "The most probable class."),
            "probability?": _SHARE,
            "decision?": (str | int, "A class, `unsure`, or `none of these`."),
            "unknown?": (float | None, "How unlike the shots the image is; larger is more unlike."),
            "top?": (
                [{"label": str | int, "probability": _SHARE}],
                "Classes in descending order of probability.",
            ),
            "error?": str,
        },
        "A prediction or, for an image that cannot be used, an `error`.",
        {
            "example": {
                "file": "photo.jpg",
                "label": "robin",
                "probability": 0.93,
                "decision": "robin",
                "unknown": -1.2,
                "top": [
                    {"label": "robin", "probability": 0.93},
                    {"label": "wren", "probability": 0.07},
                ],
            }
        },
    ),
    "Model": {
        "name": str,
        "file": str,
        "version": (str, "Start of the SHA-256 of the file."),
        "loaded": (str, {"format": "date-time"}),
        "classes": [str],
        "shots?": (dict | None, "Images per class."),
        "estimate?": (
            {"accuracy?": _SHARE, "low?": _SHARE, "high?": _SHARE, "shots?": int},
            "The accuracy to expect on new images if every class is equally frequent, with a 95 % "
            "interval; null if `miv fit` did not estimate it.",
            {"type": ["object", "null"]},
        ),
        "method?": str | None,
        "backbone": str | None,
        "image_size?": int | None,
        "problem": (
            str | None,
            "Why a changed model file is not used; the model that was loaded before continues to "
            "serve.",
        ),
    },
    "Tensor": {"name": str, "shape": [int], "datatype": str, "data": list},
    "Changed": {"change": str, "notes": [str], "when": str, "model": "Model"},
    "Inferred": {"model_name": str, "model_version": str, "id?": str, "outputs": ["Tensor"]},
}

_EVERYWHERE = (401, 403, 405, 408, 413, 421, 500, 503)
_ERRORS = {
    400: "The request cannot be used.",
    401: "A key is required.",
    403: "The request comes from a web page of another site.",
    404: "There is no such model.",
    405: "The path does not support this method.",
    408: "The request was not received in time.",
    413: "The request is too large.",
    415: "The type of the body is not supported.",
    421: "The server is not known by this host name.",
    500: "The server failed.",
    503: "The server is busy; `Retry-After` states when to try again.",
}

_PARAMETERS = {
    name: {
        "name": name,
        "in": "path",
        "required": True,
        "schema": {"type": "string", "minLength": 1},
        "description": description,
        "example": example,
    }
    for name, description, example in (
        ("name", "Name of a model.", "birds"),
        ("version", "Version of the model.", "1"),
        ("shot", "Name of a shot.", "a/1.jpg"),
        ("label", "Name of a class.", "wren"),
    )
} | {
    "model": {
        "name": "model",
        "in": "query",
        "schema": {"type": "string"},
        "description": "Name of the model; may be left out if there is only one.",
    },
    "top": {
        "name": "top",
        "in": "query",
        "schema": {"type": "integer", "minimum": 1, "maximum": 999_999_999},
        "description": "Number of classes to return, the most probable first; by default all.",
    },
    "prior": {
        "name": "prior",
        "in": "query",
        "schema": {"type": "string"},
        "description": "How frequent the classes are: `uniform`, `shots`, or `robin=3,wren=1`.",
    },
}


class _Operation(NamedTuple):
    summary: str
    answer: Any = dict  # the type of the JSON
    body: dict[str, Any] | None = None  # content by media type
    errors: tuple[int, ...] = ()
    query: tuple[str, ...] = ()
    status: int = 200
    description: str = ""
    success: str = "Success."
    content: dict[str, Any] | None = None  # of an answer that is not JSON


def _operations(limits: Limits) -> dict[str, _Operation]:
    """Return everything that a service can do, by method and path."""
    many = {"minItems": 1, "maxItems": limits.max_images}
    closed = {"additionalProperties": False}
    prior = (any, str, (dict, "Frequencies by class."))
    options = {"model?": str, "top?": (int, {"minimum": 1})}
    files = ([_FILE], many)
    image = (any, _BASE64, ({"name?": str, "data": _BASE64}, closed))
    images = {"images": ([image], many)}
    vectors = (
        any,
        ([[float]], {"minItems": 1}),
        (dict, "Nested lists by the name of the tensor: block0.map, block0.token, ..."),
    )
    in_json = {**options, "prior?": prior}
    features = ({"features": vectors, **in_json}, closed)
    body = {"schema": _schema(_FILE)}
    raw = {"image/*": body, "application/octet-stream": body}
    examples = {
        "images": {"value": {"images": [_PIXEL], "top": 3}},
        "named": {"value": {"images": [{"name": "red.png", "data": _PIXEL}]}},
    }
    to_predict = {
        **_form(({"images": files, **options, "prior?": str}, closed)),
        **raw,
        **_json((any, ({**images, **in_json}, closed), features), examples=examples),
        "application/x-safetensors": body,
    }
    to_explain = {
        **_form(({"images": files, "model?": str}, closed)),
        **raw,
        **_json(({**images, "model?": str}, closed), example={"images": [_PIXEL]}),
    }
    to_extract = _json(({"images": ([_BASE64], many)}, closed), example={"images": [_PIXEL]})
    results = {"model": str, "version": str}
    per_image = "One result per image, in their order."
    status = {"status": str, "models?": [str]}
    found = {
        "GET /healthz": _Operation("Whether the process runs", status),
        "GET /readyz": _Operation("Whether requests are served", status),
        "GET /metrics": _Operation(
            "Metrics for Prometheus", content={"text/plain": {"schema": _schema(str)}}
        ),
        "GET /openapi.json": _Operation("This schema"),
        "GET /v1/models": _Operation(
            "List the models",
            {"models": ["Model"], "limits": (dict, "How much the service takes on.")},
        ),
        "GET /v1/models/{name}": _Operation("Describe a model", "Model", errors=(404,)),
        "POST /v1/predict": _Operation(
            "Predict images or features",
            {**results, "predictions": ["Prediction"]},
            to_predict,
            (400, 404, 415),
            ("model", "top", "prior"),
            description=f"At most {limits.max_images} images and {limits.max_bytes:,} bytes per "
            "request. An image that cannot be used has an `error` in place of its prediction; the "
            "status is 400 if there is no image left.",
            success=per_image,
        ),
        "POST /v1/explain": _Operation(
            "Explain predictions",
            {**results, "explanations": ["Prediction"]},
            to_explain,
            (400, 404, 415),
            ("model",),
            description="Where the model looked (`heat`, rows of shares), the closest `shots`, the "
            "`runner_up` and the `votes` of the members of the ensemble.",
            success=per_image,
        ),
        "GET /v1/backbone": _Operation("Describe the backbone"),
        "POST /v1/features": _Operation(
            "Extract features",
            body=to_extract,
            errors=(400, 415),
            success="Tensors block{i}.map (n, C, H, W) and block{i}.token (n, C), shallow to deep.",
            content={
                "application/x-safetensors": {"schema": _schema(str)},
                "application/x-npz": {"schema": _schema(str)},
            },
        ),
        "POST /v1/texts": _Operation(
            "Embed sentences",
            body=_json({"texts": [str]}, example={"texts": ["a photo of a robin"]}),
            errors=(400,),
            success="The tensor block0.token (n, C), in the space of the last block of images.",
            content={"application/x-safetensors": {"schema": _schema(str)}},
        ),
    }
    return found | _change_operations(files) | _protocol_operations() | _label_studio_operations()


def _change_operations(files: Any) -> dict[str, _Operation]:
    """Return the operations that change models, which exist with `--allow-changes`."""
    model, codes = "/v1/models/{name}", (400, 404)
    move = _json({"label": str, "new?": bool}, example={"label": "wren"})
    rename = _json({"name": str, "merge?": bool}, example={"name": "wren"})
    form = _form({"images": files, "label": str})
    changed = "Changed"
    return {
        f"GET {model}/shots": _Operation("List the shots by class", {"shots": dict}, None, codes),
        f"POST {model}/shots": _Operation("Add shots", changed, form, (*codes, 415), status=201),
        f"DELETE {model}/shots/{{shot}}": _Operation("Remove a shot", changed, None, codes),
        f"PATCH {model}/shots/{{shot}}": _Operation("Move a shot", changed, move, codes),
        f"DELETE {model}/classes/{{label}}": _Operation("Remove a class", changed, None, codes),
        f"PATCH {model}/classes/{{label}}": _Operation("Rename a class", changed, rename, codes),
    }


def _protocol_operations() -> dict[str, _Operation]:
    """Return the operations of the Open Inference Protocol."""
    tensor = {"name": "images", "datatype": "BYTES", "shape": [1], "data": [_PIXEL]}
    inputs = {"id?": str, "inputs": (["Tensor"], {"minItems": 1}), "outputs?": [{"name": str}]}
    body = _json(inputs, example={"inputs": [tensor]})
    server = {"name": str, "version": str, "extensions": list}
    found = {
        "GET /v2": _Operation("Describe the server", server),
        "GET /v2/health/live": _Operation("Whether the server runs", {"live": bool}),
        "GET /v2/health/ready": _Operation("Whether the server serves", {"ready": bool}),
    }
    for model in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
        ready = {"name": str, "ready": bool}
        found[f"GET {model}"] = _Operation("Describe a model", errors=(404,))
        found[f"GET {model}/ready"] = _Operation("Whether a model serves", ready, errors=(404,))
        found[f"POST {model}/infer"] = _Operation("Predict", "Inferred", body, (400, 404))
    return found


def _label_studio_operations() -> dict[str, _Operation]:
    """Return the operations that Label Studio calls."""
    interface = (
        '<View><Image name="image" value="$image"/><Choices name="class" toName="image"/></View>'
    )
    task = {"data": {"image": f"data:image/png;base64,{_PIXEL}"}}
    tasks = _json(
        {"tasks": [{"data": dict}], "label_config": str},
        example={"tasks": [task], "label_config": interface},
    )
    setup = _json({"schema?": str}, example={"schema": interface})
    up, version = {"status": str, "model_class?": str}, {"model_version": str}
    results = {"results": [dict], "model_version?": str}
    found = {}
    for prefix in ("", "/label-studio/{name}"):
        name, codes = "Label Studio: ", (400, 404)
        found[f"GET {prefix}/health"] = _Operation(f"{name}health", up, None, codes)
        found[f"POST {prefix}/setup"] = _Operation(f"{name}setup", version, setup, codes)
        found[f"POST {prefix}/predict"] = _Operation(f"{name}predict tasks", results, tasks, codes)
    return found


def openapi(paths: Collection[str], limits: Limits) -> dict[str, Any]:
    """Return the schema of the paths that a service has.

    >>> sorted(openapi(["/healthz"], Limits())["paths"])
    ['/healthz']
    """
    served = {re.sub(":path}", "}", path) for path in paths}
    found: dict[str, Any] = {}
    for key, operation in _operations(limits).items():
        method, path = key.split()
        if path in served:
            found.setdefault(path, {})[method.lower()] = _describe_operation(path, operation)
    errors = {
        str(code): {"description": text, "content": _json("Error")}
        for code, text in _ERRORS.items()
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "mivhead",
            "version": __version__,
            "description": "Few-shot image classifiers over HTTP. If the server requires a key, "
            "send it as `Authorization: Bearer KEY`.",
        },
        "paths": found,
        "components": {
            "schemas": {name: _schema(kind) for name, kind in _SCHEMAS.items()},
            "parameters": _PARAMETERS,
            "responses": errors,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _schema(kind: Any) -> dict[str, Any]:
    """Turn a type, written as at the top of this module, into a JSON schema.

    >>> _schema({"name": str, "sizes?": [int | None]})["required"]
    ['name']
    """
    if isinstance(kind, tuple):
        if kind[0] is any:
            return {"oneOf": [_schema(each) for each in kind[1:]]}
        found = _schema(kind[0])
        for fact in kind[1:]:
            found |= {"description": fact} if isinstance(fact, str) else fact
        return found
    if isinstance(kind, dict):
        return {
            "type": "object",
            "required": [name for name in kind if not name.endswith("?")],
            "properties": {name.rstrip("?"): _schema(each) for name, each in kind.items()},
        }
    if isinstance(kind, list):
        return {"type": "array", "items": _schema(kind[0])}
    if isinstance(kind, str):
        return {"$ref": f"#/components/schemas/{kind}"}
    if isinstance(kind, UnionType):
        return {"type": [_NAMES[each] for each in kind.__args__]}
    return {"type": _NAMES[kind]}


def _json(kind: Any, **more: Any) -> dict[str, Any]:
    return {"application/json": {"schema": _schema(kind), **more}}


def _form(kind: Any) -> dict[str, Any]:
    return {"multipart/form-data": {"schema": _schema(kind)}}


def _describe_operation(path: str, operation: _Operation) -> dict[str, Any]:
    content = operation.content or _json(operation.answer)
    codes = sorted({*operation.errors, *_EVERYWHERE})
    found: dict[str, Any] = {
        "summary": operation.summary,
        "responses": {
            str(operation.status): {"description": operation.success, "content": content},
            **{str(code): {"$ref": f"#/components/responses/{code}"} for code in codes},
        },
    }
    if operation.description:
        found["description"] = operation.description
    if names := [*re.findall("{(.*?)}", path), *operation.query]:
        found["parameters"] = [{"$ref": f"#/components/parameters/{name}"} for name in names]
    if operation.body is not None:
        found["requestBody"] = {"required": True, "content": operation.body}
    return found
