"""The service: models over HTTP. A request passes these modules, in this order.

- `server`: `Server` runs an ASGI application with uvicorn.
- `middleware`: logs and counts every request; checks hosts and keys, limits size and time.
- `application`: `create_app` puts the routes together; reads images or features from a request.
- `engine`: loads models by name, decodes images, and computes those of all clients in batches.

`openapi` describes the requests; `client` sends them.
"""

from typing import TYPE_CHECKING

from mivhead._util.imports import lazy

if TYPE_CHECKING:
    from mivhead.service.application import create_app as create_app
    from mivhead.service.client import Client as Client
    from mivhead.service.server import Server as Server

__getattr__, __dir__ = lazy(
    __name__, {"application": "create_app", "client": "Client", "server": "Server"}
)
