"""From images to features: order, the cache, threads, and what passes the backbone."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mivhead import Features, FewShotClassifier
from mivhead.errors import InputError, NotAvailableError
from mivhead.extraction.cache import CacheKeys, FeatureCache, Parts, content_hash
from mivhead.extraction.pipeline import (
    BATCH,
    _Writer,
    extract_table,
    prefetch,
    read_features,
)
from mivhead.images.augmentation import Augmentation, plan_views
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
    plain = FewShotClassifier(TinyBackbone(), threshold=6, cache=False).fit_folder(shots)
    first, second = TinyBackbone(), TinyBackbone()
    fitted = [classifier(cache, each).fit_folder(shots) for each in (first, second)]
    assert (first.seen, second.seen) == (36, 0)  # 12 images, 2 views each
    assert cache.info().entries == 36
    states = [each.classifier_._state()[1] for each in (plain, *fitted)]
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


def test_a_corrupted_entry_is_computed_again(cache: FeatureCache) -> None:
    images = from_images(noise(3))
    expected = extract_table(TinyBackbone(), images, cache=cache, verbose=False).features
    victim = next(cache._files()).path
    Path(victim).write_bytes(Path(victim).read_bytes()[:-1])
    for seen in (1, 0):
        backbone = TinyBackbone()
        assert extract_table(backbone, images, cache=cache, verbose=False).features == expected
        assert backbone.seen == seen


def test_a_cache_that_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    broken = FeatureCache(tmp_path / "file" / "cache")
    images = from_images(noise(3))
    table = extract_table(TinyBackbone(), images, cache=broken, verbose=False)
    assert table.features == extract_table(TinyBackbone(), images, verbose=False).features


def test_an_identity_that_does_not_tell_of_a_change(cache: FeatureCache) -> None:
    extract_table(TinyBackbone(), from_images(noise(1)), cache=cache, verbose=False)
    changed = TinyBackbone()
    changed.extract = lambda images: Features(np.ones((len(images), 5), np.float16))
    with pytest.raises(InputError, match="miv cache clear"):
        extract_table(changed, from_images(noise(2)), cache=cache, verbose=False)


def test_who_is_cached_by_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MIV_CACHE", str(tmp_path))
    assert FewShotClassifier()._cache() is not None
    assert FewShotClassifier(cache=False)._cache() is None
    assert FewShotClassifier(TinyBackbone())._cache() is None  # its identity may be careless
    assert FewShotClassifier(TinyBackbone(), cache=True)._cache() is not None
    monkeypatch.setenv("MIV_CACHE", "off")
    assert FewShotClassifier()._cache() is None


def test_a_warm_fit_does_not_read_the_weights(tmp_path: Path, shots: Path) -> None:
    FewShotClassifier(threshold=0, cache=tmp_path / "cache").fit_folder(shots)
    program = f"""
import sys
from mivhead import FewShotClassifier
from mivhead.backbones.base import LazyBackbone
def refuse(self):
    raise AssertionError("the weights were read")
LazyBackbone.loaded = refuse
FewShotClassifier(threshold=0, cache={str(tmp_path / "cache")!r}).fit_folder({str(shots)!r})
assert "timm" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def workers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def wait_until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("depth", [0, 1, 2, 50])
def test_order_is_kept(depth):
    assert list(prefetch(range(20), depth)) == list(range(20))
    assert list(prefetch([], depth)) == []
    assert not workers()


def test_none_and_false_are_items():
    assert list(prefetch([None, 0, False], 2)) == [None, 0, False]


def test_work_runs_ahead_but_not_further_than_depth():
    made = []

    def source():
        for item in range(100):
            made.append(item)
            yield item

    stream = prefetch(source(), depth=3)
    assert next(stream) == 0
    wait_until(lambda: len(made) == 4)  # the one handed out, and three ahead while it is in use
    time.sleep(0.05)
    stream.close()
    assert len(made) == 4
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
    wait_until(lambda: not workers())


def batch(number: int) -> dict[str, Parts]:
    return {f"{number:02}{i:062}": {"block0.token": np.full(2, i, np.float16)} for i in range(3)}


def put_all(cache: FeatureCache, batches: int, error: BaseException | None = None) -> None:
    with _Writer(cache) as writer:
        for number in range(batches):
            writer.put(batch(number))
        if error is not None:
            raise error


def test_all_entries_are_there_after_closing(tmp_path: Path) -> None:
    cache = FeatureCache(tmp_path)
    put_all(cache, 4)
    for key, parts in (entry for number in range(4) for entry in batch(number).items()):
        found = cache.get(key)
        assert found is not None
        np.testing.assert_array_equal(found["block0.token"], parts["block0.token"])


def test_no_more_than_one_batch_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, stored = threading.Event(), []

    def slow(_: FeatureCache, key: str, parts: Parts) -> None:
        assert go.wait(10)
        stored.append(key)

    monkeypatch.setattr(FeatureCache, "put", slow)
    with _Writer(FeatureCache(tmp_path)) as writer:
        writer.put(batch(0))  # returns, though nothing is stored yet
        assert not stored
        threading.Timer(0.05, go.set).start()
        writer.put(batch(1))
        assert stored[:3] == list(batch(0))
    assert len(stored) == 6


@pytest.mark.parametrize("batches", [1, 2])
def test_an_error_is_told_but_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batches: int
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(FeatureCache, "put", fail)
    with pytest.raises(MemoryError):
        put_all(FeatureCache(tmp_path), batches)
    with pytest.raises(KeyboardInterrupt):
        put_all(FeatureCache(tmp_path), 1, KeyboardInterrupt())


def test_without_a_cache_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    monkeypatch.setattr(FeatureCache, "put", lambda *given: written.append(given))
    with _Writer(None) as writer:
        writer.put(batch(0))
    assert written == []
    assert writer._last is None


def test_features_are_read_in_any_order_and_never_partly(cache: FeatureCache) -> None:
    backbone, pictures = TinyBackbone(), noise(5)
    expected = extract_table(backbone, from_images(pictures), cache=cache, verbose=False).features
    named = CacheKeys(backbone, Augmentation())
    keys = [named.key(content_hash(load_image(picture)), None) for picture in pictures]
    for rows in ([3], [4, 0, 2, 2, 1]):
        assert read_features(cache, [keys[row] for row in rows]) == expected[rows]
    with pytest.raises(NotAvailableError, match="run the same command again"):
        read_features(cache, [keys[0], "0" * 64])


def test_views_depend_on_content_and_seed_alone(cache: FeatureCache, shots: Path) -> None:
    """Not on the folder, the name, the other images, or the order."""
    images = open_labelled(shots)
    plan = plan_views(images.labels, 8, seed=3)  # two views each
    table = extract_table(TinyBackbone(), images, plan, cache=cache, verbose=False)
    copy = shots.parent / "elsewhere.png"
    copy.write_bytes((shots / images.ids[7]).read_bytes())
    backbone = TinyBackbone()
    alone = extract_table(
        backbone, from_images([copy]), plan_views(["x"], 2, seed=3), cache=cache, verbose=False
    )
    assert backbone.seen == 0
    assert alone.features == table.features[[7]]
    assert alone.views == table.views[14:16]
    uncached = extract_table(TinyBackbone(), images, plan, verbose=False)
    assert uncached.views == table.views
