"""Task files: the same on every machine, small, and refused when changed."""

import json

import pytest

from mivhead.errors import InputError
from mivhead_bench.benchmark.samplers import Protocol, sample_tasks
from mivhead_bench.benchmark.tasks import TaskSet
from tests.helpers.image_sets import equal


@pytest.fixture(scope="module", params=["varying", "5-way 2-shot, unlabelled 20"])
def tasks(request):
    return sample_tasks(equal(9, 12), "bäume", Protocol.parse(request.param), seed=3, count=20)


def test_a_file_holds_all_of_it(tasks, tmp_path):
    tasks.save(tmp_path / "varying" / "trees.json")
    again = TaskSet.load(tmp_path / "varying" / "trees.json")
    assert again == tasks
    assert again.hash == tasks.hash
    assert not list(tmp_path.glob("**/*.part"))


def test_the_hash_is_the_same_everywhere():
    """It is part of results: a change would make old results useless."""
    found = sample_tasks(equal(5, 3), "pets", Protocol.parse("2-way 1-shot"), seed=0, count=2)
    assert found.hash == "07ad764c7292e8b224acc387c011f3be1aa560a6b195f2986a79ce9c641ced9f"


def test_a_file_names_images_by_ids_once(tasks, tmp_path):
    tasks.save(tmp_path / "a.json")
    text = (tmp_path / "a.json").read_text(encoding="utf-8")
    assert text.count("c03/7.png") == 1
    assert str(tmp_path) not in text


def change(path, edit):
    document = json.loads(path.read_text())
    edit(document)
    path.write_text(json.dumps(document))


@pytest.mark.parametrize(
    "edit",
    [
        lambda d: d["tasks"][0]["support"].reverse(),
        lambda d: d.update(seed=4),
        lambda d: d["tasks"][0]["support"].append(9999),
        lambda d: d["tasks"][0]["support"].append(-1),
        lambda d: d["tasks"][0]["classes"].pop(),
        lambda d: d["tasks"][0].update(classes="abc"),
        lambda d: d.update(sed=4),
        lambda d: d.pop("images"),
    ],
)
def test_changed_files(edit, tasks, tmp_path):
    tasks.save(tmp_path / "a.json")
    change(tmp_path / "a.json", edit)
    with pytest.raises(InputError, match=r"a\.json"):
        TaskSet.load(tmp_path / "a.json")


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000, None])
def test_other_files(text, tmp_path):
    if text is not None:
        (tmp_path / "a.json").write_text(text)
    with pytest.raises(InputError, match=r"a\.json"):
        TaskSet.load(tmp_path / "a.json")
