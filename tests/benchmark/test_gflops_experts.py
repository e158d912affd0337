"""Work of plain experts, by hand and counted in NumPy; the whole recipe's beside it."""

from types import SimpleNamespace

import numpy as np
import pytest

from mivhead import Features
from mivhead.backbones.efficientnet_lite import PRESETS
from mivhead.benchmark.gflops import count
from mivhead.ensemble.ridge import Experts
from mivhead.head.blocks import resolve_blocks
from mivhead.methods.cost import TaskSize
from mivhead.methods.miv import experts_work
from tests.helpers.products import Counted, count_products

LITE0 = [(112, 14, 14), (192, 7, 7), (320, 7, 7), (1280, 7, 7)]


def test_a_tiny_block_by_hand():
    blocks = resolve_blocks(Features(np.zeros((1, 4, 2, 2))))
    covariances = 3 * 4 * 4**2  # 12 patches of 4 channels, which are not turned
    # 3 images: their products with each other, an inverse, two products with 2 classes
    second_order = 3 * 3 * 10 + 3**3 + 3 * (10 + 3) * 2  # 10 pairs of channels
    layout = 3 * 3 * 16 + 3**3 + 3 * (16 + 3) * 2
    mean = 3 * 3 * 4 + 3**3 + 3 * (4 + 3) * 2
    work = experts_work(blocks, TaskSize((2, 1), (7, 7)))
    assert work.products == work.paper == covariances + second_order + layout + mean
    assert work.others == 0


def test_more_images_than_channels_by_hand():
    """A token only: one expert, whose system is that of the 2 channels."""
    blocks = resolve_blocks(Features(np.zeros((1, 2))))
    work = experts_work(blocks, TaskSize((3, 2), (0, 0)))
    assert work.products == 5 * 2 * 2 + 2**3 + 5 * (2 + 2) * 2


def test_experts_do_little_more_than_they_must():
    features = Features(np.random.default_rng(0).normal(size=(8, 200, 7, 7)))
    labels = np.array([0, 0, 0, 1, 1, 2, 2, 2])
    map_ = features.blocks[0].map.view(Counted)
    counted = SimpleNamespace(blocks=[SimpleNamespace(map=map_, token=None, channels=200)])
    executes = count_products(lambda: Experts.fit(counted, labels, 3))
    needed = experts_work(resolve_blocks(features), TaskSize((3, 2, 3), (0, 0, 0))).products
    assert 0.7 * needed < executes < 1.6 * needed


@pytest.mark.parametrize("views", [0, 3])
@pytest.mark.parametrize(("ways", "shots"), [(10, 5), (5, 1), (20, 10)])
def test_the_default_recipe_costs_less_than_the_papers(ways, shots, views):
    """15 steps three times, on blocks without the widest, against 40 on all."""
    features = Features([np.zeros((1, *shape)) for shape in LITE0])
    size = TaskSize((shots,) * ways, (shots * views,) * ways)
    ours, papers = (
        count("miv", features, size, None, preset=PRESETS["efficientnet_lite0"], recipe=recipe)
        for recipe in ("mivhead", "paper")
    )
    assert ours.gflops < papers.gflops


def test_held_out_heads_are_counted_where_something_can_be_held_out():
    features = Features(np.zeros((1, 64)))
    ratio = {}
    for shots in (1, 6):
        size = TaskSize((shots,) * 5, (0,) * 5)
        stacked, prior = (
            count("miv", features, size, None, params={"vote": vote}).gflops
            for vote in ("stacked", "prior")
        )
        ratio[shots] = stacked / prior
    assert ratio[1] == 1
    assert 1.5 < ratio[6] < 2.1  # two heads on half of the images each
