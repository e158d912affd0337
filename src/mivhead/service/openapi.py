"""The OpenAPI schema of the service, with examples.

Written by hand next to the endpoints, which depend on no model library; schemathesis checks in the
tests that the two agree.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from mivhead._version import __version__
from mivhead.service.protection import Limits

_PIXEL = (  # a PNG of one red pixel
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
)


def openapi(paths: Collection[str], limits: Limits) -> dict[str, Any]:
    """Return the schema of the paths that a service has.

    >>> sorted(openapi(["/healthz"], Limits())["paths"])
    ['/healthz']
    """
    known = _paths(limits)
    found = {re.sub(":path}", "}", path) for path in paths}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "mivhead",
            "version": __version__,
            "description": "Few-shot image classifiers over HTTP. If the server requires a key, "
            "send it as `Authorization: Bearer KEY`.",
        },
        "paths": {path: known[path] for path in known if path in found},
        "components": {"schemas": _SCHEMAS, "securitySchemes": _SECURITY},
        "security": [{}, {"key": []}],
    }


_SECURITY = {"key": {"type": "http", "scheme": "bearer"}}

_NUMBER = {"type": "number", "minimum": 0, "maximum": 1}
_LABEL = {"type": ["string", "integer"]}

_SCHEMAS: dict[str, Any] = {
    "Error": {
        "type": "object",
        "required": ["error"],
        "properties": {"error": {"type": "string", "description": "One sentence."}},
        "example": {"error": "photo.jpg is empty (0 bytes)."},
    },
    "Prediction": {
        "type": "object",
        "required": ["file"],
        "description": "A prediction or, for an image that cannot be used, an `error`.",
        "properties": {
            "file": {"type": "string", "description": "The name that was sent with the image."},
            "label": {**_LABEL, "description": "The most probable class."},
            "probability": _NUMBER,
            "decision": {
                **_LABEL,
                "description": "A class, `unsure`, or `none of these`.",
            },
            "unknown": {
                "type": ["number", "null"],
                "description": "How unlike the shots the image is; larger is more unlike.",
            },
            "top": {
                "type": "array",
                "description": "Classes in descending order of probability.",
                "items": {
                    "type": "object",
                    "required": ["label", "probability"],
                    "properties": {"label": _LABEL, "probability": _NUMBER},
                },
            },
            "error": {"type": "string"},
        },
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
        },
    },
    "Model": {
        "type": "object",
        "required": ["name", "file", "version", "loaded", "classes", "backbone", "problem"],
        "properties": {
            "name": {"type": "string"},
            "file": {"type": "string"},
            "version": {"type": "string", "description": "Start of the SHA-256 of the file."},
            "loaded": {"type": "string", "format": "date-time"},
            "classes": {"type": "array", "items": {"type": "string"}},
            "shots": {"type": ["object", "null"], "description": "Images per class."},
            "estimate": {
                "type": ["object", "null"],
                "description": "Accuracy of out-of-fold predictions of the shots, with a 95 % "
                "confidence interval.",
                "properties": {
                    "accuracy": _NUMBER,
                    "low": _NUMBER,
                    "high": _NUMBER,
                    "shots": {"type": "integer"},
                },
            },
            "method": {"type": ["string", "null"]},
            "backbone": {"type": ["string", "null"]},
            "image_size": {"type": ["integer", "null"]},
            "problem": {
                "type": ["string", "null"],
                "description": "Why a changed model file is not used; the model that was loaded "
                "before continues to serve.",
            },
        },
    },
}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _json(schema: Any, description: str) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _errors(*codes: int) -> dict[str, Any]:
    texts = {
        400: "The request cannot be used.",
        404: "There is no such model.",
        405: "The path does not support this method.",
        408: "The request was not received in time.",
        413: "The request is too large.",
        415: "The type of the body is not supported.",
        503: "The server is busy; `Retry-After` says when to try again.",
    }
    every = (401, 403, 405, 408, 413, 421, 500, 503)
    texts |= {
        401: "A key is required.",
        403: "The request comes from a web page of another site.",
        421: "The server is not known by this host name.",
        500: "The server failed.",
    }
    return {str(code): _json(_ref("Error"), texts[code]) for code in sorted({*codes, *every})}


def _get(summary: str, schema: Any, *errors: int, **more: Any) -> dict[str, Any]:
    ok = {"200": _json(schema, "Success.")}
    return {"get": {"summary": summary, "responses": {**ok, **_errors(*errors)}, **more}}


_STATUS = {
    "type": "object",
    "required": ["status"],
    "properties": {
        "status": {"type": "string"},
        "models": {"type": "array", "items": {"type": "string"}},
    },
}
_NAME = {
    "name": "name",
    "in": "path",
    "required": True,
    "schema": {"type": "string", "minLength": 1},
    "description": "Name of a model.",
    "example": "birds",
}
_OPTIONS = [
    {
        "name": "model",
        "in": "query",
        "schema": {"type": "string"},
        "description": "Name of the model; may be left out if there is only one.",
    },
    {
        "name": "top",
        "in": "query",
        "schema": {"type": "integer", "minimum": 1, "maximum": 999_999_999},
        "description": "Number of classes to return, the most probable first; by default all.",
    },
]


def _images_body(limits: Limits) -> dict[str, Any]:
    base64 = {"type": "string", "contentEncoding": "base64"}
    image = {
        "oneOf": [
            base64,
            {
                "type": "object",
                "required": ["data"],
                "properties": {"name": {"type": "string"}, "data": base64},
                "additionalProperties": False,
            },
        ]
    }
    numbers = {"type": "array", "items": {"type": "number"}}
    options = {
        "model": {"type": "string"},
        "top": {"type": "integer", "minimum": 1},
    }
    file = {"type": "string", "format": "binary"}
    files = {"type": "array", "items": file, "minItems": 1, "maxItems": limits.max_images}
    return {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["images"],
                    "properties": {"images": files, **options},
                    "additionalProperties": False,
                }
            },
            "image/*": {"schema": file},
            "application/octet-stream": {"schema": file},
            "application/json": {
                "schema": {
                    "oneOf": [
                        {
                            "type": "object",
                            "required": ["images"],
                            "properties": {
                                "images": {
                                    "type": "array",
                                    "items": image,
                                    "minItems": 1,
                                    "maxItems": limits.max_images,
                                },
                                **options,
                            },
                            "additionalProperties": False,
                        },
                        {
                            "type": "object",
                            "required": ["features"],
                            "properties": {
                                "features": {
                                    "oneOf": [
                                        {"type": "array", "items": numbers, "minItems": 1},
                                        {
                                            "type": "object",
                                            "description": "Nested lists by the name of the "
                                            "tensor: block0.map, block0.token, ...",
                                        },
                                    ]
                                },
                                **options,
                            },
                            "additionalProperties": False,
                        },
                    ]
                },
                "examples": {
                    "images": {"value": {"images": [_PIXEL], "top": 3}},
                    "named": {"value": {"images": [{"name": "red.png", "data": _PIXEL}]}},
                },
            },
            "application/x-safetensors": {"schema": file},
        },
    }


def _explain_body(limits: Limits) -> dict[str, Any]:
    """Return the forms of `/v1/predict` that hold images."""
    content = dict(_images_body(limits)["content"])
    del content["application/x-safetensors"]
    images = content["application/json"]["schema"]["oneOf"][0]
    form = content["multipart/form-data"]["schema"]
    for schema in (images, form):
        schema["properties"] = {k: v for k, v in schema["properties"].items() if k != "top"}
    content["application/json"] = {"schema": images, "example": {"images": [_PIXEL]}}
    return {"required": True, "content": content}


def _paths(limits: Limits) -> dict[str, Any]:
    predictions = {
        "type": "object",
        "required": ["model", "version", "predictions"],
        "properties": {
            "model": {"type": "string"},
            "version": {"type": "string"},
            "predictions": {"type": "array", "items": _ref("Prediction")},
        },
    }
    text = {"text/plain": {"schema": {"type": "string"}}}
    return {
        "/healthz": _get("Whether the process runs", _STATUS),
        "/readyz": _get("Whether requests are served", _STATUS),
        "/metrics": {
            "get": {
                "summary": "Metrics for Prometheus",
                "responses": {"200": {"description": "Success.", "content": text}, **_errors()},
            }
        },
        "/openapi.json": _get("This schema", {"type": "object"}),
        "/v1/models": _get(
            "List the models",
            {
                "type": "object",
                "required": ["models", "limits"],
                "properties": {
                    "models": {"type": "array", "items": _ref("Model")},
                    "limits": {"type": "object", "description": "How much the service takes on."},
                },
            },
        ),
        "/v1/models/{name}": _get("Describe a model", _ref("Model"), 404, parameters=[_NAME]),
        "/v1/predict": {
            "post": {
                "summary": "Predict images or features",
                "description": f"At most {limits.max_images} images and {limits.max_bytes:,} bytes "
                "per request. An image that cannot be used has an `error` in place of its "
                "prediction; the status is 400 if there is no image left.",
                "parameters": _OPTIONS,
                "requestBody": _images_body(limits),
                "responses": {
                    "200": _json(predictions, "One result per image, in their order."),
                    **_errors(400, 404, 415),
                },
            }
        },
        "/v1/explain": {
            "post": {
                "summary": "Say why images get their names",
                "description": "Where the model looked (`heat`, rows of shares), the closest "
                "`shots`, the `runner_up` and the `votes` of the members of the ensemble.",
                "parameters": _OPTIONS[:1],
                "requestBody": _explain_body(limits),
                "responses": {
                    "200": _json(
                        _object(
                            ["model", "version", "explanations"],
                            model=_STRING,
                            version=_STRING,
                            explanations={"type": "array", "items": _ref("Prediction")},
                        ),
                        "One result per image, in their order.",
                    ),
                    **_errors(400, 404, 415),
                },
            }
        },
        **_protocol_paths(),
        **_label_studio_paths(),
        **_change_paths(limits),
        "/v1/backbone": _get("Describe the backbone", {"type": "object"}),
        "/v1/features": {
            "post": {
                "summary": "Extract features",
                "requestBody": {
                    "required": True,
                    "content": {
                        "application/json": {
                            "schema": {
                                "type": "object",
                                "required": ["images"],
                                "properties": {
                                    "images": {
                                        "type": "array",
                                        "items": {"type": "string", "contentEncoding": "base64"},
                                        "minItems": 1,
                                        "maxItems": limits.max_images,
                                    }
                                },
                                "additionalProperties": False,
                            },
                            "example": {"images": [_PIXEL]},
                        }
                    },
                },
                "responses": {
                    "200": {
                        "description": "Tensors block{i}.map (n, C, H, W) and block{i}.token "
                        "(n, C), shallow to deep.",
                        "content": {
                            "application/x-safetensors": {"schema": {"type": "string"}},
                            "application/x-npz": {"schema": {"type": "string"}},
                        },
                    },
                    **_errors(400, 415),
                },
            }
        },
    }


def _operation(
    summary: str, body: Any, schema: Any, *errors: int, code: int = 200, **more: Any
) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {str(code): _json(schema, "Success."), **_errors(*errors)},
        **more,
    }
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": body}}
    return operation


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required, "properties": properties}


_STRING = {"type": "string"}
_ANY = {"type": "object"}


def _protocol_paths() -> dict[str, Any]:
    """Return the paths of the Open Inference Protocol."""
    shape = {"type": "array", "items": {"type": "integer"}}
    tensor = _object(
        ["name", "shape", "datatype", "data"],
        name=_STRING,
        shape=shape,
        datatype=_STRING,
        data={"type": "array"},
    )
    body = {
        "schema": _object(
            ["inputs"],
            id=_STRING,
            inputs={"type": "array", "items": tensor, "minItems": 1},
            outputs={"type": "array", "items": _object(["name"], name=_STRING)},
        ),
        "example": {
            "inputs": [{"name": "images", "datatype": "BYTES", "shape": [1], "data": [_PIXEL]}]
        },
    }
    answer = _object(
        ["model_name", "model_version", "outputs"],
        model_name=_STRING,
        model_version=_STRING,
        id=_STRING,
        outputs={"type": "array", "items": tensor},
    )
    flag = {"type": "boolean"}
    server = _object(["name", "version", "extensions"], name=_STRING, version=_STRING)
    paths = {
        "/v2": _get("Describe the server", server),
        "/v2/health/live": _get("Whether the server runs", _object(["live"], live=flag)),
        "/v2/health/ready": _get("Whether the server serves", _object(["ready"], ready=flag)),
    }
    version = {**_NAME, "name": "version", "description": "Version of the model.", "example": "1"}
    for prefix, names in (
        ("/v2/models/{name}", [_NAME]),
        ("/v2/models/{name}/versions/{version}", [_NAME, version]),
    ):
        paths[prefix] = _get("Describe a model", _ANY, 404, parameters=names)
        ready = _object(["name", "ready"], name=_STRING, ready=flag)
        paths[f"{prefix}/ready"] = _get("Whether a model serves", ready, 404, parameters=names)
        infer = _operation("Predict", body, answer, 400, 404, parameters=names)
        paths[f"{prefix}/infer"] = {"post": infer}
    return paths


def _label_studio_paths() -> dict[str, Any]:
    """Return the paths that Label Studio calls."""
    tasks = {"type": "array", "items": _object(["data"], data=_ANY)}
    config = (
        '<View><Image name="image" value="$image"/><Choices name="class" toName="image"/></View>'
    )
    predict = {
        "schema": _object(["tasks", "label_config"], tasks=tasks, label_config=_STRING),
        "example": {
            "tasks": [{"data": {"image": f"data:image/png;base64,{_PIXEL}"}}],
            "label_config": config,
        },
    }
    setup = {"schema": _object([], schema=_STRING), "example": {"schema": config}}
    results = {"type": "array", "items": _ANY}
    paths: dict[str, Any] = {}
    for prefix, names in (("", list[Any]()), ("/label-studio/{name}", [_NAME])):
        up = _object(["status"], status=_STRING, model_class=_STRING)
        paths[f"{prefix}/health"] = _get("Label Studio: health", up, 400, 404, parameters=names)
        answer = _object(["model_version"], model_version=_STRING)
        paths[f"{prefix}/setup"] = {
            "post": _operation("Label Studio: setup", setup, answer, 400, 404, parameters=names)
        }
        answer = _object(["results"], results=results, model_version=_STRING)
        paths[f"{prefix}/predict"] = {
            "post": _operation(
                "Label Studio: predict tasks", predict, answer, 400, 404, parameters=names
            )
        }
    return paths


def _change_paths(limits: Limits) -> dict[str, Any]:
    """Return the paths that change models, which exist with `--allow-changes`."""
    changed = _object(
        ["change", "notes", "when", "model"],
        change=_STRING,
        notes={"type": "array", "items": _STRING},
        when=_STRING,
        model=_ref("Model"),
    )
    file = {"type": "string", "format": "binary"}
    files = {"type": "array", "items": file, "minItems": 1, "maxItems": limits.max_images}
    shots = _object(["shots"], shots=_ANY)
    prefix = "/v1/models/{name}"
    show = _get("List the shots by class", shots, 400, 404, parameters=[_NAME])
    add = _operation("Add shots", None, changed, 400, 404, 415, code=201, parameters=[_NAME])
    form = {"schema": _object(["images", "label"], images=files, label=_STRING)}
    add["requestBody"] = {"required": True, "content": {"multipart/form-data": form}}
    shot = [
        _NAME,
        {**_NAME, "name": "shot", "description": "Name of a shot.", "example": "a/1.jpg"},
    ]
    label = [
        _NAME,
        {**_NAME, "name": "label", "description": "Name of a class.", "example": "wren"},
    ]
    flag = {"type": "boolean"}
    move = {"schema": _object(["label"], label=_STRING, new=flag), "example": {"label": "wren"}}
    name = {"schema": _object(["name"], name=_STRING, merge=flag), "example": {"name": "wren"}}
    codes = (400, 404)
    return {
        f"{prefix}/shots": {**show, "post": add},
        f"{prefix}/shots/{{shot}}": {
            "delete": _operation("Remove a shot", None, changed, *codes, parameters=shot),
            "patch": _operation("Move a shot", move, changed, *codes, parameters=shot),
        },
        f"{prefix}/classes/{{label}}": {
            "delete": _operation("Remove a class", None, changed, *codes, parameters=label),
            "patch": _operation("Rename a class", name, changed, *codes, parameters=label),
        },
    }
