"""A fitted method as an ONNX graph: its logits, and how unlike its shots an image is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mivhead.classifier import MIVClassifier
from mivhead.errors import InputError
from mivhead.export.graph import Graph, Value
from mivhead.export.head import head_logits, mean_vector, pooled
from mivhead.features import Block, read_layout
from mivhead.methods.base import PooledClassifier
from mivhead.methods.registry import method_name
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
    scores: Value | None = None
    if isinstance(classifier, PooledClassifier):
        scores = classifier.graph(pooled(*_deepest(features, classifier)))
    if scores is None:
        raise InputError(_why_not(classifier))
    return scores


def _why_not(classifier: Any) -> str:
    """Explain why a method without a formula cannot be exported."""
    if isinstance(classifier, UserMethod):
        name, built_in = classifier.home, False
    else:
        name = method_name(classifier)
        built_in = type(classifier).__module__.startswith("mivhead.")
    reason = (
        "its class has no `_graph`"
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
    if not len(rule.shots):
        return scores.largest(1).cast(np.float32) * 0
    vectors = mean_vector(*_deepest(features, classifier))
    near, lift = (vectors @ rule.shots.T).largest(1), None  # (n, 1)
    if len(unseen := rule.unseen(len(classifier.classes_))):
        seen = np.setdiff1d(np.arange(len(classifier.classes_)), unseen)
        by_name = scores.take(unseen, 1).largest(1) > scores.take(seen, 1).largest(1)
        by_name = by_name.cast(np.float32)  # (n, 1)
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
