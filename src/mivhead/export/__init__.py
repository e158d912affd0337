"""Models in formats that run without Python.

`model` writes a whole model as one ONNX file: the graph of its backbone (`trace` for one of
PyTorch), continued by that of its classifier (`head`), written as formulas (`graph`). `web` makes a
page of it, with what `fetch_runtime` has fetched.
"""
