"""`Features`: reading arrays, indexing, joining, files, errors."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mivhead import Features, FeatureTable
from mivhead._util import files
from mivhead.errors import InputError, ModelFileError
from mivhead.features import AT_ONCE, Block, image_vectors, to_single


def two_blocks(n: int = 5, dtype: type = np.float32) -> Features:
    rng = np.random.default_rng(0)
    return Features(
        [
            rng.normal(size=(n, 3, 4, 4)).astype(dtype),
            {
                "map": rng.normal(size=(n, 6, 2, 2)).astype(dtype),
                "token": rng.normal(size=(n, 6)).astype(dtype),
            },
        ]
    )


def test_a_plain_table_is_one_vector_per_image() -> None:
    features = Features(np.ones((4, 7)))
    assert features.layout == {"block0.token": (7,)}
    assert features.shape == (4, 7)


def test_patches_become_a_grid_if_they_are_a_square_number() -> None:
    patches = np.arange(2 * 9 * 5, dtype=np.float32).reshape(2, 9, 5)
    map_ = Features(patches).blocks[0].map
    assert map_.shape == (2, 5, 3, 3)
    np.testing.assert_array_equal(map_[1, :, 2, 1], patches[1, 7])  # row 2, column 1 is patch 7


def test_other_numbers_of_patches_keep_no_grid() -> None:
    assert Features(np.ones((2, 6, 5))).layout == {"block0.map": (5, 6, 1)}


def test_channels_at_the_end_are_refused() -> None:
    with pytest.raises(InputError, match="channels last"):
        Features(np.ones((5, 7, 7, 64)))


def test_torch_and_numpy_agree_and_share_memory() -> None:
    torch = pytest.importorskip("torch")
    array = np.ones((2, 3), np.float16)
    features = Features(array)
    assert features == Features(torch.ones(2, 3, dtype=torch.float16))
    array[0, 0] = 5
    assert features.blocks[0].token[0, 0] == 5


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_a_file_gives_back_what_was_saved(dtype: type, tmp_path) -> None:
    features = two_blocks(dtype=dtype)
    features.save(tmp_path / "f.safetensors")
    assert Features.load(tmp_path / "f.safetensors") == features


def test_a_file_that_holds_no_features_is_refused(tmp_path) -> None:
    from safetensors.numpy import save_file

    save_file({"x": np.ones(2)}, tmp_path / "f.safetensors")
    with pytest.raises(ModelFileError, match="not written by mivhead"):
        Features.load(tmp_path / "f.safetensors")


@given(
    st.one_of(
        st.lists(st.integers(-5, 4), max_size=8),
        hnp.arrays(bool, 5),
        st.slices(5),
        st.integers(-5, 4),
    )
)
def test_indexing_is_numpys(index) -> None:
    features = two_blocks()
    chosen = features[index]
    for name, tensor in features.tensors.items():
        expected = tensor[np.array(index, int) if isinstance(index, list) else index]
        if isinstance(index, int):
            expected = expected[None]
        np.testing.assert_array_equal(chosen.tensors[name], expected)


def test_scikit_learns_way_of_indexing() -> None:
    from sklearn.utils import _safe_indexing

    features = two_blocks()
    assert _safe_indexing(features, np.array([3, 1])) == features[[3, 1]]


@given(st.integers(0, 5))
def test_concat_undoes_a_split(cut: int) -> None:
    features = two_blocks()
    assert Features.concat([features[:cut], features[cut:]]) == features


def test_other_types() -> None:
    features = two_blocks().to("float16")
    assert features.dtype == np.float16
    assert features == two_blocks().to(np.float16) == two_blocks().to(np.dtype("float16"))
    for other in ("bfloat16", "int64", "cpu"):
        with pytest.raises(InputError, match=f"not {other}"):
            features.to(other)


def test_types_of_pytorch_are_taken() -> None:
    torch = pytest.importorskip("torch")
    assert two_blocks().to(torch.float16) == two_blocks().to("float16")
    with pytest.raises(InputError, match="bfloat16"):
        two_blocks().to(torch.bfloat16)


def test_equality_looks_at_values_and_types() -> None:
    assert two_blocks() == two_blocks()
    assert two_blocks() != two_blocks(4)
    assert two_blocks() != two_blocks(dtype=np.float64)


@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        (np.ones(3), ["(3,)", "(n, C)"]),
        (np.ones((1, 2, 3, 4, 5)), ["(1, 2, 3, 4, 5)"]),
        (np.ones((2, 3), int), ["block0", "int64", "float16"]),
        (np.ones((2, 0)), ["(2, 0)", "empty"]),
        ([], ["non-empty"]),
        ("features", ["str"]),
        ([np.ones((2, 3)), [1, 2]], ["block1", "list"]),
        ([np.ones((2, 3)), np.ones((3, 3))], ["block0.token", "(3, 3)"]),
        ({"map": np.ones((2, 3))}, ["block0.map", "(2, 3)", "(n, C, H, W)"]),
        ({"map": np.ones((2, 3, 1, 1)), "token": np.ones((2, 4))}, ["block0", "channels"]),
        ({"cls": np.ones((2, 3))}, ["map", "cls"]),
        ({"map": None}, ["block0.map"]),
        ([np.ones((2, 3)), np.array([[1, 2], [3, np.nan]])], ["block1", "(2, 2)", "image 1"]),
        (np.array([[np.inf, 1.0]], np.float16), ["block0", "infinity"]),
        (np.array([["a"]]), ["block0"]),
    ],
)
def test_errors_name_the_block_the_shape_and_what_was_expected(blocks, words) -> None:
    with pytest.raises(InputError) as error:
        Features(blocks)
    for word in words:
        assert word in str(error.value)


def test_read_only_arrays_are_fine() -> None:
    array = np.ones((2, 3))
    array.flags.writeable = False
    assert len(Features(array)) == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x[::-1],
        lambda x: x[:, ::-1],
        lambda x: x.astype(">f4"),
        lambda x: x.astype(">f8")[::-2],
        lambda x: np.broadcast_to(x[:1], x.shape),
    ],
)
def test_every_kind_of_array_is_accepted(change) -> None:
    x = change(np.arange(12, dtype=np.float32).reshape(4, 3))
    np.testing.assert_array_equal(Features(x).blocks[0].token, x)


def test_every_finite_half_becomes_the_same_number() -> None:
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16)
    halves = halves[np.isfinite(halves)]
    for some in (halves, halves[::-2], halves.reshape(-1, 4).T):  # also where it is not contiguous
        found = to_single(some)
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, some.astype(np.float32))
    assert np.signbit(to_single(np.array([-0.0], np.float16)))[0]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_vectors_of_more_images_than_are_converted_at_once(dtype) -> None:
    maps = np.random.default_rng(0).normal(size=(AT_ONCE + 3, 2, 3, 5)).astype(dtype)
    expected = [[sum(map(float, channel.ravel())) / 15 for channel in image] for image in maps]
    np.testing.assert_allclose(image_vectors(Block(maps)), expected, atol=1e-6)
    assert image_vectors(Block(maps[:0])).shape == (0, 2)


@pytest.mark.parametrize(
    ("view_of", "message"),
    [
        ([0], "one for each of 2 views"),
        ([[0, 1]], "one for each of 2 views"),
        ([0.5, 1.0], "list of integers"),
        ([0, 5], "rows 0 to 4"),
        ([0, -1], "rows 0 to 4"),
    ],
)
def test_views_of_a_table_belong_to_its_images(view_of, message, tmp_path) -> None:
    features, ids = two_blocks(), tuple("abcde")
    with pytest.raises(InputError, match=message):
        FeatureTable(features, ids, None, features[:2], np.array(view_of))
    tensors = {f"views.{name}": tensor for name, tensor in features[:2].tensors.items()}
    tensors |= features.tensors | {"view_of": np.array(view_of)}
    meta = {"format": 1, "kind": "features", "ids": ids}
    files.write(tmp_path / "forged.safetensors", tensors, meta)
    with pytest.raises(ModelFileError, match=message):
        FeatureTable.load(tmp_path / "forged.safetensors")


def test_views_of_a_table_have_its_blocks() -> None:
    features = two_blocks()
    with pytest.raises(InputError, match=r"views .* do not fit the images"):
        FeatureTable(features, tuple("abcde"), None, Features(np.ones((1, 3))), np.array([0]))
