"""The declared facts of the paper's sets."""

import pytest

from mivhead.errors import InputError
from mivhead_bench.datasets.catalogue import SETS, find_declared, groups_of


def test_the_papers_sets_are_declared_in_its_order():
    assert [each.name for each in SETS] == [
        *("omniglot", "cu_birds", "dtd", "fungi", "vgg_flower", "traffic_sign", "mscoco"),
        *("aircraft", "quickdraw"),
        *("mnist", "cifar10", "cifar100", "CropDisease", "EuroSAT", "ISIC", "ChestX", "Food101"),
    ]
    assert [each.benchmark for each in SETS] == ["MD"] * 9 + ["MD+"] * 8
    assert [each.name for each in SETS if each.grouped] == ["omniglot"]
    for each in SETS:
        assert each.source
        assert each.licence
        assert each.split
        assert each.preparation
        assert each.classes >= 5


def test_every_name_means_one_set():
    names = [(name, each) for each in SETS for name in (each.name, each.title, *each.aliases)]
    for name, each in names:
        assert find_declared(name) is each
        assert find_declared(name.upper().replace("_", "-")) is each


def test_omniglot_without_alphabets():
    with pytest.raises(InputError, match=r"'character01' of omniglot does not name its alphabet"):
        groups_of("omniglot", ["Greek.character01", "character01"])
