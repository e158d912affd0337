"""Methods on one vector per image as ONNX graphs: the formula of each one's `_score`, once more.

Like the methods themselves, they compute in double precision where they do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mivhead.classifier import MIVClassifier
from mivhead.errors import InputError
from mivhead.export.graph import Graph, Value
from mivhead.export.head import head_logits, mean_vector, pooled
from mivhead.features import Block, read_layout
from mivhead.methods import base
from mivhead.methods.base import NORM_EPS, Array, PooledClassifier, membership
from mivhead.methods.baseline import LENGTH_EPS, Baseline, BaselinePlusPlus
from mivhead.methods.gaussian import FitLDA, FitQDA, ProtoNets
from mivhead.methods.knn import LEAST_SHARE, NearestNeighbours
from mivhead.methods.logistic import LogisticProbe
from mivhead.methods.ncc import NearestCentroid
from mivhead.methods.registry import method_name
from mivhead.methods.ridge import RidgeRegression
from mivhead.methods.simpleshot import SimpleShot
from mivhead.methods.svm import SupportVectors
from mivhead.methods.tip_adapter import TipAdapter
from mivhead.methods.user import UserMethod
from mivhead.model.decision import FAR, USUAL_FAR, DecisionRule


def logits(graph: Graph, features: Mapping[str, Value], classifier: Any) -> Value:
    """Logits (n, class) of a fitted method, from features by name.

    Raises
    ------
    InputError
        In one sentence, why a method cannot be exported.
    """
    if isinstance(classifier, MIVClassifier):
        return head_logits(graph, features, classifier)
    formula = FORMULAS.get(type(classifier))
    if formula is None:
        raise InputError(_why_not(classifier))
    parts, block = _deepest(features, classifier)
    scores: Value = formula(pooled(parts, block), classifier.learned_, classifier)
    return scores


def _why_not(classifier: Any) -> str:
    """Say why a method without a formula cannot be exported."""
    if isinstance(classifier, UserMethod):
        name, built_in = classifier.home, False
    else:
        name = method_name(classifier)
        built_in = type(classifier).__module__.startswith("mivhead.")
    reason = (
        "it has no formula in `mivhead.export.methods`"
        if built_in
        else "it is Python code of your own, which ONNX cannot run"
    )
    return (
        f"The method {name} cannot be exported: {reason}; export another method of `miv methods`, "
        "such as miv."
    )


def scaled(features: Mapping[str, Value], classifier: Any) -> dict[str, Value]:
    """Divide features by the powers of two that keep extreme ones in range; usually by none."""
    powers = {f"block{i}": power for i, power in enumerate(classifier.scale_) if power}
    factors = {name: 2.0 ** -powers.get(name.partition(".")[0], 0) for name in features}
    return {k: v * factors[k] if factors[k] != 1 else v for k, v in features.items()}


def unknown(
    scores: Value, features: Mapping[str, Value], classifier: Any, rule: DecisionRule
) -> Value:
    """Score (n, 1) of how unlike the shots an image is; see `mivhead.model.decision`."""
    vectors = mean_vector(*_deepest(features, classifier))
    near, lift = (vectors @ rule.shots.T).largest(1), None  # (n, 1)
    if len(unseen := rule.unseen(len(classifier.classes_))):
        by_name = scores.softmax(1).take(unseen, 1).sum(1, keepdims=True).cast(np.float32)
        near = near + by_name * (near * -1 + rule.usual_near).at_least(0)
        lift = by_name * rule.lift
    if rule.other is not None:  # the energy is that of the named classes
        hidden = np.zeros(len(classifier.classes_), np.float32)
        hidden[rule.other] = -1e6
        scores = scores + hidden
    top = scores.largest(1)  # (n, 1)
    energy = ((scores - top).exp().sum(1, keepdims=True).log() + top).cast(np.float32)
    if lift is not None:
        energy = energy + lift
    score = energy * -rule.weight - near
    if not len(rule.background):
        return score + FAR * USUAL_FAR
    return score + (vectors @ rule.background.T).largest(1) * FAR


def _deepest(features: Mapping[str, Value], classifier: Any) -> tuple[dict[str, Value], Block]:
    """Return the parts of the deepest block, and its shape as a block without images."""
    blocks = read_layout({k: list(v) for k, v in classifier.layout_.items()}).blocks
    last = f"block{len(blocks) - 1}."
    parts = {k.removeprefix(last): v for k, v in features.items() if k.startswith(last)}
    return parts, blocks[-1]


def unit(x: Value) -> Value:
    """Scale vectors (n, C) to length 1."""
    return x / x.length(1, least=NORM_EPS)


def _squared_distances(x: Value, rows: Array) -> Value:
    """Squared Euclidean distances (n, row); differences first, which keeps all digits."""
    apart = x.reshape(0, 1, -1) - rows[None]  # (n, row, C)
    return (apart * apart).sum(2)


Learned = Mapping[str, Array]


def _ncc(x: Value, learned: Learned, method: NearestCentroid) -> Value:
    means, x = learned["means"], x.cast(np.float64)
    if method.centred:
        middle = means.mean(axis=0)
        means, x = means - middle, x - middle
    return unit(x) @ (base.unit(means).T / method.temperature)


def _simpleshot(x: Value, learned: Learned, method: SimpleShot) -> Value:
    x = unit(x.cast(np.float64) - learned["middle"])
    return _squared_distances(x, learned["means"]) / -method.temperature


def _baseline(x: Value, learned: Learned, _: Baseline) -> Value:
    return x @ learned["weights"].T + learned["biases"]


def _baseline_plus_plus(x: Value, learned: Learned, method: BaselinePlusPlus) -> Value:
    x = x / ((x * x).sum(1, keepdims=True).sqrt() + LENGTH_EPS)
    return x @ (base.unit(learned["directions"]).T * method.logit_scale * learned["lengths"])


def _linear(x: Value, learned: Learned, method: LogisticProbe | RidgeRegression) -> Value:
    x = x.cast(np.float64)
    if isinstance(method, RidgeRegression) and method.power != 1:
        x = x.abs().power(method.power) * x.sign()
    x = unit(x) if method.normalise else x
    scores = x @ learned["coefficients"].T.astype(np.float64) + learned["intercepts"]
    return scores / method.temperature if isinstance(method, RidgeRegression) else scores


def _tip_adapter(x: Value, learned: Learned, method: TipAdapter) -> Value:
    cosines = unit(x.cast(np.float64)) @ learned["keys"].T  # (n, shot)
    hot = membership(learned["labels"], len(method.classes_), np.float64)
    shares = hot / hot.sum(axis=0) if method.average else hot
    return ((cosines - 1.0) * method.beta).exp() @ (method.alpha * shares)


def _knn(x: Value, learned: Learned, method: NearestNeighbours) -> Value:
    cosines = unit(x.cast(np.float64)) @ learned["keys"].T  # (n, shot)
    k = min(method.neighbours, len(learned["keys"]))
    nearest, rows = cosines.top(k)  # (n, neighbour)
    shares = (nearest / method.temperature).softmax(1)
    hot = x.graph.value(membership(learned["labels"], len(method.classes_), np.float64))
    voters = hot.pick(rows)  # (n, neighbour, class)
    votes = (shares.reshape(0, 1, -1) @ voters).reshape(0, -1)  # (n, class)
    return votes.at_least(LEAST_SHARE).log()


def _svm(x: Value, learned: Learned, method: SupportVectors) -> Value:
    channels, classes = len(learned["shift"]), len(method.classes_)
    x = (x.cast(np.float64) - learned["shift"]) / learned["scale"]
    kernel = (_squared_distances(x, learned["vectors"]) * (-1 / channels)).exp()  # (n, vector)
    # Evidence of the vectors of class i for i against j: one matrix for all pairs
    own = (
        membership(learned["labels"], classes, np.float64)[:, :, None]
        * learned["coefficients"][:, None, :]
    )
    pairs = (own - own.swapaxes(1, 2)).reshape(len(own), -1)  # (vector, i and j)
    margins = (kernel @ pairs).reshape(0, classes, classes) + learned["intercepts"]  # (n, i, j)
    totals: Value = margins.sum(2)  # (n, class)
    if classes == 2:
        return totals / 2.0
    votes = (margins > 0.0).cast(np.float64).sum(2)  # (n, class)
    values: Value = votes + totals / ((totals.abs() + 1.0) * 3.0)
    # The first of the classes with most votes gets the highest of all values.
    earlier = votes - np.arange(classes) / (2 * classes)  # votes are integers
    best = (earlier - earlier.largest(1) + 1e-9 > 0.0).cast(np.float64)  # (n, class): 1 for it
    chosen: Value = values * (best * -1.0 + 1.0) + best * values.largest(1)
    return chosen


def _gaussian(x: Value, learned: Learned, _: FitLDA | FitQDA) -> Value:
    precision, means, labels = learned["precision"], learned["means"], learned["labels"]
    centred = x.cast(np.float64) - learned["mean"]
    inside = centred @ learned["basis"].T  # (n, dimension)
    rest = centred - inside @ learned["basis"]
    outside = (rest * rest).sum(1, keepdims=True) / float(learned["weights"][2])  # (n, 1)
    root = np.sqrt(precision)
    distances = _squared_distances(inside * root, means * root) + outside  # (n, class)
    if len(labels):
        offsets = (learned["rows"] * means[labels]).sum(axis=1)
        gained = inside @ learned["rows"].T - offsets  # (n, row)
        distances = distances - (gained * gained) @ membership(labels, len(means), np.float64)
    return (distances + learned["volumes"]) * -0.5


def _protonets(x: Value, learned: Learned, _: ProtoNets) -> Value:
    return _squared_distances(x.cast(np.float64), learned["means"]) * -1.0


FORMULAS: dict[type[PooledClassifier], Callable[..., Value]] = {
    NearestCentroid: _ncc,
    Baseline: _baseline,
    BaselinePlusPlus: _baseline_plus_plus,
    FitLDA: _gaussian,
    FitQDA: _gaussian,
    ProtoNets: _protonets,
    LogisticProbe: _linear,
    RidgeRegression: _linear,
    SupportVectors: _svm,
    NearestNeighbours: _knn,
    SimpleShot: _simpleshot,
    TipAdapter: _tip_adapter,
}
