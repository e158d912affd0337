"""HTTP servers."""

from typing import TYPE_CHECKING

from mivhead._lazy import lazy

if TYPE_CHECKING:
    from mivhead.service.backbone import BackboneServer as BackboneServer

__getattr__, __dir__ = lazy(
    __name__,
    {
        "backbone": "BackboneServer",
    },
)
