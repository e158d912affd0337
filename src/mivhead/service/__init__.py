"""The service: models and backbones over HTTP.

A request passes these modules, in this order:

- `server`: `Server` runs an ASGI application with uvicorn, with a time limit for every connection.
- `application`: `create_app` puts the application together: the routes and their protections.
- `protection`: which hosts and keys are accepted, how large a request may be, and how long it may
  take; `observation` logs and counts every request.
- `requests`: reads images or features, and the options, from the body of a request.
- `engine`: decodes images within a budget and puts them into the queue.
- `batching`: collects the images of all clients into batches, and computes them.
- `models`: loads models by name, and loads them again when their files change.

Other protocols use the same engine: `changes` (changing a model over HTTP), `inference_protocol`
(Open Inference Protocol), `label_studio`, and `backbone` (a backbone for other machines). `openapi`
describes all of them.
"""

from typing import TYPE_CHECKING

from mivhead._util.lazy import lazy

if TYPE_CHECKING:
    from mivhead.service.application import create_app as create_app
    from mivhead.service.backbone import BackboneServer as BackboneServer
    from mivhead.service.server import Server as Server

__getattr__, __dir__ = lazy(
    __name__,
    {
        "application": "create_app",
        "backbone": "BackboneServer",
        "server": "Server",
    },
)
