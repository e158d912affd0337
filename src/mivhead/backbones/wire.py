"""The protocol between a backbone server (`mivhead.service`) and its clients, version 1.

- `GET /v1/backbone` returns a JSON object, `ServerInfo`.
- `POST /v1/features` with `{"images": ["...", ...]}`, each the base64 of an image file, returns the
  features as safetensors, tensors named `block{i}.map` (n, C, H, W) and `block{i}.token` (n, C).
  A client that sends `Accept: application/x-npz` receives NumPy's npz instead.
- `POST /v1/texts` with `{"texts": ["...", ...]}` returns the vectors of sentences, one tensor
  `block0.token` (n, C), where `ServerInfo.texts` is true: the last block of images is in the same
  space.
- Errors have a status of at least 400 and a JSON object `{"error": "one sentence"}`.

Neither format can carry code: safetensors holds raw tensors, and npz is read without pickle.
"""

from __future__ import annotations

import base64
import io
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray
from PIL import Image
from safetensors import numpy as safetensors

from mivhead._util import schema
from mivhead.backbones.base import Identity, storage_type
from mivhead.backbones.preset import Preset
from mivhead.errors import InputError
from mivhead.features import Features

PROTOCOL = 1
BACKBONE_PATH = "/v1/backbone"
FEATURES_PATH = "/v1/features"
TEXTS_PATH = "/v1/texts"
MAX_TEXTS, MAX_TEXT = 256, 1000  # sentences per request, and characters of each
SAFETENSORS = "application/x-safetensors"
NPZ = "application/x-npz"
IDENTITY_HEADER = "Miv-Backbone"  # the identity's key, in every response with features


@dataclass(frozen=True)
class ServerInfo:
    """What a server reports about itself."""

    protocol: int  # its version
    identity: Identity
    preset: Preset
    max_images: int  # per request
    max_bytes: int  # per request
    texts: bool = False  # whether it embeds sentences, too

    def as_json(self) -> dict[str, Any]:
        """Return what is sent: without what clients of 0.2.0 do not know, if that is possible."""
        document = asdict(self)
        if not self.texts:
            del document["texts"]
        for block in document["preset"]["blocks"]:
            del block["classifier"]  # a client knows those of named backbones itself
        return document


def encode_image(pixels: np.ndarray[Any, Any]) -> str:
    """Return the base64 of an image as PNG, which is lossless.

    >>> import numpy as np
    >>> encode_image(np.zeros((1, 1, 3), np.uint8))[:8]
    'iVBORw0K'
    """
    file = io.BytesIO()
    # Photos compress little, so speed matters more.
    Image.fromarray(pixels).save(file, "PNG", compress_level=1)
    return base64.b64encode(file.getvalue()).decode()


def encode_features(features: Features, kind: str = SAFETENSORS) -> bytes:
    """Encode features as the body of a response, safetensors or npz."""
    arrays = {name: np.ascontiguousarray(t) for name, t in features.tensors.items()}
    if kind == SAFETENSORS:
        return safetensors.save(arrays)
    file = io.BytesIO()
    np.savez(file, **arrays)  # type: ignore[arg-type]  # NumPy 2's stub takes the names for its own options
    return file.getvalue()


def decode_features(body: bytes, kind: str, dtype: DTypeLike, max_bytes: int) -> Features:
    """Decode features from the body of a response and round them to `dtype`; runs no code.

    >>> import numpy as np
    >>> sent = Features(np.ones((2, 3), np.float16))
    >>> decode_features(encode_features(sent, NPZ), NPZ, "float16", 2**20) == sent
    True
    """
    if kind not in (SAFETENSORS, NPZ):
        raise InputError(f"the response is of type {kind or 'unknown'!r}, expected {SAFETENSORS}.")
    try:
        arrays = safetensors.load(body) if kind == SAFETENSORS else _read_npz(body, max_bytes)
    except InputError:
        raise
    # For corrupted or forged bytes the readers raise almost anything (zlib.error, struct.error,
    # NotImplementedError, MemoryError ...), and only they run inside this block.
    except Exception as error:
        raise InputError(f"the response is not readable {kind} ({error!s:.200}).") from error
    rounded = storage_type(dtype)
    with np.errstate(over="ignore"):  # `Features` refuse infinity
        floats = {k: a.astype(rounded) if a.dtype.kind == "f" else a for k, a in arrays.items()}
    return Features.from_tensors(floats)


def _read_npz(body: bytes, max_bytes: int) -> Mapping[str, NDArray[Any]]:
    with zipfile.ZipFile(io.BytesIO(body)) as archive:
        if sum(entry.file_size for entry in archive.infolist()) > max_bytes:
            raise InputError(f"the response unpacks to more than {max_bytes:,} bytes.")
    with np.load(io.BytesIO(body), allow_pickle=False) as arrays:
        return dict(arrays)


@contextmanager
def naming(service: str) -> Iterator[None]:
    """Name the service in errors about its response."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{service} returned an unusable response: {error}") from error


def parse_json(body: bytes) -> Any:
    """Read a body that should be a JSON document."""
    try:
        return schema.parse_json(body)
    except ValueError as error:
        raise InputError("the body is not JSON.") from error
