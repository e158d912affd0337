"""Export a fitted classifier to one ONNX file: backbone, head, experts and probabilities.

The file runs wherever ONNX does; `mivhead.load` reads it without PyTorch. Its metadata says what
`miv info` shows: classes, backbone, preprocessing, method. Every export is compared with the model
it came from before the file is written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mivhead._util.files import replacing
from mivhead._util.optional import need
from mivhead._version import __version__
from mivhead.backbones.base import Backbone, LazyBackbone, storage_type
from mivhead.backbones.joint import JointBackbone
from mivhead.backbones.onnx_model import OnnxBackbone, image_input, parse_graph
from mivhead.backbones.preprocessing import normalise, to_pixels
from mivhead.backbones.preset import Preprocessing
from mivhead.backbones.taps import MAX_PREFIX
from mivhead.errors import InputError, NotAvailableError
from mivhead.export.graph import EXTRA, OPSET, Graph, Value
from mivhead.export.methods import logits, scaled, unknown
from mivhead.export.storage import Storage, store
from mivhead.features import Features
from mivhead.methods import base
from mivhead.methods.base import graph_unit
from mivhead.methods.registry import Classifier, method_name
from mivhead.model.decision import DecisionRule
from mivhead.model.exported import (
    CHECKSUM_KEY,
    FORMAT,
    KIND,
    METADATA_KEY,
    NO_CHECKSUM,
    PROBABILITIES,
    UNKNOWN,
    Input,
    open_session,
    run,
    with_checksum,
)
from mivhead.model.fewshot import FewShotClassifier
from mivhead.model.file import as_model, info_of

RESIZE_OPSET = 18  # the first with antialiased resizing
MAX_BYTES = 2**31 - 2**20  # a protobuf message has less than 2 GiB
# The largest difference of a probability between the model and its export that is accepted.
TOLERANCES: dict[Storage, float] = {"float32": 1e-3, "half": 0.05, "int8": 0.5}
IMAGES = 4  # that the two are compared on


@dataclass(frozen=True)
class Export:
    """What was written."""

    bytes: int  # size of the file
    opset: int  # its version of the ONNX operations
    # The largest difference between a probability of the model and of the file, on the images or
    # features that the two were compared on
    difference: float


def export_model(
    model: FewShotClassifier | Classifier,
    path: str | Path,
    *,
    input: Input | None = None,  # noqa: A002  # the word for it
    storage: Storage = "float32",
) -> Export:
    """Export a fitted model to an ONNX file, atomically.

    Parameters
    ----------
    model : FewShotClassifier, or an estimator on features such as MIVClassifier
        The fitted model.
    path : str or Path
        The file to write.
    input : {"images", "pixels", "features"} or None, default=None
        What the graph takes. `"images"`: a normalised float32 batch (n, 3, R, R). `"pixels"`:
        8-bit RGB images (n, H, W, 3) of any size, which are resized inside the graph.
        `"features"`: block features, without a backbone. None: `"images"` if the model has a
        backbone, else `"features"`.
    storage : {"float32", "half", "int8"}, default="float32"
        How weights are stored; the graph computes in float32 in any case.

    Returns
    -------
    Export
        Size, and how far the file is from the model.

    Examples
    --------
    >>> import tempfile, numpy as np, mivhead
    >>> X, y = np.eye(4, 8, dtype=np.float32), ["a", "a", "b", "b"]
    >>> classifier = mivhead.MIVClassifier(random_state=0).fit(X, y)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export = export_model(classifier, f"{folder}/model.onnx")
    ...     mivhead.load(f"{folder}/model.onnx").predict(X).tolist()
    ['a', 'a', 'b', 'b']
    >>> export.difference < 1e-6
    True
    """
    for package in ("onnx", "onnxruntime"):  # fail before the work, not after it
        need(package, EXTRA)
    model = as_model(model)
    classifier, identity = model.classifier_, model.identity_
    if input is None:
        input = "features" if identity is None else "images"  # noqa: A001
    if input == "features":
        proto = _from_features(classifier)
    elif identity is None:
        raise InputError(
            "The model was trained on features of unknown origin: it can be exported only with "
            "--features, from features to probabilities."
        )
    else:
        proto = _from_images(model, input)
    store(proto, storage)
    rule: DecisionRule | None = classifier.decision_
    document = {
        "format": FORMAT,
        "kind": KIND,
        "input": input,
        "storage": storage,
        "exporter": __version__,
        "model": asdict(info_of(model)),
        "decision": None if rule is None else asdict(rule.calibration),
        "shots": None if model.shot_counts is None else [*model.shot_counts.values()],
        "checksum": True,
    }
    onnx = need("onnx", EXTRA)
    metadata = {METADATA_KEY: json.dumps(document), CHECKSUM_KEY: NO_CHECKSUM.decode()}
    onnx.helper.set_model_props(proto, metadata)
    if proto.ByteSize() > MAX_BYTES:
        raise InputError("The model is larger than 2 GB, which an ONNX file cannot hold.")
    onnx.checker.check_model(proto, full_check=True)
    content = with_checksum(proto.SerializeToString())
    difference = _compare(model, content, input)
    if not difference <= TOLERANCES[storage]:
        raise NotAvailableError(
            f"The exported graph computes other probabilities than the model (by up to "
            f"{difference:.2g}), so nothing was written: please report this with your versions of "
            "onnx and onnxruntime."
        )
    with replacing(path) as part:
        part.write_bytes(content)
    opset = next(each.version for each in proto.opset_import if each.domain in ("", "ai.onnx"))
    return Export(len(content), opset, difference)


# Graphs


def _from_features(classifier: Any) -> Any:
    """Make a model that takes the features which the method looks at."""
    if _tunes(classifier):
        raise InputError(
            f"{method_name(classifier)} tunes the backbone, so features are not enough: export it "
            "without --features."
        )
    onnx, graph = need("onnx", EXTRA), Graph()
    layout = classifier.layout_
    values = {name: graph.input(name, np.float32) for name in layout}
    features = scaled(values, classifier)
    outputs = _finish(graph, logits(graph, features, classifier), features, classifier)
    used = {name for node in graph.nodes for name in node.input}
    inputs = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", *layout[name]])
        for name in layout
        if name in used
    ]
    body = onnx.helper.make_graph(graph.nodes, "mivhead", inputs, outputs, graph.constants)
    model = onnx.helper.make_model(body, opset_imports=[onnx.helper.make_opsetid("", OPSET)])
    model.ir_version = 8  # which onnxruntime 1.14 and later read
    return model


def _tunes(classifier: Classifier) -> bool:
    """Whether a method tunes the backbone, in PyTorch."""
    return classifier.needs == "images"


def _from_images(model: FewShotClassifier, kind: Input) -> Any:
    """Make a model that takes images: the backbone's graph, continued by the head's."""
    classifier = model.classifier_
    backbone = model.load_backbone()
    if isinstance(backbone, LazyBackbone):
        backbone = backbone.loaded()
    preprocessing = backbone.preset.preprocessing
    graph = Graph()
    features: dict[str, Value] = {}
    if _tunes(classifier):
        proto, scores = _tuned_graph(classifier, backbone, graph)
    else:
        proto, features = _backbone_graph(backbone, graph)
        # Features are rounded as they are in `extract`, so that both compute with the same ones.
        if storage_type(getattr(backbone, "dtype", "float16")) == np.float16:
            features = {k: v.cast(np.float16).cast(np.float32) for k, v in features.items()}
        features = scaled(features, classifier)
        scores = logits(graph, features, classifier)
    outputs = _finish(graph, scores, features, classifier)
    body = proto.graph
    body.node.extend(graph.nodes)
    body.initializer.extend(graph.constants)
    del body.output[:], body.value_info[:]
    body.output.extend(outputs)
    _prune(body)
    if kind == "pixels":
        _resize(proto, preprocessing)
    for each in (*body.input, *body.output):
        each.type.tensor_type.shape.dim[0].dim_param = "n"
    del proto.metadata_props[:]
    proto.doc_string = body.doc_string = ""
    for node in body.node:
        del node.metadata_props[:]
        node.doc_string = ""
    proto.producer_name, proto.producer_version = "mivhead", __version__
    return proto


def _tuned_graph(classifier: Any, backbone: Backbone, graph: Graph) -> tuple[Any, Value]:
    """Return the ONNX model of a tuned network, and its logits."""
    from mivhead.export.backbone import trace
    from mivhead.methods.tuning.base import MEANS, TEMPERATURE
    from mivhead.model.readers import PixelReader

    means = classifier.tensors_[MEANS]
    if means.ndim > 2:  # (class, network, channel)
        raise InputError(
            f"The method {method_name(classifier)} cannot be exported: it has {means.shape[1]} "
            "networks; export the method finetune instead."
        )
    PixelReader(backbone, None, verbose=False).attach(classifier)
    size = backbone.preset.preprocessing.size
    proto = trace(classifier.network_.cpu(), size, ["embedded"])
    embedded = graph_unit(graph.input("embedded", np.float32))
    return proto, embedded @ base.unit(means).T / TEMPERATURE


def _finish(
    graph: Graph, scores: Value, features: Mapping[str, Value], classifier: Any
) -> list[Any]:
    """Add and describe the outputs: probabilities, and the score of unknown images."""
    onnx = need("onnx", EXTRA)
    graph.output(scores.softmax(1).cast(np.float32), PROBABILITIES)
    shapes = {PROBABILITIES: ["n", len(classifier.classes_)]}
    rule: DecisionRule | None = classifier.decision_
    if rule is not None:
        graph.output(unknown(scores, features, classifier, rule).reshape(-1), UNKNOWN)
        shapes[UNKNOWN] = ["n"]
    kind = onnx.TensorProto.FLOAT
    return [onnx.helper.make_tensor_value_info(k, kind, shape) for k, shape in shapes.items()]


def _backbone_graph(backbone: Backbone, graph: Graph) -> tuple[Any, dict[str, Value]]:
    """Return the ONNX model of a backbone, and its features by name."""
    if hasattr(backbone, "in_float32"):  # a module of PyTorch
        from mivhead.export.backbone import module_graph

        proto = module_graph(backbone.in_float32())
        return proto, {each.name: graph.input(each.name, np.float32) for each in proto.graph.output}
    if isinstance(backbone, OnnxBackbone):
        return _onnx_graph(backbone, graph)
    if isinstance(backbone, JointBackbone):
        raise InputError(
            f"{backbone.identity.name} are several backbones, which one ONNX graph cannot hold "
            "yet: export with --features, from their features to probabilities, or fit on one "
            "backbone."
        )
    raise InputError(
        f"The backbone {backbone.identity.name} cannot be exported, because it is a service or "
        "code of your own: export with --features, from its features to probabilities."
    )


def _onnx_graph(backbone: OnnxBackbone, graph: Graph) -> tuple[Any, dict[str, Value]]:
    """Continue the graph of a backbone that is an ONNX file itself."""
    onnx = need("onnx", EXTRA)
    proto = parse_graph(backbone.content(), backbone.identity.name)
    source = image_input(proto, backbone.identity.name)
    version = next(each for each in proto.opset_import if each.domain in ("", "ai.onnx"))
    if version.version < OPSET:
        proto = onnx.version_converter.convert_version(proto, OPSET)
    if source.channels_last or source.half:
        _adapt_input(proto, source, backbone.preset.preprocessing.size)
    kind = np.float16 if source.half else np.float32
    shapes = backbone.shapes()
    features: dict[str, Value] = {}
    for i, (block, tap) in enumerate(zip(backbone.names, backbone.preset.taps, strict=True)):
        values = {name: graph.input(name, kind).cast(np.float32) for name in block}
        if block == (tap,):
            parts = read_output(values[tap], shapes[tap])
        else:
            parts = {name.partition(".")[2]: value for name, value in values.items()}
        features |= {f"block{i}.{part}": value for part, value in parts.items()}
    return proto, features


def read_output(x: Value, shape: tuple[int, ...]) -> dict[str, Value]:
    """Turn a tapped tensor into the parts of a block, as `mivhead.backbones.taps` does."""
    if len(shape) == 2:
        return {"token": x}
    if len(shape) == 4:
        last = shape[1] == shape[2] != shape[3]
        return {"map": x.transpose(0, 3, 1, 2) if last else x}
    _, count, channels = shape
    side = int(np.sqrt(count))
    prefix = count - side * side
    if prefix > MAX_PREFIX or side < 2:
        return {"map": x.transpose(0, 2, 1).reshape(0, channels, count, 1)}
    patches = x.take(np.arange(prefix, count), 1).transpose(0, 2, 1)
    parts = {"map": patches.reshape(0, channels, side, side)}
    if prefix:
        parts["token"] = x.take(np.asarray([0]), 1).reshape(0, channels)
    return parts


def _adapt_input(proto: Any, source: Any, size: int) -> None:
    """Put a float32 input (n, 3, R, R) in front of one in another order or type."""
    onnx = need("onnx", EXTRA)
    graph = Graph("mivhead/images/")
    x = graph.input("images", np.float32)
    inner = next(each for each in proto.graph.input if each.name == source.name)
    name = f"{source.name}_inner" if source.name == "images" else source.name
    if name != source.name:
        for node in proto.graph.node:
            for i, each in enumerate(node.input):
                if each == source.name:
                    node.input[i] = name
    if source.half:
        x = x.cast(np.float16)
    if source.channels_last:
        x = x.transpose(0, 2, 3, 1)
    graph.output(x, name)
    _put_first(proto, graph)
    proto.graph.input.remove(inner)
    shape = ["n", 3, size, size]
    proto.graph.input.append(
        onnx.helper.make_tensor_value_info("images", onnx.TensorProto.FLOAT, shape)
    )


def _put_first(proto: Any, graph: Graph) -> None:
    """Put nodes before those of a model."""
    later = list(proto.graph.node)
    del proto.graph.node[:]
    proto.graph.node.extend([*graph.nodes, *later])
    proto.graph.initializer.extend(graph.constants)


def _prune(graph: Any) -> None:
    """Drop nodes and constants that no output depends on."""
    wanted = {each.name for each in graph.output}
    kept = []
    for node in reversed(graph.node):
        if wanted & set(node.output):
            kept.append(node)
            wanted |= set(node.input)
            for attribute in node.attribute:  # subgraphs see the tensors around them
                for inner in (attribute.g, *attribute.graphs):
                    wanted |= {name for each in inner.node for name in each.input}
    del graph.node[:]
    graph.node.extend(reversed(kept))
    constants = [each for each in graph.initializer if each.name in wanted]
    del graph.initializer[:]
    graph.initializer.extend(constants)
    inputs = [each for each in graph.input if each.name in wanted]
    names = {each.name for each in constants}
    del graph.input[:]
    graph.input.extend(each for each in inputs if each.name not in names)


def _resize(proto: Any, preprocessing: Preprocessing) -> None:
    """Put Pillow's bicubic resizing, and the normalisation, before the graph.

    Like Pillow, it resizes the width first, then the height, and rounds to 8 bits after each.
    """
    onnx = need("onnx", EXTRA)
    version = next(each for each in proto.opset_import if each.domain in ("", "ai.onnx"))
    if version.version < RESIZE_OPSET:
        converted = onnx.version_converter.convert_version(proto, RESIZE_OPSET)
        proto.CopyFrom(converted)
    (image,) = proto.graph.input
    graph, size = Graph("mivhead/pixels/"), preprocessing.size
    x = graph.input("pixels", np.uint8).cast(np.float32).transpose(0, 3, 1, 2)  # (n, 3, H, W)
    x = x.resize(size, axis=3).round().clip(0, 255)
    x = x.resize(size, axis=2).round().clip(0, 255)
    mean, std = (
        np.asarray(v, np.float32).reshape(3, 1, 1) for v in (preprocessing.mean, preprocessing.std)
    )
    graph.output((x / 255 - mean) / std, image.name)
    _put_first(proto, graph)
    del proto.graph.input[:]
    proto.graph.input.append(
        onnx.helper.make_tensor_value_info(
            "pixels", onnx.TensorProto.UINT8, ["n", "height", "width", 3]
        )
    )


# Comparison


def _compare(model: FewShotClassifier, content: bytes, kind: Input) -> float:
    """Return the largest difference of a probability or score between a model and its export."""
    session = open_session(content, name := "the exported model")
    rng = np.random.default_rng(0)
    classifier = model.classifier_
    feed: dict[str, NDArray[Any]]
    if kind == "features":
        given = _some_features(classifier, rng)
        arrays = {name: x.astype(np.float32) for name, x in given.tensors.items()}
        feed = {name: arrays[name] for name in session.inputs}
    else:
        preprocessing = model.load_backbone().preset.preprocessing
        images = _some_images(rng, preprocessing.size)
        given = model.read_pictures(images)
        array = np.stack(images)  # (n, R, R, 3)
        if kind == "images":
            array = np.ascontiguousarray(normalise(images, preprocessing).transpose(0, 3, 1, 2))
        feed = {session.inputs[0]: array}
    found = run(session, feed, name, len(classifier.classes_))
    expected, unknown = classifier.score_unknown(given)
    difference = np.abs(found.probabilities - expected).max()
    if unknown is not None:
        assert found.unknown is not None
        difference = max(difference, np.abs(found.unknown - unknown).max())
    return float(difference)


def _some_images(rng: np.random.Generator, size: int) -> list[NDArray[np.uint8]]:
    """Images of coarse random patches, which resemble photographs more than noise does."""
    coarse = rng.integers(0, 256, (IMAGES, 8, 8, 3), dtype=np.uint8)
    return [to_pixels(each, i, size) for i, each in enumerate(coarse)]


def _some_features(classifier: Any, rng: np.random.Generator) -> Features:
    """Random features of the right layout, near those of the support images where it is stored."""
    support: Mapping[str, Any] = {}
    if hasattr(classifier, "support_") and isinstance(classifier.support_, Features):
        support = classifier.support_[:IMAGES].tensors
    powers = {f"block{i}": power for i, power in enumerate(classifier.scale_)}
    tensors = {}
    for name, shape in classifier.layout_.items():
        noise = rng.standard_normal((IMAGES, *shape)).astype(np.float32)
        shots = support.get(name)
        if shots is not None and shots.shape == noise.shape:
            tensors[name] = shots + np.float32(0.1 * shots.std(dtype=np.float64)) * noise
        else:
            tensors[name] = np.ldexp(noise, powers[name.partition(".")[0]])  # as large as the shots
    return Features.from_tensors(tensors)
