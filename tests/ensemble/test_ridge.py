"""Ridge regression: against explicit refits without each image, and against scikit-learn."""

import numpy as np
import pytest
from sklearn.linear_model import Ridge as SklearnRidge

from mivhead.ensemble.ridge import fit_one_of_each, fit_ridge

SHAPES = [(4, 9), (7, 7), (12, 3)]  # fewer images than dimensions, as many, more


def drawn(images: int, dimensions: int, classes: int = 3) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(images)
    labels = np.arange(images) % classes
    return rng.normal(size=(images, dimensions)) + 2, np.eye(classes)[labels]


def solve(x: np.ndarray, targets: np.ndarray, alpha: float) -> tuple[np.ndarray, np.ndarray]:
    """Normal equations with a column of ones, whose coefficient is not penalised."""
    wide = np.column_stack([x, np.ones(len(x))])
    penalty = np.diag([alpha] * x.shape[1] + [0.0])
    found = np.linalg.solve(wide.T @ wide + penalty, wide.T @ targets)
    return found[:-1], found[-1]


@pytest.mark.parametrize("alpha", [0.01, 0.1, 10.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_fit_is_that_of_the_normal_equations_and_of_scikit_learn(shape, alpha) -> None:
    x, targets = drawn(*shape)
    ridge, _ = fit_ridge(x, targets, alpha)
    coefficients, intercepts = solve(x, targets, alpha)
    np.testing.assert_allclose(ridge.coefficients, coefficients, atol=1e-8)
    np.testing.assert_allclose(ridge.intercepts, intercepts, atol=1e-8)
    theirs = SklearnRidge(alpha=alpha).fit(x, targets)
    np.testing.assert_allclose(ridge(x), theirs.predict(x), atol=1e-6)  # single precision


@pytest.mark.parametrize("alpha", [0.01, 0.1, 10.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_left_out_answers_are_those_of_refits_without_the_image(shape, alpha) -> None:
    x, targets = drawn(*shape)
    _, left_out = fit_ridge(x, targets, alpha)
    for i in range(len(x)):
        others = np.arange(len(x)) != i
        coefficients, intercepts = solve(x[others], targets[others], alpha)
        np.testing.assert_allclose(left_out[i], x[i] @ coefficients + intercepts, atol=1e-8)


def test_what_an_image_is_labelled_does_not_change_its_left_out_answer() -> None:
    x, targets = drawn(6, 8)
    before = fit_ridge(x, targets, 0.1)[1]
    targets[2] = np.roll(targets[2], 1)
    after = fit_ridge(x, targets, 0.1)[1]
    np.testing.assert_allclose(after[2], before[2], rtol=1e-6, atol=1e-6)
    assert not np.allclose(after[5], before[5])


def test_identical_images_and_single_precision() -> None:
    """The same image everywhere: nothing but the rates of the classes is left."""
    targets = np.eye(2, dtype=np.float32)[[0, 0, 1]]
    ridge, left_out = fit_ridge(np.ones((3, 5), np.float32), targets, 0.1)
    assert ridge.coefficients.dtype == left_out.dtype == np.float32
    np.testing.assert_allclose(ridge(np.ones((1, 5), np.float32)), [[2 / 3, 1 / 3]], rtol=1e-6)
    expected = [[0.5, 0.5], [0.5, 0.5], [1.0, 0.0]]  # rates among the others
    np.testing.assert_allclose(left_out, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("folds", [None, np.array([0, 1, 0, -1, -1])], ids=["alone", "together"])
def test_one_of_each_is_the_mean_of_regressions_on_one_shot_of_each_class(folds) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(5, 8)).astype(np.float32)
    targets = np.eye(3, dtype=np.float32)[[1, 1, 1, 0, 2]]
    new = rng.normal(size=(4, 8)).astype(np.float32)
    ridge, left_out = fit_one_of_each(x, targets, 0.1, folds)

    def predict(large: list[int], images: np.ndarray) -> np.ndarray:
        parts = [fit_ridge(x[[i, 3, 4]], targets[[i, 3, 4]], 0.1)[0](images) for i in large]
        return np.mean(parts, axis=0)

    np.testing.assert_allclose(ridge(new), predict([0, 1, 2], new), atol=1e-5)
    others = {0: [1, 2], 1: [0, 2], 2: [0, 1]} if folds is None else {0: [1], 1: [0, 2], 2: [1]}
    for row, rest in others.items():
        np.testing.assert_allclose(left_out[[row]], predict(rest, x[[row]]), atol=1e-5)
