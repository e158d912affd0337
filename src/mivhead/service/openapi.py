"""The OpenAPI schema of the service."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from mivhead._version import __version__

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "number"}
LABEL: Schema = {"type": ["string", "integer", "number", "boolean"]}
FILE: Schema = {"type": "string", "format": "binary"}

ERRORS = (400, 401, 403, 404, 405, 408, 413, 415, 421, 500, 503)


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _object(required: Schema, **optional: Schema) -> Schema:
    return {"type": "object", "properties": required | optional, "required": list(required)}


def _described(schema: Schema, description: str) -> Schema:
    return {**schema, "description": description}


def _operation(summary: str, answer: Schema, media: str = "application/json") -> Schema:
    content = {"application/json": {"schema": _object({"error": _described(TEXT, "The reason.")})}}
    errors = {
        str(status): {"description": HTTPStatus(status).phrase, "content": content}
        for status in ERRORS
    }
    success = {"description": "Success.", "content": {media: {"schema": answer}}}
    return {"summary": summary, "responses": {"200": success, **errors}}


PREDICTION = _described(
    _object(
        {"file": _described(TEXT, "The name that was sent with the image.")},
        decision=_described(LABEL, "A class, `unsure`, or `none of these`."),
        closest=_described(LABEL, "The most probable class."),
        probability=NUMBER,
        unknown=_described({"type": ["number", "null"]}, "How unlike the shots the image is."),
        top=_list(_object({"label": LABEL, "probability": NUMBER})),
        error=_described(TEXT, "Why the image cannot be used; then it has no prediction."),
    ),
    "One image.",
)
MODEL = _object(
    {
        "name": TEXT,
        "file": TEXT,
        "version": _described(TEXT, "Start of the SHA-256 of the file."),
        "classes": _list(TEXT),
        "shots": _described({"type": ["object", "null"]}, "Images per class."),
        "estimate": _described(
            {"type": ["object", "null"]}, "What to expect of new images, if it is known."
        ),
        "backbone": {"type": ["string", "null"]},
        "image_size": {"type": ["integer", "null"]},
        "problem": _described(
            {"type": ["string", "null"]}, "Why a changed file is not used; the old model serves."
        ),
    }
)
OPTIONS: Schema = {
    "model": _described(TEXT, "Name of the model; may be left out if there is only one."),
    "top": _described(
        {"type": "integer", "minimum": 1, "maximum": 999_999_999},
        "Number of classes to return, the most probable first; by default all.",
    ),
    "prior": _described(
        TEXT, "How frequent classes are: `uniform`, `shots`, `robin=3,wren=1` or a JSON object."
    ),
}
NAMED_IMAGE = _object({"data": _described(TEXT, "Base64 of an image file.")}, name=TEXT)
BODY: Schema = {
    "required": True,
    "content": {
        "multipart/form-data": {"schema": _object({"images": _list(FILE)}, **OPTIONS)},
        "image/*": {"schema": FILE},
        "application/json": {
            "schema": _object(
                {},
                images=_list({"anyOf": [TEXT, NAMED_IMAGE]}),
                features=_described(
                    {"type": ["array", "object"]},
                    "Instead of images: vectors, or tensors named block0.map, block0.token, ...",
                ),
                **OPTIONS,
            ),
        },
    },
}
STATUS = _object({"status": TEXT}, models=_list(TEXT))
ANSWER = _object({"model": TEXT, "version": TEXT, "predictions": _list(PREDICTION)})
MODELS = _object({"models": _list(MODEL)})

SCHEMA: Schema = {
    "openapi": "3.1.0",
    "info": {"title": "mivhead", "version": __version__},
    "paths": {
        "/v1/predict": {
            "post": {
                **_operation("Predict images or features.", ANSWER),
                "requestBody": BODY,
                "parameters": [
                    {"name": name, "in": "query", "schema": schema}
                    for name, schema in OPTIONS.items()
                ],
            }
        },
        "/v1/models": {"get": _operation("List the models.", MODELS)},
        "/healthz": {"get": _operation("Answer as long as the process runs.", STATUS)},
        "/readyz": {"get": _operation("Answer as long as requests are served.", STATUS)},
        "/metrics": {"get": _operation("Metrics for Prometheus.", TEXT, "text/plain")},
        "/openapi.json": {"get": _operation("This schema.", {"type": "object"})},
    },
    "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    "security": [{}, {"key": []}],
}
