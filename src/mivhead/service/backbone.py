"""The protocol of `mivhead.backbones.wire`, version 1: a backbone for clients on other machines.

`mivhead.backbones.http` is the client. Images are decoded with the same limits as files.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from mivhead.backbones.base import Backbone
from mivhead.backbones.wire import (
    BACKBONE_PATH,
    FEATURES_PATH,
    IDENTITY_HEADER,
    NPZ,
    PROTOCOL,
    SAFETENSORS,
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
    """Return the two endpoints of the protocol."""
    limits, identity = engine.limits, backbone.identity
    about = ServerInfo(PROTOCOL, identity, backbone.preset, limits.max_images, limits.max_bytes)
    size = identity.preprocessing.size

    async def describe(_: Request) -> Response:
        """Return what clients must know about the backbone."""
        return JSONResponse(asdict(about))

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

    return [
        Route(BACKBONE_PATH, describe),
        Route(FEATURES_PATH, features, methods=["POST"]),
    ]


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
