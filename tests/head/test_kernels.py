"""The compiled functions equal NumPy's versions of them, and which library is taken."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from mivhead._util.threads import set_threads
from mivhead.head import formulas, kernels
from mivhead.head.formulas import Comparison, Projected

STARTS = np.array([0, 3, 4, 9, 11])  # 3, 1, 5 and 2 shots
SHOTS, CHANNELS, HEADS, QUERIES = 11, 24, 4, 37  # queries: not a multiple of a vector's lanes

pytestmark = pytest.mark.skipif(
    kernels.library() is None, reason="the kernels are not built, or switched off"
)


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def close(ours: np.ndarray, expected: np.ndarray) -> None:
    scale = max(0.1, float(np.abs(expected).max()))
    np.testing.assert_allclose(ours, expected, rtol=0, atol=3e-5 * scale)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("order", ["C", "channels last", "reversed", "every second"])
@pytest.mark.parametrize("shape", [(5, 6), (1, 7), (7, 1), (1, 1)])
def test_candidates_of_maps_in_any_layout(shape, order, dtype) -> None:
    maps = drawn(4, 19, *shape).astype(dtype)
    if order == "channels last":
        maps = np.ascontiguousarray(maps.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    elif order == "reversed":
        maps = maps[:, ::-1, :, ::-1]
    elif order == "every second":
        maps = np.repeat(maps, 2, axis=3)[..., ::2]
    sizes = [shape, *((s, s) for s in (3, 1) if s <= max(shape))]
    patches, norms = kernels.derive_candidates([maps[:1], maps[1:]], sizes)
    expected, lengths = formulas.derive_candidates([maps], sizes)
    for ours, theirs in zip(patches, expected, strict=True):
        assert ours.dtype == dtype
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_allclose(norms, lengths, rtol=1e-5)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("channels", [3, 16, 21])
def test_pooling_of_patches_and_its_gradient(channels, dtype) -> None:
    maps = [drawn(6, p, channels, seed=p).astype(dtype) for p in (30, 9, 1)]
    scale = np.abs(drawn(6, 40, seed=1))
    rows = np.array([4, 0, 0, 5])  # some images, one of them twice
    theta = drawn(channels, seed=2)
    pooled, weights = kernels.pool_patches(theta, maps, scale, rows)
    single = [x.astype(np.float32) for x in maps]  # what `formulas` computes with
    expected, attention = formulas.pool_patches(theta, single, scale, rows)
    close(pooled, expected)
    close(weights, attention)
    grad = drawn(*pooled.shape, seed=3)
    close(
        kernels.pool_patches_backward(grad, maps, scale, rows, weights, pooled),
        formulas.pool_patches_backward(grad, single, scale, rows, attention, expected),
    )


def comparison(hidden: bool = True) -> Comparison:
    y, v, gate = (drawn(QUERIES, CHANNELS, seed=s) for s in range(3))
    z, w = (drawn(SHOTS, CHANNELS, seed=s) for s in (3, 4))
    y[:SHOTS] = z  # |x - y| has no slope where a query is a shot itself
    unseen = np.full(QUERIES, -1)
    unseen[:9] = [0, 1, 2, -1, 4, 5, 6, 7, 8]
    query = Projected(y, v, 1 / (1 + np.exp(-gate)))
    return Comparison(query, Projected(z, w, w), STARTS, unseen if hidden else None, HEADS, 0.6)


@pytest.mark.parametrize("hidden", [True, False])
def test_cosines_with_prototypes_and_their_gradients(hidden) -> None:
    how = comparison(hidden)
    cosines, kept = kernels.cosines(how, keep=True)
    expected, nothing = formulas.cosines(how, keep=True)
    close(cosines, expected)
    close(kernels.cosines(how, keep=False)[0], expected)
    grad = drawn(*cosines.shape, seed=5)
    query, *shots = kernels.cosines_backward(how, kept, cosines, grad)
    query_too, *shots_too = formulas.cosines_backward(how, nothing, expected, grad)
    for ours, theirs in zip([*query, *shots], [*query_too, *shots_too], strict=True):
        close(ours, theirs)


def test_the_number_of_threads_changes_nothing(threads, monkeypatch) -> None:
    monkeypatch.setattr(kernels, "PART_VALUES", 1)  # so that there are several parts
    how = comparison()

    def everything() -> list[np.ndarray]:
        cosines, weights = kernels.cosines(how, keep=True)
        maps = [drawn(9, 5, CHANNELS)]
        scale, rows = np.ones((9, 5), np.float32), np.arange(9)
        pooled, attention = kernels.pool_patches(drawn(CHANNELS), maps, scale, rows)
        gradients = kernels.cosines_backward(how, weights, cosines, cosines)
        return [cosines, *gradients[0], *gradients[1:], pooled, attention]

    found = everything()
    set_threads(1)
    for several, alone in zip(found, everything(), strict=True):
        np.testing.assert_array_equal(several, alone)


def test_a_query_does_not_see_other_queries() -> None:
    how = comparison()
    together, _ = kernels.cosines(how, keep=False)
    for q in range(QUERIES):
        one = slice(q, q + 1)
        part = replace(how, query=how.query.rows(one), hidden=how.hidden[one])
        alone, _ = kernels.cosines(part, keep=False)
        np.testing.assert_array_equal(alone[0], together[q])


def test_a_library_of_other_sources_is_not_used(monkeypatch, tmp_path) -> None:
    copied = tmp_path / "libkernels.so"
    shutil.copy(kernels.PATH, copied)  # without the sources in its folder
    monkeypatch.setattr(kernels, "PATH", copied)
    kernels.library.cache_clear()
    try:
        with pytest.warns(UserWarning, match="Install mivhead again"):
            assert kernels.library() is None
        broken = tmp_path / "broken.so"
        broken.write_bytes(b"no library")
        monkeypatch.setattr(kernels, "PATH", broken)
        kernels.library.cache_clear()
        with pytest.warns(UserWarning, match="belong to another version"):
            assert kernels.library() is None
    finally:
        kernels.library.cache_clear()


def test_the_switch() -> None:
    code = "from mivhead.head.kernels import library; assert library() is None"
    environment = {**os.environ, kernels.SWITCH: "off"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_a_processor_without_the_instructions_gets_no_library(monkeypatch) -> None:
    monkeypatch.setattr(kernels, "NEEDED", {"no such instruction"})
    kernels.library.cache_clear()
    try:
        assert kernels.library() is None
    finally:
        kernels.library.cache_clear()
