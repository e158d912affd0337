"""The closed forms, derived again in plain loops, and scikit-learn's decision values replayed."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression, RidgeClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler, normalize
from sklearn.svm import SVC

from mivhead import Features
from mivhead.methods import make_method
from mivhead.methods.base import minimise, pooled
from tests.helpers.few_shots import clusters, maps

STEPS = 100  # of Adam: after 400, rounding errors have grown to 1e-2
SHOTS = [[4, 3, 5], [1, 1, 1], [5, 1], [2, 2]]


def logits(name: str, X: Any, y: Any, Q: Any, **params: Any) -> NDArray[np.float64]:
    return make_method(name, random_state=0, **params).fit(X, y).logits(Q).astype(float)


def cosine(a: NDArray[Any], b: NDArray[Any]) -> float:
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def test_pooled_is_the_deepest_token_or_average() -> None:
    y = np.array([0, 1, 1])
    both, only_maps = maps(y, token=True), maps(y)
    np.testing.assert_array_equal(pooled(both), both.blocks[1].token)
    deepest = only_maps.blocks[1].map
    assert deepest is not None
    expected = [[channel.mean() for channel in image] for image in deepest]
    np.testing.assert_allclose(pooled(only_maps), expected, rtol=1e-6)


def test_pooled_of_half_precision_adds_in_single() -> None:
    """2,000 values of 100 overflow float16 when they are added in it."""
    x = np.full((1, 1, 40, 50), 100.0, np.float16)
    assert pooled(Features(x)).item() == 100.0


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("shots", SHOTS)
def test_ncc_is_a_cosine_to_class_means(shots: list[int], centred: bool) -> None:
    (X, y), (Q, _) = clusters(shots, 6), clusters(shots, 6, seed=1)
    means = [
        np.mean([x for x, label in zip(X, y, strict=True) if label == k], axis=0)
        for k in range(len(shots))
    ]
    middle = np.mean(means, axis=0) if centred else np.zeros(6)
    expected = [[cosine(q - middle, m - middle) / 0.1 for m in means] for q in Q]
    np.testing.assert_allclose(logits("ncc", X, y, Q, centred=centred), expected, rtol=1e-4)


@pytest.mark.parametrize("shots", SHOTS)
def test_protonets_is_a_squared_distance_to_class_means(shots: list[int]) -> None:
    (X, y), (Q, _) = clusters(shots, 6), clusters(shots, 6, seed=1)
    expected = [[-((q - X[y == k].mean(axis=0)) ** 2).sum() for k in range(len(shots))] for q in Q]
    np.testing.assert_allclose(logits("fit-protonets", X, y, Q), expected, rtol=1e-5)


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("channels", [3, 40])  # primal and dual
def test_ridge_equals_sklearn(channels: int, normalise: bool) -> None:
    (X, y), (Q, _) = clusters([4, 3, 5], channels), clusters([4, 3, 5], channels, seed=1)
    got = logits("ridge", X, y, Q, alpha=0.7, normalise=normalise, temperature=1.0)
    if normalise:
        X, Q = normalize(X.astype(float)), normalize(Q.astype(float))
    theirs = RidgeClassifier(alpha=0.7).fit(X.astype(float), y).decision_function(Q.astype(float))
    np.testing.assert_allclose(2 * got - 1, theirs, atol=1e-6)  # they regress onto -1 and 1


@pytest.mark.parametrize("power", [0.5, 2.0])
def test_ridge_takes_signed_powers(power: float) -> None:
    (X, y), (Q, _) = clusters([4, 3, 5], 6), clusters([4, 3, 5], 6, seed=1)
    X, Q = X - 2, Q - 2  # of both signs
    powers = [np.sign(x) * np.abs(x) ** power for x in (X, Q)]
    expected = logits("ridge", powers[0], y, powers[1])
    np.testing.assert_allclose(logits("ridge", X, y, Q, power=power), expected, atol=1e-5)


@pytest.mark.parametrize("shots", SHOTS)
def test_simpleshot_is_a_distance_of_centred_vectors_of_length_1(shots: list[int]) -> None:
    (X, y), (Q, _) = clusters(shots, 6), clusters(shots, 6, seed=1)
    middle = np.mean([X[y == k].mean(axis=0) for k in range(len(shots))], axis=0)
    X, Q = ([(x - middle) / np.linalg.norm(x - middle) for x in each] for each in (X, Q))
    means = [np.mean([x for x, i in zip(X, y, strict=True) if i == k], axis=0) for k in set(y)]
    expected = [[-((q - mean) ** 2).sum() / 0.1 for mean in means] for q in Q]
    X, Q = clusters(shots, 6)[0], clusters(shots, 6, seed=1)[0]
    np.testing.assert_allclose(logits("simpleshot", X, y, Q), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("neighbours", [1, 3, 50])
def test_knn_is_a_weighted_vote(neighbours: int) -> None:
    (X, y), (Q, _) = clusters([4, 3, 5], 6), clusters([4, 3, 5], 6, seed=1)
    probabilities = make_method("knn", neighbours=neighbours).fit(X, y).predict_proba(Q)
    for q, row in zip(Q, probabilities, strict=True):
        ranked = sorted(((cosine(q, x), k) for x, k in zip(X, y, strict=True)), reverse=True)
        votes = np.zeros(3)
        for similarity, k in ranked[:neighbours]:
            votes[k] += np.exp(similarity / 0.07)
        np.testing.assert_allclose(row, votes / votes.sum(), atol=3e-6)


@pytest.mark.parametrize("average", [False, True])
def test_tip_adapter_is_a_sum_of_affinities(average: bool) -> None:
    (X, y), (Q, _) = clusters([4, 1, 5], 6), clusters([4, 1, 5], 6, seed=1)
    got = logits("tip-adapter", X, y, Q, alpha=2.0, beta=3.0, average=average)
    for q, row in zip(Q, got, strict=True):
        expected = np.zeros(3)
        for x, k in zip(X, y, strict=True):
            expected[k] += 2 * np.exp(-3 * (1 - cosine(q, x)))
        np.testing.assert_allclose(row, expected / (np.bincount(y) if average else 1), rtol=1e-5)


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("shots", SHOTS)
def test_logistic_replays_sklearn(shots: list[int], normalise: bool) -> None:
    (X, y), (Q, _) = clusters(shots, 6), clusters(shots, 6, seed=1)
    ours = make_method("logistic", C=2.0, normalise=normalise).fit(X, y)
    X, Q = X.astype(float), Q.astype(float)
    if normalise:
        X, Q = normalize(X), normalize(Q)
    theirs = LogisticRegression(C=2.0, max_iter=1000, tol=1e-8).fit(X, y)
    queries, _ = clusters(shots, 6, seed=1)
    np.testing.assert_allclose(
        ours.decision_function(queries), theirs.decision_function(Q), atol=1e-4
    )
    np.testing.assert_allclose(ours.predict_proba(queries), theirs.predict_proba(Q), atol=1e-5)


@pytest.mark.parametrize("standardise", [False, True])
@pytest.mark.parametrize("shots", SHOTS)
def test_svm_replays_sklearn(shots: list[int], standardise: bool) -> None:
    (X, y), (Q, _) = clusters(shots, 6), clusters(shots, 6, seed=1)
    X[:, 2] = 0.25  # a constant channel
    ours = make_method("svm", C=3.0, standardise=standardise).fit(X, y)
    steps = [StandardScaler(), SVC(C=3.0, gamma="auto")] if standardise else [SVC(C=3.0)]
    theirs = make_pipeline(*steps).fit(X.astype(float), y)
    expected = theirs.decision_function(Q.astype(float))
    np.testing.assert_allclose(ours.decision_function(Q), expected, atol=1e-6)


@pytest.mark.parametrize("standardise", [False, True])
def test_svm_predicts_what_sklearn_predicts_with_ties(standardise: bool) -> None:
    """Five classes of mere noise win equally many pairs often; then the first of them counts."""
    rng = np.random.default_rng(0)
    X, y, Q = rng.random((25, 40)), np.repeat(np.arange(5), 5), rng.random((300, 40))
    X, Q = (np.maximum(x - 0.5, 0).astype(np.float32) for x in (X, Q))  # rectified
    ours = make_method("svm", standardise=standardise).fit(X, y)
    steps = [StandardScaler(), SVC(gamma="auto")] if standardise else [SVC()]
    theirs = make_pipeline(*steps).fit(X.astype(float), y)
    expected, values = theirs.predict(Q.astype(float)), theirs.decision_function(Q.astype(float))
    assert (values.argmax(axis=1) != expected).any()  # margins would break some ties otherwise
    np.testing.assert_array_equal(ours.predict(Q), expected)
    np.testing.assert_array_equal(ours.predict_proba(Q).argmax(axis=1), expected)


def test_adam_equals_torch() -> None:
    start = torch.randn(3, 2, generator=torch.Generator().manual_seed(0))

    def loss(w: torch.Tensor) -> torch.Tensor:
        return ((w - 1) ** 4).sum() + w[0, 0].exp()

    ours, theirs = start.numpy().copy(), start.clone().requires_grad_()

    def with_gradient() -> tuple[float, list[NDArray[Any]]]:
        gradient = 4 * (ours - 1) ** 3
        gradient[0, 0] += np.exp(ours[0, 0])
        return loss(torch.as_tensor(ours)).item(), [gradient]

    losses = minimise(with_gradient, [ours], rate=0.05, steps=60)
    optimiser = torch.optim.Adam([theirs], lr=0.05)
    for value in losses:
        optimiser.zero_grad()
        now = loss(theirs)
        now.backward()
        assert value == pytest.approx(now.item(), rel=1e-5)
        optimiser.step()
    np.testing.assert_allclose(ours, theirs.detach(), rtol=1e-5)


def train_again(start: list[torch.Tensor], score: Any, y: Any) -> list[torch.Tensor]:
    optimiser = torch.optim.Adam([p.requires_grad_() for p in start], lr=0.03)
    for _ in range(STEPS):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(score(), torch.as_tensor(y)).backward()
        optimiser.step()
    return [p.detach() for p in start]


def test_baseline_is_a_linear_layer() -> None:
    X, y = clusters([4, 3, 5], 6)
    start = make_method("baseline", steps=0, random_state=0).fit(X, y).learned_
    layer = torch.nn.Linear(6, 3)
    w = layer.weight.data.copy_(torch.as_tensor(start["weights"]))
    b = layer.bias.data.copy_(torch.as_tensor(start["biases"]))
    assert not b.any()
    assert w.abs().max() <= 6**-0.5
    x = torch.as_tensor(X)
    w, b = train_again([w, b], lambda: x @ w.T + b, y)
    got = logits("baseline", X, y, X, steps=STEPS)
    np.testing.assert_allclose(got, x @ w.T + b, rtol=1e-3, atol=1e-3)


def test_baseline_plus_plus_is_weight_normalised() -> None:
    X, y = clusters([4, 3, 5], 6)
    start = make_method("baseline++", steps=0, random_state=0).fit(X, y).learned_["directions"]
    v = torch.as_tensor(start.copy())
    g = v.norm(dim=1)  # PyTorch's weight norm starts with the length of the weights
    x = torch.as_tensor(X)
    x = x / (x.norm(dim=1, keepdim=True) + 1e-5)

    def score() -> torch.Tensor:
        return 2 * x @ (g[:, None] * v / v.norm(dim=1, keepdim=True)).T

    train_again([v, g], score, y)
    got = logits("baseline++", X, y, X, steps=STEPS)
    np.testing.assert_allclose(got, score().detach(), rtol=1e-3, atol=1e-3)


def test_baseline_plus_plus_has_a_larger_scale_above_200_classes() -> None:
    X, y = clusters([2] * 201, 4)
    default = logits("baseline++", X, y, X, steps=0)
    np.testing.assert_allclose(default, logits("baseline++", X, y, X, steps=0, scale=10.0))


@given(st.integers(0, 1000), st.sampled_from(["ncc", "fit-lda", "fit-qda", "ridge", "knn"]))
def test_probabilities_sum_to_one_and_are_finite(seed: int, name: str) -> None:
    (X, y), (Q, _) = clusters([2, 1, 3], 5, seed=seed), clusters([3, 3, 3], 5, seed=seed + 1)
    params = {"steps": 3} if name.startswith("fit") else {}
    probabilities = make_method(name, **params).fit(X, y).predict_proba(Q)
    assert np.isfinite(probabilities).all()
    np.testing.assert_allclose(probabilities.sum(axis=1), 1)
