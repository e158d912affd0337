"""The protocol of `mivhead.backbones.wire`, version 1: a backbone for clients on other machines.

`mivhead.backbones.http` is the client. Images are decoded with the same limits as files.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from anyio import to_thread
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from mivhead.backbones.base import Backbone
from mivhead.backbones.wire import (
    BACKBONE_PATH,
    FEATURES_PATH,
    IDENTITY_HEADER,
    MAX_TEXT,
    MAX_TEXTS,
    NPZ,
    PROTOCOL,
    SAFETENSORS,
    TEXTS_PATH,
    ServerInfo,
    encode_features,
)
from mivhead.errors import InputError
from mivhead.extraction.pipeline import extract_pictures
from mivhead.features import Features
from mivhead.service.engine import Engine, Unreadable
from mivhead.service.observation import note
from mivhead.service.protection import ApiKeys, Limits, Refusal
from mivhead.service.requests import JSON, Upload, decode_base64, read_json
from mivhead.service.server import DEFAULT_PORT, Server


def backbone_routes(engine: Engine, backbone: Backbone) -> list[BaseRoute]:
    """Return the endpoints of the protocol: three, if the backbone has a text tower."""
    limits, identity = engine.limits, backbone.identity
    embed = getattr(backbone, "embed_texts", None)
    room = limits.max_images, limits.max_bytes
    about = ServerInfo(PROTOCOL, identity, backbone.preset, *room, embed is not None).as_json()
    size = identity.preprocessing.size

    async def describe(_: Request) -> Response:
        """Return what clients must know about the backbone."""
        return JSONResponse(about)

    def extract(pictures: list[Any]) -> list[Features]:
        """Pass a batch through the backbone: one `Features` of one image each."""
        found = extract_pictures(backbone, pictures)
        return [found[i : i + 1] for i in range(len(pictures))]

    async def features(request: Request) -> Response:
        """Return the features of images."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
            raise Refusal(415, "Send application/json.")
        kind = NPZ if NPZ in request.headers.get("accept", "") else SAFETENSORS
        body = await request.body()
        images = await to_thread.run_sync(_read_images, body, limits.max_images)
        note(request.scope, images=len(images))
        with engine.batcher.admit(len(images)):
            pictures = await engine.decode(images, size)
            for each in pictures:
                if isinstance(each, Unreadable):
                    raise InputError(each.reason)
            found = await engine.batcher.run((extract,), pictures)
        encoded = await to_thread.run_sync(encode_features, Features.concat(found), kind)
        return Response(encoded, media_type=kind, headers={IDENTITY_HEADER: identity.key})

    def embed_all(requests: list[list[str]]) -> list[Any]:
        """Embed the sentences of several requests."""
        assert embed is not None, "only then there is a route"
        return [embed(sentences) for sentences in requests]

    async def texts(request: Request) -> Response:
        """Return the vectors of sentences."""
        sentences = _read_texts(await request.body())
        with engine.batcher.admit(1):
            (found,) = await engine.batcher.run((embed_all,), [sentences])
        encoded = encode_features(Features(np.asarray(found, np.float32)))
        return Response(encoded, media_type=SAFETENSORS, headers={IDENTITY_HEADER: identity.key})

    routes: list[BaseRoute] = [
        Route(BACKBONE_PATH, describe),
        Route(FEATURES_PATH, features, methods=["POST"]),
    ]
    return routes if embed is None else [*routes, Route(TEXTS_PATH, texts, methods=["POST"])]


def _read_texts(body: bytes) -> list[str]:
    document = read_json(body)
    texts = document.get("texts") if len(document) == 1 else None
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise InputError('Send {"texts": ["a sentence", ...]}.')
    if not 1 <= len(texts) <= MAX_TEXTS or any(not 0 < len(t) <= MAX_TEXT for t in texts):
        raise InputError(
            f"A request must have 1 to {MAX_TEXTS} texts of 1 to {MAX_TEXT} characters."
        )
    return texts


def _read_images(body: bytes, max_images: int) -> list[Upload]:
    document = read_json(body)
    images = document.get("images") if len(document) == 1 else None
    if not isinstance(images, list) or not all(isinstance(text, str) for text in images):
        raise InputError('Send {"images": ["base64 of an image file", ...]}.')
    if not 1 <= len(images) <= max_images:
        raise InputError(f"A request must have 1 to {max_images} images, got {len(images)}.")
    return [Upload(f"Image {i}", decode_base64(text, i)) for i, text in enumerate(images)]


class BackboneServer(Server):
    """Serves one backbone; `serve_forever` runs the server, `stop` stops it.

    Parameters
    ----------
    backbone : Backbone
        The backbone to serve.
    host : str, default="127.0.0.1"
        Address to listen on.
    port : int, default=8765
        Port to listen on; 0 chooses a free one.
    key : str, optional
        Name of an environment variable whose value every client must send as
        `Authorization: Bearer VALUE`. By default everyone who can reach the server may use it.
    limits : Limits, optional
        How much the server takes on.

    Examples
    --------
    >>> from mivhead.backbones import load_backbone
    >>> import threading
    >>> server = BackboneServer(load_backbone("efficientnet_lite0"), port=0)
    >>> threading.Thread(target=server.serve_forever).start()
    >>> load_backbone(server.url).identity.name
    'efficientnet_lite0'
    >>> server.stop()
    """

    def __init__(
        self,
        backbone: Backbone,
        host: str = "127.0.0.1",
        port: int = DEFAULT_PORT,
        *,
        key: str | None = None,
        limits: Limits | None = None,
    ) -> None:
        from mivhead.service.application import create_app

        limits = limits or Limits()
        keys = None if key is None else ApiKeys.from_variable(key)
        app = create_app(backbone=backbone, keys=keys, limits=limits)
        super().__init__(app, host, port, deadline=limits.deadline)
