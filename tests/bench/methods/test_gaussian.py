"""The FiT head against explicit inverses and determinants."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from mivhead_bench.methods import make_method
from mivhead_bench.methods.gaussian import Gaussians
from tests.helpers.few_shots import clusters

SHOTS = [[4, 3, 5], [1, 1, 1], [6, 1, 2, 1], [1, 1]]
CHANNELS = [3, 30]  # fewer and more than images


def covariance(x: Any) -> Any:
    """Covariance with correction 1; zero for one image. Works on tensors and arrays."""
    centred = x - x.mean(0)
    return centred.T @ centred / max(1, len(x) - 1)


def log_density(x: NDArray[Any], mean: NDArray[Any], sigma: NDArray[Any]) -> float:
    delta = x - mean
    sign, log_det = np.linalg.slogdet(2 * np.pi * sigma)
    assert sign > 0
    return float(-(delta @ np.linalg.inv(sigma) @ delta + log_det) / 2)


def expected_densities(X: Any, y: Any, Q: Any, a: float, b: float, c: float) -> NDArray[Any]:
    X, Q = X.astype(float), Q.astype(float)
    total, eye = covariance(X), np.eye(X.shape[1])
    out = np.zeros((len(Q), y.max() + 1))
    for k in range(y.max() + 1):
        own = X[y == k]
        sigma = a * covariance(own) + b * total + c * eye
        for j, q in enumerate(Q):
            out[j, k] = log_density(q, own.mean(axis=0), sigma)
    return out


@pytest.mark.parametrize(("name", "weights"), [("fit-lda", (0, 1, 1)), ("fit-qda", (0.5, 0.5, 1))])
@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("shots", SHOTS)
def test_start_is_the_explicit_gaussian(
    shots: list[int], channels: int, name: str, weights: tuple[float, float, float]
) -> None:
    (X, y), (Q, _) = clusters(shots, channels), clusters(shots, channels, seed=1)
    got = make_method(name, steps=0).fit(X, y).logits(Q)
    np.testing.assert_allclose(got, expected_densities(X, y, Q, *weights), rtol=1e-9)


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("shots", SHOTS)
def test_any_weights(shots: list[int], channels: int) -> None:
    (X, y), (Q, _) = clusters(shots, channels), clusters(shots, channels, seed=1)
    order = np.argsort(y, kind="stable")
    X, y = X[order], y[order]
    gaussians = Gaussians(torch.tensor(X).double(), torch.tensor(y))
    z, outside = gaussians.coordinates(torch.tensor(Q).double())
    for a, b, c in [(0.9, 0.1, 0.05), (0.0, 0.7, 0.3), (2.0, 0.0, 1.5)]:
        weights = torch.tensor([a, b, c], dtype=torch.float64)
        expected = expected_densities(X, y, Q, a, b, c)
        np.testing.assert_allclose(
            gaussians.log_densities(z, outside, weights), expected, rtol=1e-8
        )
        shared = expected_densities(X, y, Q, 0.0, b, c)
        np.testing.assert_allclose(
            gaussians.log_densities(z, outside, weights[1:]), shared, rtol=1e-8
        )


def train_explicitly(X: Any, y: Any, start: list[float], steps: int) -> tuple[list[float], Any]:
    """The FiT head with full matrices and PyTorch's optimiser."""
    x, labels = torch.as_tensor(X).double(), torch.as_tensor(y)
    w = torch.tensor(start, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.Adam([w], lr=0.0035)
    eye = torch.eye(x.shape[1], dtype=torch.float64)
    losses = []
    for _ in range(steps):
        columns = []
        for k in range(int(labels.max()) + 1):
            own = x[labels == k]
            class_part = w[0].relu() * covariance(own) if len(start) == 3 else 0
            sigma = class_part + w[-2].relu() * covariance(x) + w[-1] * eye
            normal = torch.distributions.MultivariateNormal(own.mean(0), sigma)
            columns.append(normal.log_prob(x))
        loss = torch.nn.functional.cross_entropy(torch.stack(columns, dim=1), labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses, w.detach()


@pytest.mark.parametrize(("name", "start"), [("fit-lda", [1.0, 1.0]), ("fit-qda", [0.5, 0.5, 1.0])])
@pytest.mark.parametrize("channels", [4, 20])
def test_training_equals_full_matrices(name: str, start: list[float], channels: int) -> None:
    X, y = clusters([4, 1, 6], channels, spread=6.0)
    losses, weights = train_explicitly(X, y, start, steps=60)
    classifier = make_method(name, steps=60).fit(X, y)
    np.testing.assert_allclose(classifier.losses_, losses, rtol=1e-6)
    np.testing.assert_allclose(classifier.weights_, weights, rtol=1e-6)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", ["fit-lda", "fit-qda"])
def test_identity_weight_never_reaches_zero(name: str) -> None:
    """The steps are so large that an unguarded weight would turn negative at once."""
    X, y = clusters([3, 3], 10, spread=20.0)
    classifier = make_method(name, learning_rate=5.0, steps=3).fit(X, y)
    assert classifier.weights_[-1] > 0
    assert np.isfinite(classifier.logits(X)).all()


@pytest.mark.parametrize("name", ["fit-lda", "fit-qda"])
def test_identical_images_have_no_span(name: str) -> None:
    X, y = np.ones((4, 3), np.float32), np.array([0, 0, 1, 1])
    classifier = make_method(name, steps=5).fit(X, y)
    assert classifier.gaussians_.basis.shape == (0, 3)
    expected = [log_density(np.full(3, 3.0), np.ones(3), np.eye(3))] * 2
    np.testing.assert_allclose(classifier.logits(3 * X)[0], expected)
