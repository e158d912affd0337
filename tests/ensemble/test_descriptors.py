"""Descriptors: again in plain loops; the PCA against an eigendecomposition."""

import math

import numpy as np
import pytest

from mivhead.ensemble.descriptors import Kind, PatchPCA, compute_descriptors, principal_components
from mivhead.features import Block

CHANNELS = 200


def scatter(spectrum: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A symmetric matrix with these eigenvalues, and its eigenvectors."""
    rng = np.random.default_rng(0)
    vectors = np.linalg.qr(rng.normal(size=(CHANNELS, CHANNELS)))[0]
    matrix = (vectors * spectrum) @ vectors.T
    return matrix.astype(np.float32), vectors


@pytest.mark.parametrize(
    ("spectrum", "surely", "lost"),
    [
        (0.9 ** np.arange(CHANNELS), 60, 1e-5),
        (1.0 / (1 + np.arange(CHANNELS)), 30, 0.01),
        (np.where(np.arange(CHANNELS) < 100, 1.0, 1e-3), 100, 1e-3),
    ],
    ids=["fast decay", "slow decay", "a cliff"],
)
def test_principal_components_are_the_first_eigenvectors(spectrum, surely, lost) -> None:
    """The first ones lie within those found; together they hold as much as 128 can."""
    matrix, vectors = scatter(spectrum)
    found = principal_components(matrix).astype(np.float64)
    assert found.shape == (CHANNELS, 128)
    inside = np.linalg.norm(found.T @ vectors[:, :surely], axis=0)  # 1: wholly within
    assert inside.min() > 0.99
    held = np.trace(found.T @ matrix.astype(np.float64) @ found)
    assert held > (1 - lost) * spectrum[:128].sum()
    lengths = np.linalg.norm(found, axis=0)
    kept = lengths > 0.5
    np.testing.assert_allclose(found[:, kept].T @ found[:, kept], np.eye(kept.sum()), atol=1e-5)
    np.testing.assert_array_equal(lengths[~kept], 0)


def test_components_along_which_nothing_varies_are_left_out() -> None:
    """Otherwise rounding would choose them, and so the order of the images."""
    spectrum = np.where(np.arange(CHANNELS) < 5, 1.0, 0.0)
    matrix, vectors = scatter(spectrum)
    found = principal_components(matrix).astype(np.float64)
    expected = vectors[:, :5] @ vectors[:, :5].T
    np.testing.assert_allclose(found @ found.T, expected, atol=1e-5)


def test_a_pca_has_the_mean_patch_and_leaves_the_maps_alone() -> None:
    maps = {
        "a map": drawn(4, 6, 3, 2),
        "channels last": drawn(4, 3, 2, 6).transpose(0, 3, 1, 2),
        "one patch": drawn(4, 6, 1, 1),
        "one channel": drawn(4, 1, 3, 3),
    }
    for name, map_ in maps.items():
        before = map_.copy()
        pca = PatchPCA.fit(map_)
        np.testing.assert_array_equal(map_, before, err_msg=name)
        for c in range(map_.shape[1]):
            values = [
                float(map_[n, c].flatten()[p]) for n in range(4) for p in range(before[0, 0].size)
            ]
            assert float(pca.mean[c]) == pytest.approx(sum(values) / len(values), abs=1e-6)


def unit(values: list[float]) -> list[float]:
    length = math.sqrt(sum(v * v for v in values))
    return [v / length for v in values]


def drawn(images: int, channels: int, height: int, width: int) -> np.ndarray:
    rng = np.random.default_rng(channels)
    return rng.normal(size=(images, channels, height, width)).astype(np.float32) + 1


def plain_patches(map_: np.ndarray, middle: np.ndarray) -> np.ndarray:
    """Without the mean patch of the support; few channels are not rotated."""
    out = np.empty(map_.shape, np.float64)
    for c in range(map_.shape[1]):
        out[:, c] = map_[:, c].astype(np.float64) - middle[c]
    return out


def average(map_: np.ndarray, height: int, width: int) -> np.ndarray:
    """Windows from floor to ceil, as in adaptive pooling."""
    channels, h, w = map_.shape
    out = np.empty((channels, height, width))
    for i in range(height):
        for j in range(width):
            rows = slice(i * h // height, -(-(i + 1) * h // height))
            columns = slice(j * w // width, -(-(j + 1) * w // width))
            out[:, i, j] = map_[:, rows, columns].mean(axis=(1, 2))
    return out


def plain(kind: str, map_: np.ndarray) -> list[float]:
    """Describe one image, whose patches (channel, H, W) are centred."""
    channels, height, width = map_.shape
    if kind == "mean":
        means = [float(map_[c].mean()) for c in range(channels)]
        middle = sum(means) / channels
        return unit([m - middle for m in means])
    if kind == "layout":
        small = average(map_, min(7, height), min(7, width))
        return unit([float(v) for c in range(channels) for v in small[c].flatten()])
    pairs = []
    for a in range(channels):
        for b in range(a, channels):
            x, y = map_[a].flatten(), map_[b].flatten()
            covariance = sum((x - x.mean()) * (y - y.mean()))
            pairs.append(math.copysign(math.sqrt(abs(covariance)), covariance))
    return unit(pairs)


def described(kind: Kind, block: Block, pca: PatchPCA | None) -> np.ndarray:
    """Describe images in one way."""
    return compute_descriptors(block, pca, [kind])[kind]


@pytest.mark.parametrize("kind", ["second_order", "layout", "mean"])
@pytest.mark.parametrize("size", [(5, 3, 4), (3, 9, 5), (3, 15, 8), (4, 2, 7)])
def test_descriptors_equal_plain_loops(kind: Kind, size: tuple[int, int, int]) -> None:
    support, queries = drawn(3, *size), drawn(5, *size)[3:]
    pca = PatchPCA.fit(support)
    found = described(kind, Block(map=queries), pca)
    middle = support.mean(axis=(0, 2, 3), dtype=np.float64)
    for i, image in enumerate(queries):
        patches = image if kind == "mean" else plain_patches(queries, middle)[i]
        np.testing.assert_allclose(found[i], plain(kind, patches), atol=2e-5)


def test_the_mean_is_the_token_where_there_is_one() -> None:
    token = np.random.default_rng(0).normal(size=(2, 6)).astype(np.float32)
    block = Block(map=drawn(2, 6, 2, 2), token=token)
    for i, vector in enumerate(described("mean", block, None)):
        values = token[i].tolist()
        expected = unit([v - sum(values) / 6 for v in values])
        np.testing.assert_allclose(vector, expected, atol=1e-4)


@pytest.mark.parametrize("kind", ["second_order", "layout", "mean"])
def test_half_precision_maps_and_maps_of_zeros(kind: Kind) -> None:
    maps = drawn(3, 4, 3, 3).astype(np.float16)
    pca = PatchPCA.fit(maps)
    half = described(kind, Block(map=maps), pca)
    single = described(kind, Block(map=maps.astype(np.float32)), pca)
    assert half.dtype == np.float32
    np.testing.assert_allclose(half, single, rtol=1e-6, atol=1e-6)
    zeros = Block(map=np.zeros((2, 4, 3, 3), np.float32))
    assert np.isfinite(described(kind, zeros, PatchPCA.fit(zeros.map))).all()


def test_several_descriptors_transform_the_patches_once(monkeypatch: pytest.MonkeyPatch) -> None:
    block = Block(map=drawn(3, 4, 3, 3))
    pca = PatchPCA.fit(block.map)
    kinds: list[Kind] = ["second_order", "layout", "mean"]
    expected = {kind: described(kind, block, pca) for kind in kinds}
    turn, calls = PatchPCA.__call__, []

    def counted(self: PatchPCA, map_: np.ndarray) -> np.ndarray:
        calls.append(map_)
        return turn(self, map_)

    monkeypatch.setattr(PatchPCA, "__call__", counted)
    found = compute_descriptors(block, pca, kinds)
    assert len(calls) == 1
    assert all(np.array_equal(found[kind], expected[kind]) for kind in kinds)
