"""Export a fitted classifier to one ONNX file: backbone, head, experts and probabilities.

The file runs wherever ONNX does; `mivhead.load` reads it without PyTorch. Its metadata says what
`miv info` shows: classes, backbone, preprocessing. Every export is compared with the model
it came from before the file is written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from mivhead._util.files import replacing
from mivhead._util.runtime import parse_graph
from mivhead._version import __version__
from mivhead.backbones.base import (
    MAX_PREFIX,
    Backbone,
    LazyBackbone,
    normalise,
    storage_type,
    to_picture,
)
from mivhead.backbones.onnx_model import OnnxBackbone, image_input
from mivhead.classifier import MIVClassifier
from mivhead.errors import InputError, NotAvailableError
from mivhead.export.graph import OPSET, Graph, Value
from mivhead.export.head import head_logits, unknown
from mivhead.features import Features
from mivhead.model.exported import (
    CHECKSUM_KEY,
    FORMAT,
    METADATA_KEY,
    NO_CHECKSUM,
    PROBABILITIES,
    UNKNOWN,
    Input,
    open_session,
    run,
    with_checksum,
)
from mivhead.model.file import as_model, info_of
from mivhead.model.model import Model

if TYPE_CHECKING:
    from mivhead.backbones.module import ModuleBackbone

MAX_BYTES = 2**31 - 2**20  # a protobuf message has less than 2 GiB
TOLERANCE = 1e-3  # of a probability, between the model and its export
IMAGES = 4  # that the two are compared on


@dataclass(frozen=True)
class Export:
    """What was written."""

    bytes: int  # size of the file
    difference: float  # the largest one between probabilities of the model and of the file


def export_model(
    model: Model | MIVClassifier,
    path: str | Path,
    *,
    input: Input | None = None,  # noqa: A002  # the word for it
) -> Export:
    """Export a fitted model to an ONNX file, atomically.

    `input` is what the graph takes: a normalised float32 batch (n, 3, R, R) of images, or block
    features, without a backbone. None: images if the model has a backbone, else features.
    """
    import onnx

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
        proto = _from_images(model)
    document = {
        "format": FORMAT,
        "input": input,
        "model": asdict(info_of(model)),
        "decision": asdict(model.calibration),
        "shots": list(model.shot_counts.values()),
    }
    metadata = {METADATA_KEY: json.dumps(document), CHECKSUM_KEY: NO_CHECKSUM.decode()}
    onnx.helper.set_model_props(proto, metadata)
    if proto.ByteSize() > MAX_BYTES:
        raise InputError("The model is larger than 2 GB, which an ONNX file cannot hold.")
    onnx.checker.check_model(proto, full_check=True)
    content = with_checksum(proto.SerializeToString())
    difference = _compare(model, content, input)
    if not difference <= TOLERANCE:
        raise NotAvailableError(
            f"The exported graph computes other probabilities than the model (by up to "
            f"{difference:.2g}), so nothing was written: please report this with your versions of "
            "onnx and onnxruntime."
        )
    with replacing(path) as part:
        part.write_bytes(content)
    return Export(len(content), difference)


# Graphs


def _from_features(classifier: MIVClassifier) -> Any:
    """Make a model that takes the features which the classifier looks at."""
    import onnx

    graph = Graph()
    layout = classifier.layout_
    values = {name: graph.input(name, np.float32) for name in layout}
    outputs = _finish(graph, head_logits(graph, values, classifier), values, classifier)
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


def _from_images(model: Model) -> Any:
    """Make a model that takes images: the backbone's graph, continued by the head's."""
    classifier = model.classifier_
    backbone = model.load_backbone()
    if isinstance(backbone, LazyBackbone):
        backbone = backbone.loaded()
    graph = Graph()
    proto, features = _backbone_graph(backbone, graph)
    # Features are rounded as they are in `extract`, so that both compute with the same ones.
    if storage_type(getattr(backbone, "dtype", "float16")) == np.float16:
        features = {k: v.cast(np.float16).cast(np.float32) for k, v in features.items()}
    outputs = _finish(graph, head_logits(graph, features, classifier), features, classifier)
    body = proto.graph
    body.node.extend(graph.nodes)
    body.initializer.extend(graph.constants)
    del body.output[:], body.value_info[:]
    body.output.extend(outputs)
    _prune(body)
    for tensor in (*body.input, *body.output):
        tensor.type.tensor_type.shape.dim[0].dim_param = "n"
    del proto.metadata_props[:]
    proto.doc_string = body.doc_string = ""
    for node in body.node:
        del node.metadata_props[:]
        node.doc_string = ""
    proto.producer_name, proto.producer_version = "mivhead", __version__
    return proto


def _finish(
    graph: Graph, scores: Value, features: Mapping[str, Value], classifier: MIVClassifier
) -> list[Any]:
    """Add and describe the outputs: probabilities, and the score of unknown images."""
    import onnx

    graph.output(scores.softmax(axis=1).cast(np.float32), PROBABILITIES)
    score = unknown(scores, features, classifier, classifier.decision_)
    graph.output(score.reshape(-1), UNKNOWN)
    shapes: dict[str, list[Any]] = {PROBABILITIES: ["n", len(classifier.classes_)], UNKNOWN: ["n"]}
    kind = onnx.TensorProto.FLOAT
    return [onnx.helper.make_tensor_value_info(k, kind, shape) for k, shape in shapes.items()]


def _backbone_graph(backbone: Backbone, graph: Graph) -> tuple[Any, dict[str, Value]]:
    """Return the ONNX model of a backbone, and its features by name."""
    if hasattr(backbone, "copy_to_tune"):  # a module of PyTorch
        from mivhead.export.trace import module_graph

        proto = module_graph(cast("ModuleBackbone", backbone))
        names = [output.name for output in proto.graph.output]
        return proto, {name: graph.input(name, np.float32) for name in names}
    if type(backbone) is not OnnxBackbone:  # the blocks of a folder are normed afterwards
        raise InputError(
            f"The backbone {backbone.identity.name} cannot be exported, because it is a service or "
            "code of your own: export with --features, from its features to probabilities."
        )
    import onnx

    proto = parse_graph(backbone.content(), backbone.identity.name)
    source = image_input(proto, backbone.identity.name)
    if min(o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")) < OPSET:
        proto = onnx.version_converter.convert_version(proto, OPSET)
    if source.channels_last:
        raise InputError(
            f"The backbone {backbone.identity.name} takes images as (n, R, R, 3), which cannot be "
            "exported: export with --features."
        )
    features: dict[str, Value] = {}
    for i, (tap, output) in enumerate(backbone.run_blank().items()):
        parts = read_output(graph.input(tap, np.float32), output.shape)
        features |= {f"block{i}.{part}": value for part, value in parts.items()}
    return proto, features


def read_output(x: Value, shape: tuple[int, ...]) -> dict[str, Value]:
    """Turn a tapped tensor into the parts of a block, as `mivhead.backbones.base` does."""
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


def _prune(graph: Any) -> None:
    """Drop nodes, constants and inputs that no output depends on."""

    def replace(field: Any, messages: list[Any]) -> None:
        del field[:]
        field.extend(messages)

    wanted = {output.name for output in graph.output}
    kept = []
    for node in reversed(graph.node):
        if wanted & set(node.output):
            kept.append(node)
            wanted |= set(node.input)
            for attribute in node.attribute:  # subgraphs see the tensors around them
                for inner in (attribute.g, *attribute.graphs):
                    wanted |= {name for inner_node in inner.node for name in inner_node.input}
    constants = [constant for constant in graph.initializer if constant.name in wanted]
    inputs = wanted - {constant.name for constant in constants}
    replace(graph.node, kept[::-1])
    replace(graph.initializer, constants)
    replace(graph.input, [tensor for tensor in graph.input if tensor.name in inputs])


# Comparison


def _compare(model: Model, content: bytes, kind: Input) -> float:
    """Return the largest difference of a probability or score between a model and its export."""
    session = open_session(content, name := "the exported model")
    rng = np.random.default_rng(0)
    classifier = model.classifier_
    feed: dict[str, NDArray[Any]]
    if kind == "features":
        shapes = {name: (IMAGES, *shape) for name, shape in classifier.layout_.items()}
        arrays = {k: rng.standard_normal(shape, np.float32) for k, shape in shapes.items()}
        features = Features.from_tensors(arrays)
        feed = {name: arrays[name] for name in session.inputs}
    else:
        preprocessing = model.load_backbone().preset.preprocessing
        # Coarse random patches resemble photographs more than noise does.
        coarse = rng.integers(0, 256, (IMAGES, 8, 8, 3), dtype=np.uint8)
        pictures = (to_picture(image, i, preprocessing.size) for i, image in enumerate(coarse))
        images = [np.asarray(picture) for picture in pictures]
        features = model.read_pictures(images)
        array = np.ascontiguousarray(normalise(images, preprocessing).transpose(0, 3, 1, 2))
        feed = {session.inputs[0]: array}
    scores = run(session, feed, name, len(classifier.classes_))
    expected, unknown = classifier.score_unknown(features)
    differences = scores.probabilities - expected, scores.unknown - unknown
    return float(max(np.abs(difference).max() for difference in differences))
