"""From images to features: order, the cache, threads, and what passes the backbone."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mivhead import Features, FewShotClassifier
from mivhead.errors import InputError, NotAvailableError
from mivhead.extraction.cache import CacheKeys, FeatureCache, content_hash
from mivhead.extraction.pipeline import (
    BATCH,
    extract_table,
    prefetch,
    read_features,
)
from mivhead.images.augmentation import Augmentation, ViewRule
from mivhead.images.decoding import load_image
from mivhead.images.imageset import from_images
from mivhead.images.sources import open_labelled
from tests.helpers.tiny_backbone import TinyBackbone


def noise(count: int, seed: int = 0) -> list[np.ndarray]:
    return list(np.random.default_rng(seed).integers(0, 256, (count, 9, 7, 3), np.uint8))


@pytest.fixture
def cache(tmp_path: Path) -> FeatureCache:
    return FeatureCache(tmp_path / "cache")


def classifier(
    cache: FeatureCache, backbone: TinyBackbone, **settings: object
) -> FewShotClassifier:
    return FewShotClassifier(backbone, threshold=6, cache=cache.folder, verbose=False, **settings)


def test_a_second_fit_skips_the_backbone_and_is_the_same(cache: FeatureCache, shots: Path) -> None:
    plain = FewShotClassifier(TinyBackbone(), threshold=6, cache=False).fit(shots)
    first, second = TinyBackbone(), TinyBackbone()
    fitted = [classifier(cache, each).fit(shots) for each in (first, second)]
    assert (first.seen, second.seen) == (36, 0)  # 12 images, 2 views each
    assert cache.info().entries == 36
    states = [each.classifier_.state()[1] for each in (plain, *fitted)]
    for state in states[1:]:
        assert state.keys() == states[0].keys()
        for name, tensor in state.items():
            np.testing.assert_array_equal(tensor, states[0][name], err_msg=name)


def test_order_is_kept_with_hits_and_misses_mixed(cache: FeatureCache) -> None:
    pictures = noise(3 * BATCH + 5)
    expected = extract_table(TinyBackbone(), from_images(pictures), verbose=False).features
    extract_table(TinyBackbone(), from_images(pictures[1::3]), cache=cache, verbose=False)
    backbone = TinyBackbone()
    found = extract_table(backbone, from_images(pictures), cache=cache, verbose=False).features
    assert found == expected
    assert backbone.seen == len(pictures) - len(pictures[1::3])
    assert all(t.flags.c_contiguous for t in found.tensors.values())


def test_a_backbone_that_writes_every_answer_to_the_same_place(cache: FeatureCache) -> None:
    class Reusing(TinyBackbone):
        kept: Features | None = None

        def extract(self, images: Sequence[Image.Image]) -> Features:
            found = super().extract(images)
            if self.kept is None or len(self.kept) != len(found):
                self.kept = found
            for name, tensor in self.kept.tensors.items():
                tensor[:] = found.tensors[name]
            return self.kept

    images = from_images(noise(8 * BATCH))
    expected = extract_table(TinyBackbone(), images, verbose=False).features
    for seen in (8 * BATCH, 0):
        backbone = Reusing()
        assert extract_table(backbone, images, cache=cache, verbose=False).features == expected
        assert backbone.seen == seen


def test_a_file_and_its_copy_share_an_entry_and_edits_do_not(
    cache: FeatureCache, shots: Path
) -> None:
    extract_table(TinyBackbone(), open_labelled(shots), cache=cache, verbose=False)
    path = shots / "red" / "0.png"
    (shots / "red" / "copy.png").write_bytes(path.read_bytes())
    Image.open(path).rotate(90).save(path)
    backbone = TinyBackbone()
    extract_table(backbone, open_labelled(shots), cache=cache, verbose=False)
    assert backbone.seen == 1


def test_what_changes_features_changes_the_key(cache: FeatureCache, shots: Path) -> None:
    def seen(backbone: TinyBackbone, **settings: object) -> int:
        classifier(cache, backbone, **settings).extract(open_labelled(shots))
        return backbone.seen

    assert seen(TinyBackbone()) == 36
    assert seen(TinyBackbone()) == 0
    assert seen(TinyBackbone(weights="1" * 64)) == 36
    assert seen(TinyBackbone(dtype="float32")) == 36
    assert seen(TinyBackbone(), random_state=1) == 24  # the views
    assert seen(TinyBackbone(), augmentation=Augmentation(flip=0.0)) == 24


@pytest.mark.parametrize("damage", ["flipped", "truncated", "empty", "linked"])
def test_a_corrupted_entry_is_computed_again(cache: FeatureCache, damage: str) -> None:
    images = from_images(noise(3))
    expected = extract_table(TinyBackbone(), images, cache=cache, verbose=False).features
    (*_, victim), (*_, other), *_ = cache._files()
    entry, data = Path(victim), bytearray(Path(victim).read_bytes())
    if damage == "linked":  # to the features of another image
        entry.unlink()
        entry.symlink_to(other)
    elif damage == "flipped":
        data[-9] ^= 1
        entry.write_bytes(data)
    else:
        entry.write_bytes(data[:-1] if damage == "truncated" else b"")
    for seen in (1, 0):
        backbone = TinyBackbone()
        assert extract_table(backbone, images, cache=cache, verbose=False).features == expected
        assert backbone.seen == seen


def test_an_identity_that_does_not_tell_of_a_change(cache: FeatureCache) -> None:
    extract_table(TinyBackbone(), from_images(noise(1)), cache=cache, verbose=False)
    changed = TinyBackbone()
    changed.extract = lambda images: Features(np.ones((len(images), 5), np.float16))
    with pytest.raises(InputError, match="MIV_CACHE"):
        extract_table(changed, from_images(noise(2)), cache=cache, verbose=False)


def test_a_warm_fit_does_not_read_the_weights(tmp_path: Path, shots: Path) -> None:
    FewShotClassifier(threshold=0, cache=tmp_path / "cache").fit(shots)
    program = f"""
import sys
from mivhead import FewShotClassifier
from mivhead.backbones.base import LazyBackbone
def refuse(self):
    raise AssertionError("the weights were read")
LazyBackbone.loaded = refuse
FewShotClassifier(threshold=0, cache={str(tmp_path / "cache")!r}).fit({str(shots)!r})
assert "timm" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def workers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


@pytest.mark.parametrize("depth", [0, 1, 2, 50])
def test_order_is_kept(depth):
    assert list(prefetch(range(20), depth)) == list(range(20))
    assert list(prefetch([], depth)) == []
    assert not workers()


def test_exception_appears_in_its_place():
    def source():
        yield 1
        yield 2
        raise ValueError("third")

    stream = prefetch(source(), depth=5)
    assert [next(stream), next(stream)] == [1, 2]
    with pytest.raises(ValueError, match="third"):
        next(stream)
    assert not workers()


def test_interrupted_consumer_leaves_no_thread():
    def consume():
        for item in prefetch(iter(int, 1), depth=2):
            if item == 0:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        consume()
    for thread in workers():
        thread.join(30)
    assert not workers()


def test_an_error_of_the_writer_is_told(
    cache: FeatureCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(FeatureCache, "put", fail)
    with pytest.raises(MemoryError):
        extract_table(TinyBackbone(), from_images(noise(3)), cache=cache, verbose=False)


def test_features_are_read_in_any_order_and_never_partly(cache: FeatureCache) -> None:
    backbone, pictures = TinyBackbone(), noise(5)
    expected = extract_table(backbone, from_images(pictures), cache=cache, verbose=False).features
    named = CacheKeys(backbone, Augmentation())
    keys = [named.key(content_hash(load_image(picture)), None) for picture in pictures]
    for rows in ([3], [4, 0, 2, 2, 1]):
        assert read_features(cache, [keys[row] for row in rows]) == expected[rows]
    with pytest.raises(NotAvailableError, match="again"):
        read_features(cache, [keys[0], "0" * 64])


def test_views_depend_on_content_and_seed_alone(cache: FeatureCache, shots: Path) -> None:
    """Not on the folder, the name, the other images, or the order."""
    images = open_labelled(shots)
    plan = ViewRule(8, seed=3).plan(images.labels)  # two views each
    table = extract_table(TinyBackbone(), images, plan, cache=cache, verbose=False)
    copy = shots.parent / "elsewhere.png"
    copy.write_bytes((shots / images.ids[7]).read_bytes())
    backbone = TinyBackbone()
    alone = extract_table(
        backbone, from_images([copy]), ViewRule(2, seed=3).plan(["x"]), cache=cache, verbose=False
    )
    assert backbone.seen == 0
    assert alone.features == table.features[[7]]
    assert alone.views == table.views[14:16]
    uncached = extract_table(TinyBackbone(), images, plan, verbose=False)
    assert uncached.views == table.views
