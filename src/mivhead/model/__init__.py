"""A fitted model: how it is fitted, what it keeps, how it is changed, and its file.

- `model`: `Model`, which fits, reads images and predicts.
- `base`: what every model does with pictures (read, score, decide), and says about itself.
- `shots`: what a model keeps of its images, so that it can be changed without them.
- `file`: the model file.
- `exported`: models that run in onnxruntime.
"""
