"""What a request contains: images in one of several forms, or features, and how to predict them."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from anyio import to_thread
from numpy.typing import NDArray
from starlette.datastructures import FormData, Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from mivhead._util.schema import parse_json
from mivhead.ensemble.balance import Prior, read_prior
from mivhead.errors import InputError
from mivhead.service.protection import Limits, Refusal

JSON = "application/json"
MULTIPART = "multipart/form-data"
SAFETENSORS = "application/x-safetensors"
RAW = "application/octet-stream"

MAX_VALUES = 2_000_000  # numbers, strings, lists and objects in a JSON document
MAX_NAME = 200  # characters of the name of an image
MAX_FIELDS = 16  # of a form, besides images

HINT = (
    "Send images as multipart/form-data in fields named `images`, one image as the body with its "
    'type (image/jpeg, ...), or application/json: {"images": ["base64 of an image file", ...]}.'
)


@dataclass(frozen=True)
class Upload:
    """The bytes of one image file and the name that its owner gave it."""

    name: str
    data: bytes


@dataclass(frozen=True)
class Sent:
    """What a client sent."""

    images: list[Upload] = field(default_factory=list)  # image files; empty if there are features
    # Features by the name of their tensor, or vectors of shape (image, channel)
    features: dict[str, NDArray[Any]] | NDArray[Any] | None = None
    # The other fields, as strings or JSON values
    options: dict[str, Any] = field(default_factory=dict)

    def option(self, name: str) -> str | None:
        """Return an option that is a string."""
        value = self.options.get(name)
        if value is not None and not isinstance(value, str):
            raise InputError(f"{name} must be a string, got {value!r:.80}.")
        return value

    def number(self, name: str) -> int | None:
        """Return an option that is a positive integer."""
        value = self.options.get(name)
        if isinstance(value, str) and value.isdecimal() and len(value) < 10:
            value = int(value)
        if value is not None and (type(value) is not int or not 0 < value < 10**9):
            raise InputError(f"{name} must be an integer from 1 to 999999999, got {value!s:.80}.")
        return value

    def prior(self) -> Prior | None:
        """Return the class prior: a name, or frequencies as text or as an object."""
        value = self.options.get("prior")
        if value is None or isinstance(value, dict):
            return value
        if not isinstance(value, str):
            raise InputError(f"prior must be a string or an object, got {value!r:.80}.")
        return read_prior(value)


async def read_request(
    request: Request, limits: Limits, allowed: tuple[str, ...] = ("model", "top", "prior")
) -> Sent:
    """Read the images or features of a request, and its options.

    The body has been received within the limits; `allowed` are the options that the endpoint knows,
    in the query or in the body.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == MULTIPART:
        sent = await _from_form(request, limits)
    elif kind == JSON:
        sent = await to_thread.run_sync(_from_json, await request.body())
    elif kind == SAFETENSORS:
        sent = Sent(features=_read_safetensors(await request.body()))
    elif kind.startswith("image/") or kind == RAW:
        sent = Sent([Upload("image", await request.body())])
    else:
        raise Refusal(415, f"The type {kind!r:.80} is not supported. {HINT}")
    sent.options.update(request.query_params)
    if unknown := sorted(set(sent.options) - set(allowed)):
        raise InputError(
            f"The option {unknown[0]!r:.80} is unknown; the options are {', '.join(allowed)}."
        )
    if len(sent.images) > limits.max_images:
        raise InputError(
            f"A request may have at most {limits.max_images} images, got {len(sent.images)}."
        )
    if not sent.images and sent.features is None:
        raise InputError(f"There are no images. {HINT}")
    return sent


async def _from_form(request: Request, limits: Limits) -> Sent:
    sent = Sent()
    form = await parse_form(request.headers, await request.body(), limits.max_images)
    try:
        for name, value in form.multi_items():
            if not isinstance(value, UploadFile):
                sent.options[name] = value
            elif name in ("images", "image"):
                title = (value.filename or f"image {len(sent.images)}")[:MAX_NAME]
                sent.images.append(Upload(title, await value.read()))
            else:
                raise InputError(f"The field {name!r:.80} holds a file: name it `images`.")
    finally:
        await form.close()
    return sent


async def parse_form(headers: Headers, body: bytes, max_files: int) -> FormData:
    """Parse a multipart body, in memory."""

    async def stream() -> AsyncIterator[bytes]:
        yield body

    parser = MultiPartParser(headers, stream(), max_files=max_files, max_fields=MAX_FIELDS)  # type: ignore[arg-type]  # any async iterator will do
    parser.spool_max_size = len(body) + 1  # nothing is written to the disk
    try:
        return await parser.parse()
    except MultiPartException as error:
        raise InputError(f"The form cannot be read: {error.message}") from error
    # Malformed headers of a part, or a missing boundary.
    except (KeyError, ValueError, AssertionError) as error:
        raise InputError("The form cannot be read: it is not multipart/form-data.") from error


def read_json(body: bytes) -> dict[str, Any]:
    """Read a JSON object of unknown origin, of bounded size in memory."""
    values = sum(body.count(each) for each in (b",", b"[", b"{"))
    if values > MAX_VALUES:
        raise InputError(
            f"The JSON document has more than {MAX_VALUES:,} values: send features as "
            f"{SAFETENSORS}, or fewer per request."
        )
    try:
        document = parse_json(body)
        if b"\\ud" in body.lower():  # half of a character cannot be sent back, nor written
            json.dumps(document, ensure_ascii=False).encode()
    except ValueError as error:
        raise InputError("The body is not JSON, or its text is not valid Unicode.") from error
    if not isinstance(document, dict):
        raise InputError(f"The body must be a JSON object. {HINT}")
    return document


def _from_json(body: bytes) -> Sent:
    document = read_json(body)
    images, features = document.pop("images", None), document.pop("features", None)
    if (images is None) == (features is None):
        raise InputError(f"Send either `images` or `features`. {HINT}")
    if features is not None:
        return Sent(features=_read_features(features), options=document)
    if not isinstance(images, list):
        raise InputError(f"`images` must be a list, got {images!r:.80}.")
    return Sent([_read_image(each, i) for i, each in enumerate(images)], options=document)


def _read_image(value: Any, position: int) -> Upload:
    """Read one image of a JSON document: base64, or an object with `data` and perhaps `name`."""
    name = f"image {position}"
    if isinstance(value, dict) and set(value) <= {"name", "data"}:
        name = value.get("name", name)
        value = value.get("data")
    if not isinstance(value, str) or not isinstance(name, str):
        raise InputError(
            f"Image {position} must be a string of base64, or an object with the strings `name` "
            "and `data`."
        )
    return Upload(name[:MAX_NAME], decode_base64(value, position))


def decode_base64(text: str, position: int) -> bytes:
    """Decode the base64 of an image file, also as a `data:` URL."""
    if text.startswith("data:"):
        text = text.partition(";base64,")[2]
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InputError(f"Image {position} is not base64.") from None


def _read_features(value: Any) -> dict[str, NDArray[Any]] | NDArray[Any]:
    if isinstance(value, Mapping):
        return {str(name): _read_array(each, str(name)) for name, each in value.items()}
    vectors = _read_array(value, "features")
    if vectors.ndim != 2:
        raise InputError(
            f"`features` must be a list of vectors, got {vectors.ndim} dimensions; the tensors of "
            "blocks have names: block0.map, block0.token, ..."
        )
    return vectors


def _read_array(value: Any, name: str) -> NDArray[np.float32]:
    try:
        array = np.asarray(value)
    except ValueError:  # rows of different lengths
        array = np.empty(0, object)
    if array.dtype.kind not in "iuf" or not array.size:
        raise InputError(f"`{name:.80}` must hold numbers in lists of equal lengths.")
    with np.errstate(over="ignore"):  # an infinite value is refused with a better message later
        return array.astype(np.float32)


def _read_safetensors(body: bytes) -> dict[str, NDArray[Any]]:
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        arrays = load(body)
    # What the reader raises for corrupted bytes, and for types that NumPy does not have.
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"The body is not readable {SAFETENSORS} ({error!s:.200}).") from error
    if any(array.dtype.kind != "f" for array in arrays.values()):
        raise InputError("Features must be floating-point tensors.")
    return arrays
