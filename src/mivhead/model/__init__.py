"""A fitted model: how it is fitted, what it keeps, how it decides, and its file.

- `fewshot`: `FewShotClassifier`, the way in; `fitting` fits it, and `changes` changes it.
- `base`: what every model does with pictures: read, score, decide.
- `readers`: how a method sees images; `naming`: vectors of the names of classes.
- `shots`: what a model keeps of its images, so that it can be changed without them.
- `decision`: a name, *unsure* or *none of these*; `prediction`: what it says about an image.
- `file`: the model file; `info`: what it says about itself; `load`: reads models of any kind.
- `exported`: models that run in onnxruntime.
"""
