"""Export to formats that run without PyTorch."""

from typing import TYPE_CHECKING

from mivhead._util.lazy import lazy

if TYPE_CHECKING:
    from mivhead.export.backbone import export_onnx as export_onnx
    from mivhead.export.backbone import tap_onnx as tap_onnx

__getattr__, __dir__ = lazy(
    __name__,
    {
        "backbone": "export_onnx tap_onnx",
    },
)
