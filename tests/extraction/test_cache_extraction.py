"""Extraction with a cache: the same features, and the backbone sees what is new."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mivhead import Features, FewShotClassifier
from mivhead.backbones.base import Identity
from mivhead.errors import InputError
from mivhead.extraction.cache import FeatureCache
from mivhead.extraction.pipeline import BATCH, extract_table
from mivhead.images.augmentation import Augmentation
from mivhead.images.imageset import from_images
from mivhead.images.sources import open_labelled
from mivhead.preset import BlockPreset, Preprocessing, Preset


class Counting:
    """A map and a token of mean colours; counts the images it sees."""

    def __init__(self, weights: str = "0" * 64, dtype: torch.dtype = torch.float16) -> None:
        self.preset = Preset(("a",), (BlockPreset(form="vit"),), Preprocessing(size=8))
        self.identity = Identity("counting", weights, self.preset.preprocessing, self.preset.taps)
        self.dtype = dtype
        self.seen = 0

    def extract(self, images: Sequence[Image.Image]) -> Features:
        self.seen += len(images)
        pixels = np.stack([np.asarray(image.resize((8, 8)), np.float32) for image in images])
        x = torch.from_numpy(pixels).permute(0, 3, 1, 2).div(255)  # (n, 3, 8, 8), not contiguous
        return Features([{"map": x, "token": x.mean((2, 3))}]).to(self.dtype)


def noise(count: int, seed: int = 0) -> list[np.ndarray]:
    return list(np.random.default_rng(seed).integers(0, 256, (count, 9, 7, 3), np.uint8))


@pytest.fixture
def cache(tmp_path: Path) -> FeatureCache:
    return FeatureCache(tmp_path / "cache")


def classifier(cache: FeatureCache, backbone: Counting, **settings: object) -> FewShotClassifier:
    return FewShotClassifier(backbone, threshold=6, cache=cache.folder, verbose=False, **settings)


def test_a_second_fit_skips_the_backbone_and_is_the_same(cache: FeatureCache, shots: Path) -> None:
    plain = FewShotClassifier(Counting(), threshold=6, cache=False).fit_folder(shots)
    first, second = Counting(), Counting()
    fitted = [classifier(cache, each).fit_folder(shots) for each in (first, second)]
    assert (first.seen, second.seen) == (36, 0)  # 12 images, 2 views each
    assert cache.info().entries == 36
    states = [each.classifier_._state()[1] for each in (plain, *fitted)]
    for state in states[1:]:
        assert state.keys() == states[0].keys()
        for name, tensor in state.items():
            assert torch.equal(tensor, states[0][name]), name


def test_order_is_kept_with_hits_and_misses_mixed(cache: FeatureCache) -> None:
    pictures = noise(3 * BATCH + 5)
    expected = extract_table(Counting(), from_images(pictures), verbose=False).features
    extract_table(Counting(), from_images(pictures[1::3]), cache=cache, verbose=False)
    backbone = Counting()
    found = extract_table(backbone, from_images(pictures), cache=cache, verbose=False).features
    assert found == expected
    assert backbone.seen == len(pictures) - len(pictures[1::3])
    assert all(t.is_contiguous() for t in found.tensors.values())


def test_a_backbone_that_writes_every_answer_to_the_same_place(cache: FeatureCache) -> None:
    class Reusing(Counting):
        kept: Features | None = None

        def extract(self, images: Sequence[Image.Image]) -> Features:
            found = super().extract(images)
            if self.kept is None or len(self.kept) != len(found):
                self.kept = found
            for name, tensor in self.kept.tensors.items():
                tensor.copy_(found.tensors[name])
            return self.kept

    images = from_images(noise(8 * BATCH))
    expected = extract_table(Counting(), images, verbose=False).features
    for seen in (8 * BATCH, 0):
        backbone = Reusing()
        assert extract_table(backbone, images, cache=cache, verbose=False).features == expected
        assert backbone.seen == seen


def test_a_file_and_its_copy_share_an_entry_and_edits_do_not(
    cache: FeatureCache, shots: Path
) -> None:
    extract_table(Counting(), open_labelled(shots), cache=cache, verbose=False)
    path = shots / "red" / "0.png"
    (shots / "red" / "copy.png").write_bytes(path.read_bytes())
    Image.open(path).rotate(90).save(path)
    backbone = Counting()
    extract_table(backbone, open_labelled(shots), cache=cache, verbose=False)
    assert backbone.seen == 1


def test_what_changes_features_changes_the_key(cache: FeatureCache, shots: Path) -> None:
    def seen(backbone: Counting, **settings: object) -> int:
        classifier(cache, backbone, **settings).extract(open_labelled(shots))
        return backbone.seen

    assert seen(Counting()) == 36
    assert seen(Counting()) == 0
    assert seen(Counting("1" * 64)) == 36
    assert seen(Counting(dtype=torch.float32)) == 36
    assert seen(Counting(), random_state=1) == 24  # the views
    assert seen(Counting(), augmentation=Augmentation(flip=0.0)) == 24


def test_a_damaged_entry_is_computed_again(cache: FeatureCache) -> None:
    images = from_images(noise(3))
    expected = extract_table(Counting(), images, cache=cache, verbose=False).features
    victim = next(cache._files()).path
    Path(victim).write_bytes(Path(victim).read_bytes()[:-1])
    for seen in (1, 0):
        backbone = Counting()
        assert extract_table(backbone, images, cache=cache, verbose=False).features == expected
        assert backbone.seen == seen


def test_a_cache_that_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    broken = FeatureCache(tmp_path / "file" / "cache")
    images = from_images(noise(3))
    table = extract_table(Counting(), images, cache=broken, verbose=False)
    assert table.features == extract_table(Counting(), images, verbose=False).features


def test_an_identity_that_does_not_tell_of_a_change(cache: FeatureCache) -> None:
    extract_table(Counting(), from_images(noise(1)), cache=cache, verbose=False)
    changed = Counting()
    changed.extract = lambda images: Features(np.ones((len(images), 5), np.float16))
    with pytest.raises(InputError, match="miv cache clear"):
        extract_table(changed, from_images(noise(2)), cache=cache, verbose=False)


def test_who_is_cached_by_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MIV_CACHE", str(tmp_path))
    assert FewShotClassifier()._cache() is not None
    assert FewShotClassifier(cache=False)._cache() is None
    assert FewShotClassifier(Counting())._cache() is None  # its identity may be careless
    assert FewShotClassifier(Counting(), cache=True)._cache() is not None
    monkeypatch.setenv("MIV_CACHE", "off")
    assert FewShotClassifier()._cache() is None


def test_a_warm_fit_does_not_import_timm(tmp_path: Path, shots: Path) -> None:
    FewShotClassifier(threshold=0, cache=tmp_path / "cache").fit_folder(shots)
    program = f"""
import sys
from mivhead import FewShotClassifier
FewShotClassifier(threshold=0, cache={str(tmp_path / "cache")!r}).fit_folder({str(shots)!r})
assert "timm" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
