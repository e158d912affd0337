"""Export to formats that run without PyTorch.

`model` writes a whole model as one ONNX file: the graphs of its backbone (`backbone`) and of its
method (`methods`, and `head` for the MIV-head), written as formulas (`graph`) and stored in fewer
bits on request (`storage`). `web` makes a page of it, with what `fetch_runtime` has fetched.
"""

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
