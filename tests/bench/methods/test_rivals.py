"""The rivals on one vector per image: their formulas in plain loops, and hard support sets."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression, RidgeClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler, normalize
from sklearn.svm import SVC

from mivhead import Features
from mivhead.errors import InputError
from mivhead_bench.methods import make_method
from mivhead_bench.methods.base import pooled
from tests.helpers.few_shots import RIVALS, clusters, maps, quick

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


@pytest.mark.parametrize("token", [False, True])
def test_probes_of_all_blocks_see_every_block_alike(token: bool) -> None:
    """Each token or mean patch has length 1, however large a block's values are."""
    _, y = clusters([4, 3, 5], 4)
    X, Q = maps(y, token=token), maps(y, seed=1, token=token, spread=3.0)

    def join(features: Features) -> NDArray[np.float64]:
        parts = []
        for block in features.blocks:
            assert block.map is not None
            means = [[channel.mean() for channel in image] for image in block.map]
            parts.append(means if block.token is None else block.token)
        return np.hstack([normalize(np.asarray(part, float)) for part in parts])

    rows, queries = normalize(join(X)), normalize(join(Q))
    assert rows.shape[1] == 8 + 16
    penalty = make_method("ridge-all").alpha
    theirs = RidgeClassifier(alpha=penalty).fit(rows, y).decision_function(queries)
    np.testing.assert_allclose(0.2 * logits("ridge-all", X, y, Q) - 1, theirs, atol=1e-4)
    model = LogisticRegression(C=make_method("logistic-all").C, max_iter=1000, tol=1e-8)
    expected = model.fit(rows, y).predict_proba(queries)
    found = make_method("logistic-all").fit(X, y).predict_proba(Q)
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("rectify", [False, True])
@pytest.mark.parametrize("unlabelled", [False, True])
def test_laplacianshot_lowers_its_energy_to_the_papers_fixed_point(
    unlabelled: bool, rectify: bool
) -> None:
    shots, k, strength = [4, 1, 3], 3, 0.8
    (X, y), (Q, _), (U, _) = (clusters(shots, 6, seed, spread=3.0) for seed in (0, 1, 2))
    given = {"unlabelled": U} if unlabelled else {}
    model = make_method("laplacianshot", strength=strength, neighbours=k, rectify=rectify)
    got = model.fit(X, y, **given).predict_proba(Q)
    middle = np.mean([X[y == c].mean(axis=0) for c in range(3)], axis=0)
    X, Q, U = (normalize(x - middle) for x in (X, Q, U))
    pool = U if unlabelled else Q
    means = np.array([X[y == c].mean(axis=0) for c in range(3)])
    shift = X.mean(axis=0) - pool.mean(axis=0) if rectify else np.zeros(6)
    if rectify:
        nearest = [int(np.argmax([cosine(p + shift, m) for m in means])) for p in pool]
        both = [*zip(X, y, strict=True), *zip(pool + shift, nearest, strict=True)]
        for c, mean in enumerate(means.copy()):
            own = [(np.exp(10 * cosine(x, mean)), x) for x, label in both if label == c]
            means[c] = sum(w * x for w, x in own) / sum(w for w, _ in own)

    def distances(x: Any) -> Any:
        return np.array([((x + shift - mean) ** 2).sum() for mean in means])

    def near(x: Any, skip: int | None) -> list[int]:
        order = sorted(range(len(pool)), key=lambda p: np.linalg.norm(x - pool[p]))
        return [p for p in order if p != skip][:k]

    soft = np.array([np.exp(-distances(x)) / np.exp(-distances(x)).sum() for x in pool])
    start, energies = soft, []
    for _ in range(20):
        agreement = sum(soft[q] @ soft[p] for q in range(len(pool)) for p in near(pool[q], q))
        entropy = (soft * np.log(soft)).sum()
        unary = sum(soft[q] @ distances(pool[q]) for q in range(len(pool)))
        energies.append(unary - strength * agreement + entropy)
        powers = [
            np.exp(strength * sum(soft[p] for p in near(x, q)) - distances(x))
            for q, x in enumerate(pool)
        ]
        soft = np.array([own / own.sum() for own in powers])
    assert energies[-1] < energies[0]
    assert np.abs(soft - start).max() > 0.05
    if unlabelled:  # a query takes what its neighbours have become, and does not change them
        powers = [np.exp(strength * sum(soft[p] for p in near(x, None)) - distances(x)) for x in Q]
        soft = np.array([own / own.sum() for own in powers])
        one = model.predict_proba(clusters(shots, 6, 1, spread=3.0)[0][:1])
        np.testing.assert_allclose(one, got[:1], atol=1e-6)
    np.testing.assert_allclose(got, soft, atol=1e-5)


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
    found = ours.logits(Q)
    if len(shots) == 2:
        np.testing.assert_allclose(found[:, 1] - found[:, 0], expected, atol=1e-6)
    else:  # apart from ties, where the first class gets the highest value
        untied = found.argmax(axis=1) == expected.argmax(axis=1)
        np.testing.assert_allclose(found[untied], expected[untied], atol=1e-6)


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


def train_again(start: list[torch.Tensor], score: Any, y: Any) -> list[torch.Tensor]:
    optimiser = torch.optim.Adam([p.requires_grad_() for p in start], lr=0.03)
    for _ in range(STEPS):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(score(), torch.as_tensor(y)).backward()
        optimiser.step()
    return [p.detach() for p in start]


def test_baseline_is_a_linear_layer() -> None:
    X, y = clusters([4, 3, 5], 6)
    layer = make_method("baseline", steps=0, random_state=0).fit(X, y).layer_
    w, b = layer.weight.detach(), layer.bias.detach()
    assert not b.any()
    assert w.abs().max() <= 6**-0.5
    x = torch.as_tensor(X)
    w, b = train_again([w, b], lambda: x @ w.T + b, y)
    got = logits("baseline", X, y, X, steps=STEPS)
    np.testing.assert_allclose(got, x @ w.T + b, rtol=1e-3, atol=1e-3)


def test_baseline_plus_plus_is_weight_normalised() -> None:
    X, y = clusters([4, 3, 5], 6)
    layer = make_method("baseline++", steps=0, random_state=0).fit(X, y).layer_
    v = layer.weight.detach().clone()
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


# Hard support sets, and what must not matter.

SOME = st.lists(st.integers(1, 4), min_size=2, max_size=9)  # shots of each class


@pytest.mark.parametrize("name", RIVALS)
@settings(max_examples=10)
@given(shots=SOME, channels=st.integers(1, 8), rank=st.integers(0, 3), seed=st.integers(0, 99))
def test_singular_support_sets_work(
    name: str, shots: list[int], channels: int, rank: int, seed: int
) -> None:
    """Features in few dimensions, equal images, dead channels, single shots, many classes."""
    rng = np.random.default_rng(seed)
    y = np.repeat(np.arange(len(shots)), shots)
    X = rng.random((len(y), rank)) @ rng.random((rank, channels))
    X[:, rng.random(channels) < 0.3] = 0.0
    X[rng.random(len(y)) < 0.3] = X[0]
    classifier = make_method(name, random_state=0, **quick(name)).fit(X, y)
    for queries in (X, 3 * rng.random((4, channels))):
        probabilities = classifier.predict_proba(queries)
        assert np.isfinite(probabilities).all()
        np.testing.assert_allclose(probabilities.sum(axis=1), 1)


@pytest.mark.parametrize("name", RIVALS)
def test_identical_images_give_equal_probabilities(name: str) -> None:
    X, y = np.ones((4, 3), np.float32), np.array([0, 0, 1, 1])
    params = quick(name) if name.startswith("fit") else {}
    probabilities = make_method(name, random_state=0, **params).fit(X, y).predict_proba(X)
    tolerance = 0.05 if name.startswith("baseline") else 1e-6
    np.testing.assert_allclose(probabilities, 0.5, atol=tolerance)


@pytest.mark.parametrize("name", RIVALS)
def test_order_of_images_does_not_matter(name: str) -> None:
    (X, y), (Q, _) = clusters([4, 1, 3], 6), clusters([4, 1, 3], 6, seed=1)
    order = np.random.default_rng(0).permutation(len(y))
    first, second = (
        logits(name, X[rows], y[rows], Q, **quick(name)) for rows in (np.arange(len(y)), order)
    )
    np.testing.assert_allclose(first, second, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("name", RIVALS)
def test_views_are_further_images(name: str) -> None:
    (X, y), (V, _), (Q, _) = (clusters([3, 2], 6, seed=seed) for seed in (0, 1, 2))
    classifier = make_method(name, use_views=True, random_state=0, **quick(name))
    with_views = classifier.fit(X, y, views=V, view_of=np.arange(5)).logits(Q)
    more = logits(name, np.concatenate([X, V]), np.concatenate([y, y]), Q, **quick(name))
    np.testing.assert_allclose(with_views, more, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["baseline", "baseline++"])
def test_seed_decides_alone(name: str) -> None:
    X, y = clusters([4, 1, 3], 6)
    before = torch.get_rng_state()
    first, same, other = (
        make_method(name, random_state=seed, steps=3).fit(X, y).logits(X) for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, same)
    assert not np.array_equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)  # the global generator stays as it is


@pytest.mark.parametrize("name", RIVALS)
def test_digits_are_learnt_and_training_lowers_the_loss(name: str) -> None:
    pixels, digits = load_digits(return_X_y=True)
    classifier = make_method(name, random_state=0).fit(pixels[:100] / 16, digits[:100])
    assert classifier.score(pixels[100:700] / 16, digits[100:700]) > 0.64  # chance is 0.1
    if "steps" in classifier.get_params():
        assert len(classifier.losses_) == 400
        assert classifier.losses_[-1] < 0.5 * classifier.losses_[0]


@pytest.mark.parametrize(
    ("name", "parameter", "value"),
    [
        ("ncc", "temperature", 0.0),
        ("knn", "neighbours", 2.5),
        ("tip-adapter", "beta", "high"),
        ("svm", "C", True),
        ("baseline", "steps", -1),
    ],
)
def test_wrong_hyperparameters_are_named(name: str, parameter: str, value: object) -> None:
    X, y = clusters([2, 2], 4)
    with pytest.raises(InputError, match=parameter):
        make_method(name, **{parameter: value}).fit(X, y)
