"""The service: models and backbones over HTTP.

Start with `app`: `create_app` puts the ASGI application together, and `Server` runs it.
"""

from typing import TYPE_CHECKING

from mivhead._lazy import lazy

if TYPE_CHECKING:
    from mivhead.service.app import create_app as create_app
    from mivhead.service.backbone import BackboneServer as BackboneServer
    from mivhead.service.server import Server as Server

__getattr__, __dir__ = lazy(
    __name__,
    {
        "app": "create_app",
        "backbone": "BackboneServer",
        "server": "Server",
    },
)
