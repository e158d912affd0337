"""The service on a Ray cluster, where every replica is the whole application of `miv serve`.

    MIV_MODELS=/models/birds.miv MIV_REPLICAS=4 serve run ray_serve:app

The files must be readable on every machine; several are separated by `:`.
"""

import os

from ray import serve
from starlette.types import ASGIApp

from mivhead.service.application import create_app

MODELS = os.environ["MIV_MODELS"].split(os.pathsep)
REPLICAS = int(os.environ.get("MIV_REPLICAS", "1"))


def build() -> ASGIApp:
    """Make the application; called in the process of each replica."""
    return create_app(MODELS)


app = serve.deployment(serve.ingress(build)(), name="mivhead", num_replicas=REPLICAS).bind()
