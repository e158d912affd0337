"""Views: how many, with which seeds, and what is done to them."""

import hashlib
import math
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mivhead.errors import InputError
from mivhead.images.augmentation import (
    BINS,
    CHOSEN,
    REACH,
    Augmentation,
    Draws,
    ViewRule,
    _strength,
    augment,
    view_seed,
    views_per_image,
)

GOLDEN = "65c4992d245c3d84930d7e3acfdc670fbad2f89058e753e203878152ee39d18e"
NOTHING = Augmentation(flip=0, grayscale=0, randaugment=False)


def photo(seed=0, size=(50, 30)):
    pixels = np.random.default_rng(seed).integers(0, 256, (5, 7, 3), np.uint8)
    return Image.fromarray(pixels).resize(size)


@given(shots=st.integers(1, 200), threshold=st.integers(0, 100))
def test_views_per_image(shots, threshold):
    ceil = views_per_image(shots, threshold)
    floor = views_per_image(shots, threshold, "floor")
    assert views_per_image(shots, threshold, "few") == (min(4, ceil) if shots <= 4 else 0)
    if shots > threshold:
        assert ceil == floor == 0
    else:
        assert ceil == math.ceil(threshold / shots)
        assert floor == max(1, math.floor(threshold / shots))
        assert shots * ceil >= threshold


@given(
    labels=st.lists(st.sampled_from("abc"), max_size=20),
    threshold=st.integers(0, 12),
    rule=st.sampled_from(["ceil", "floor"]),
)
def test_plan_views_counts(labels, threshold, rule):
    plan = ViewRule(threshold, rule, 7).plan(labels)
    expected = [views_per_image(labels.count(label), threshold, rule) for label in labels]
    assert np.bincount(plan.view_of, minlength=len(labels)).tolist() == expected
    assert plan.numbers.tolist() == [n for count in expected for n in range(count)]
    assert plan.view_of.dtype == plan.numbers.dtype == np.int64
    assert plan.seed == 7


def test_views_have_seeds_of_their_own():
    views = [(content, number) for content in ("a", "b", "a1", "1 a") for number in range(11)]
    seeds = {view_seed(seed, *view) for seed in (0, 1, 10) for view in views}
    assert len(seeds) == 3 * len(views)
    assert all(0 <= seed < 2**63 for seed in seeds)


@given(seed=st.integers(0, 2**63 - 1), size=st.integers(8, 40))
@settings(max_examples=60, deadline=None)
def test_augment_is_deterministic_and_leaves_input_and_generator_alone(seed, size):
    image = photo()
    before, state = image.tobytes(), torch.get_rng_state()
    view, again = augment(image, size, seed), augment(image, size, seed)
    assert view.size == (size, size)
    assert view.mode == "RGB"
    assert view.tobytes() == again.tobytes()
    assert image.tobytes() == before
    assert torch.equal(torch.get_rng_state(), state)
    same_size = photo(size=(size, size))
    before = same_size.tobytes()
    augment(same_size, size, seed).putpixel((0, 0), (1, 2, 3))
    assert same_size.tobytes() == before


@given(seed=st.integers(0, 2**63 - 1), below=st.integers(1, 1000))
def test_draws_are_those_of_pytorch(seed, below):
    generator = torch.Generator().manual_seed(seed)
    random = Draws(seed)
    for _ in range(20):
        assert random.uniform() == torch.rand((), generator=generator).numpy()
        assert random.integer(below) == int(torch.randint(below, (), generator=generator))


def test_strengths_are_those_of_pytorch():
    for strongest in (0.3, 0.9, 1.0, 30.0, *(REACH * side for side in range(1, 4097))):
        expected = float(torch.linspace(0.0, strongest, BINS)[CHOSEN])
        assert _strength(strongest) == expected


def test_golden_draws_stay_as_they_are():
    """Cached features of views, and models that hold them, depend on them."""
    draws = [Draws(2**40 * seed + seed) for seed in range(64)]
    numbers = [(float(each.uniform()), each.integer(14)) for each in draws for _ in range(4)]
    assert hashlib.sha256(repr(numbers).encode()).hexdigest() == GOLDEN


def test_augment_varies_with_the_seed():
    views = {augment(photo(), 24, seed).tobytes() for seed in range(40)}
    assert len(views) > 30


def test_without_transforms_only_the_resize_is_left():
    image = photo()
    plain = image.resize((24, 24), Image.Resampling.BICUBIC)
    assert augment(image, 24, 5, NOTHING).tobytes() == plain.tobytes()


def test_each_transform_can_be_chosen():
    image = photo()
    plain = np.asarray(image.resize((24, 24), Image.Resampling.BICUBIC))
    flipped = augment(image, 24, 5, Augmentation(1, 0, False))
    np.testing.assert_array_equal(np.asarray(flipped), plain[:, ::-1])
    grey = np.asarray(augment(image, 24, 5, Augmentation(0, 1, False)))
    assert (grey == grey[..., :1]).all()
    # Default probabilities, over many seeds: 0.5 and 0.2 within four standard errors.
    views = [
        np.asarray(augment(image, 8, seed, Augmentation(randaugment=False))) for seed in range(400)
    ]
    small = np.asarray(image.resize((8, 8), Image.Resampling.BICUBIC))
    greys = [(view == view[..., :1]).all() for view in views]
    flips = [
        (view == small[:, ::-1]).all()
        for view, is_grey in zip(views, greys, strict=True)
        if not is_grey
    ]
    assert abs(np.mean(greys) - 0.2) < 4 * 0.02
    assert abs(np.mean(flips) - 0.5) < 4 * 0.028


@pytest.mark.parametrize("how", [Augmentation(), Augmentation(0.3, 0.6), Augmentation(1, 0, False)])
def test_views_are_torchvision_s(how):
    v2 = pytest.importorskip("torchvision.transforms.v2", reason="the extra timm is absent")

    steps = [v2.RandomHorizontalFlip(how.flip), v2.RandomGrayscale(how.grayscale)]
    if how.randaugment:
        steps.append(v2.RandAugment(interpolation=v2.InterpolationMode.BICUBIC))
    theirs = v2.Compose(steps)
    for seed in range(300):  # each of the 14 operations, forth and back, many times
        image, size = photo(seed), 20 + seed % 40
        torch.manual_seed(seed)
        expected = theirs(image.resize((size, size), Image.Resampling.BICUBIC))
        assert augment(image, size, seed, how).tobytes() == expected.tobytes()


def test_threads_do_not_disturb_each_other():
    image = photo()
    expected = [augment(image, 16, seed).tobytes() for seed in range(40)]
    results = {}

    def work(seeds):
        for seed in seeds:
            results[seed] = augment(image, 16, seed).tobytes()

    threads = [threading.Thread(target=work, args=(range(start, 40, 4),)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[seed] for seed in range(40)] == expected


def test_probabilities_are_checked():
    with pytest.raises(InputError, match="flip is 2"):
        Augmentation(flip=2)
