"""The OpenAPI schema of the service, with examples.

Written by hand next to the endpoints, which depend on no model library; schemathesis checks in the
tests that the two agree.
"""

from __future__ import annotations

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
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "mivhead",
            "version": __version__,
            "description": "Few-shot image classifiers over HTTP. If the server requires a key, "
            "send it as `Authorization: Bearer KEY`.",
        },
        "paths": {path: known[path] for path in paths if path in known},
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
