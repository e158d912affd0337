"""The compiled functions equal NumPy's versions of them, and which library is taken."""

import itertools
import shutil
from dataclasses import replace

import numpy as np
import pytest

from mivhead._util.threads import set_threads
from mivhead.engine import compiled, library, plain
from mivhead.engine.plain import BagComparison

STARTS = np.array([0, 3, 4, 9, 11])  # 3, 1, 5 and 2 shots
BOTH = list(itertools.product([True, False], repeat=2))
SHOTS, CHANNELS, HEADS, QUERIES = 11, 24, 4, 37  # queries: not a multiple of a vector's lanes

pytestmark = pytest.mark.skipif(library.library() is None, reason="the kernels are switched off")


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
    patches, norms = compiled.derive([maps[:1], maps[1:]], sizes)
    expected, lengths = plain.derive([maps], sizes)
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
    pooled, weights = compiled.pool_forward(theta, maps, scale, rows)
    expected, attention = plain.pool_forward(theta, maps, scale, rows)
    close(pooled, expected)
    close(weights, attention)
    grad = drawn(*pooled.shape, seed=3)
    given = grad, maps, scale, rows
    close(
        compiled.pool_backward(*given, weights, pooled),
        plain.pool_backward(*given, attention, expected),
    )


@pytest.mark.parametrize("length", [None, 4.0])
def test_pooling_of_candidates_and_its_gradients(length) -> None:
    mu, x, grad = drawn(16, seed=1), drawn(5, 4, 16, seed=2), drawn(5, 16, seed=3)
    x[0] = 0.0  # a black image
    close(
        compiled.candidates_forward(mu, x, 2.5, length),
        plain.candidates_forward(mu, x, 2.5, length),
    )
    ours = compiled.candidates_backward(mu, x[1:], grad[1:], 2.5, length)
    theirs = plain.candidates_backward(mu, x[1:], grad[1:], 2.5, length)
    for mine, expected in zip(ours, theirs, strict=True):
        close(mine, expected)


def comparison(**changes) -> BagComparison:
    y, v, gate = (drawn(QUERIES, CHANNELS, seed=s) for s in range(3))
    z, w = (drawn(SHOTS, CHANNELS, seed=s) for s in (3, 4))
    y[:SHOTS] = z  # |x - y| has no slope where a query is a shot itself
    hidden = np.full(QUERIES, -1)
    hidden[:9] = [0, 1, 2, -1, 4, 5, 6, 7, 8]
    settings = {
        "heads": HEADS,
        "attention": "l1",
        "factor": -0.3,
        "skip": True,
        "centred": True,
        "gate": 1 / (1 + np.exp(-gate)),
        "hidden": hidden,
        **changes,
    }
    return BagComparison(y=y, v=v, z=z, w=w, starts=STARTS, **settings)


@pytest.mark.parametrize("attention", compiled.KINDS)
@pytest.mark.parametrize(("skip", "gated"), BOTH)
@pytest.mark.parametrize(("centred", "hiding"), BOTH)
def test_cosines_with_prototypes_and_their_gradients(attention, skip, gated, centred, hiding):
    how = comparison(attention=attention, skip=skip, centred=centred)
    how = replace(how, factor=-0.3 if attention == "l1" else 0.4)
    how = how if gated else replace(how, gate=None)
    how = how if hiding else replace(how, hidden=None)
    cosines, weights = compiled.cap_forward(how, keep=True)
    expected, nothing = plain.cap_forward(how, keep=True)
    close(cosines, expected)
    close(compiled.cap_forward(how, keep=False)[0], expected)
    grad = drawn(*cosines.shape, seed=5)
    ours = compiled.cap_backward(how, weights, cosines, grad)
    theirs = plain.cap_backward(how, nothing, expected, grad)
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine is None) == (other is None)
        if other is not None:
            close(mine, other)


def test_the_number_of_threads_changes_nothing(threads, monkeypatch) -> None:
    monkeypatch.setattr(compiled, "PART_VALUES", 1)  # so that there are several parts
    how = comparison()

    def everything() -> list[np.ndarray]:
        cosines, weights = compiled.cap_forward(how, keep=True)
        maps = [drawn(9, 5, CHANNELS)]
        scale, rows = np.ones((9, 5), np.float32), np.arange(9)
        pooled, attention = compiled.pool_forward(drawn(CHANNELS), maps, scale, rows)
        gradients = compiled.cap_backward(how, weights, cosines, cosines)
        return [cosines, *gradients, pooled, attention]

    found = everything()
    set_threads(1)
    for several, alone in zip(found, everything(), strict=True):
        np.testing.assert_array_equal(several, alone)


def test_a_query_does_not_see_other_queries() -> None:
    how = comparison()
    together, _ = compiled.cap_forward(how, keep=False)
    for q in range(QUERIES):
        one = slice(q, q + 1)
        parts = {name: getattr(how, name)[one] for name in ("y", "v", "gate", "hidden")}
        alone, _ = compiled.cap_forward(replace(how, **parts), keep=False)
        np.testing.assert_array_equal(alone[0], together[q])


def test_arrays_of_the_kernels_are_aligned() -> None:
    for shape in ((3,), (5, 7), (1, 2, 3), (2, 4)):
        array = library.empty(*shape)
        assert array.shape == shape
        assert array.ctypes.data % library.ALIGNMENT == 0


def test_a_library_of_other_sources_is_not_used(monkeypatch, tmp_path) -> None:
    copied = tmp_path / "libkernels.so"
    shutil.copy(library.PATH, copied)  # without the sources in its folder
    monkeypatch.setattr(library, "PATH", copied)
    library.library.cache_clear()
    try:
        with pytest.warns(UserWarning, match="Install mivhead again"):
            assert library.library() is None
        broken = tmp_path / "broken.so"
        broken.write_bytes(b"no library")
        monkeypatch.setattr(library, "PATH", broken)
        library.library.cache_clear()
        with pytest.warns(UserWarning, match="belong to another version"):
            assert library.library() is None
    finally:
        library.library.cache_clear()


def test_a_processor_without_the_instructions_gets_no_library(monkeypatch) -> None:
    monkeypatch.setattr(library, "NEEDED", {"no-such-instruction"})
    library.library.cache_clear()
    try:
        assert library.library() is None
    finally:
        library.library.cache_clear()
