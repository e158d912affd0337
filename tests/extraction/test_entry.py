"""An entry is read back bit for bit, or it is not read."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from mivhead.extraction.cache import decode, encode

KEY = "k" * 64
floats = st.sampled_from([np.float16, np.float32, np.float64])
parts = st.dictionaries(
    st.sampled_from(["block0.map", "block0.token", "block1.map"]),
    floats.flatmap(
        lambda kind: arrays(kind, array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))
    ),
    min_size=1,
)


@given(parts)
def test_round_trip_is_exact(given_parts: dict[str, np.ndarray]) -> None:
    found = decode(KEY, encode(KEY, given_parts))
    assert found is not None
    assert list(found) == list(given_parts)
    for name, part in given_parts.items():
        assert found[name].dtype == part.dtype
        assert found[name].shape == part.shape
        assert found[name].tobytes() == part.tobytes()  # NaN and -0.0 too


def test_strided_and_big_endian_arrays_are_stored_as_they_are_read() -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    for array in (values.T, values.astype(">f4")):
        found = decode(KEY, encode(KEY, {"block0.token": array}))
        assert found is not None
        np.testing.assert_array_equal(found["block0.token"], array)


@given(st.data())
def test_any_changed_byte_and_any_cut_is_found(data: st.DataObject) -> None:
    whole = encode(KEY, {"block0.token": np.arange(5, dtype=np.float16)})
    at = data.draw(st.integers(0, len(whole) - 1))
    changed = bytearray(whole)
    changed[at] ^= data.draw(st.integers(1, 255))
    assert decode(KEY, bytes(changed)) is None
    assert decode(KEY, whole[:at]) is None


@given(st.binary(max_size=200))
def test_noise_is_no_entry(noise: bytes) -> None:
    assert decode(KEY, noise) is None
    assert decode(KEY, b"mivcache" + noise) is None


def test_values_are_aligned() -> None:
    data = encode(KEY, {"block0.map": np.full(3, 7, np.float16)})
    assert data.index(np.full(3, 7, np.float16).tobytes()) % 64 == 0
