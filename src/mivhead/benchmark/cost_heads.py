"""The work of the plain heads, which see one vector per image."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mivhead.benchmark.work import BACKWARD, Work

LOGISTIC_STEPS = 100  # of L-BFGS, where nobody counted them


class Vectors:
    """The sizes a plain head sees: n images of C channels in L classes, at most M of a class."""

    def __init__(self, images: int, channels: int, classes: int, most: int) -> None:
        self.n, self.c, self.ways, self.most = images, channels, classes, most
        self.span = min(images - 1, channels)  # dimensions of the centred images


def head_work(method: str, size: Vectors, params: dict[str, Any], iterations: int | None) -> Work:
    """Work of fitting a plain head; `iterations` of solvers that stop by themselves."""
    if method == "logistic":
        return _logistic(size, iterations or LOGISTIC_STEPS)
    return HEADS[method](size, params)


def _once(products: float, others: float = 0.0) -> Work:
    return Work(products, others, products)


def _nothing(_: Vectors, __: dict[str, Any]) -> Work:
    return Work()  # features are kept as they are


def _means(size: Vectors, _: dict[str, Any]) -> Work:
    return _once(size.ways * size.n * size.c)


def _linear(size: Vectors, params: dict[str, Any]) -> Work:
    """Train a layer: features are frozen, so that a step is the scores and one gradient."""
    forward = params["steps"] * size.n * size.c * size.ways
    return Work(2 * forward, paper=BACKWARD * forward)


def _lda(size: Vectors, params: dict[str, Any]) -> Work:
    start = _span(size)
    forward = _shared(size)
    steps = params["steps"]
    return start + Work(2 * steps * forward, paper=BACKWARD * steps * forward)


def _qda(size: Vectors, params: dict[str, Any]) -> Work:
    n, r, most, ways = size.n, size.span, size.most, size.ways
    systems = n * r * (n + ways)  # products of all shots with all images and class means
    solved = ways * most**2 * n
    cubes = ways * most**3
    forward = _shared(size) + systems + solved
    # Backward through inverses: four products and two triangular solutions of small matrices.
    step = 2 * _shared(size) + 2 * systems + 3 * solved + 4 * cubes
    factors = cubes / 3 + 2 * cubes / 3 + 2 * cubes
    steps = params["steps"]
    start = _span(size)
    end = Work(systems, cubes / 3 + ways * most**2 * r)
    return start + end + Work(steps * step, steps * factors, BACKWARD * steps * forward)


def _span(size: Vectors) -> Work:
    """Count a singular value decomposition, as textbooks do, coordinates and class means."""
    n, c, r = size.n, size.c, size.span
    long, short = max(n, c), min(n, c)
    svd = 6 * long * short**2 + 20 * short**3
    return _once(2 * n * c * r + size.ways * n * r, svd)


def _shared(size: Vectors) -> float:
    """Log densities under a shared covariance, forward."""
    return (size.n + size.ways) * size.span + size.n * size.span * size.ways


def _ridge(size: Vectors, _: dict[str, Any]) -> Work:
    """Count a system, its inverse, the map, and what the map would say of held-out images."""
    n, c, ways = size.n, size.c, size.ways
    small = min(n, c)
    fitted = small**2 * (max(n, c) + ways) + (n + 1) * c * ways
    held_out = n * c * ways + (n * c**2 if n > c else 0)
    return _once(fitted + held_out, 2 * small**3)


def _svm(size: Vectors, _: dict[str, Any]) -> Work:
    """One kernel matrix of all pairs; what libsvm does beyond it is small."""
    return _once(size.n**2 * size.c)


def _logistic(size: Vectors, iterations: int) -> Work:
    n, c, ways = size.n, size.c, size.ways
    small, long = min(n, c), max(n, c)
    qr = 4 * long * small**2 - 4 * small**3 / 3
    forward = iterations * n * small * ways
    end = ways * small * c
    return Work(2 * forward + end, qr, BACKWARD * forward + end)


HEADS: dict[str, Callable[[Vectors, dict[str, Any]], Work]] = {
    "ncc": _means,
    "fit-protonets": _means,
    "knn": _nothing,
    "tip-adapter": _nothing,
    "baseline": _linear,
    "baseline++": _linear,
    "fit-lda": _lda,
    "fit-qda": _qda,
    "ridge": _ridge,
    "svm": _svm,
}
