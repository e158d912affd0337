"""Task files: the same on every machine, small, and refused when changed."""

import json

import pytest

from mivhead.benchmark.samplers import Protocol, sample_tasks
from mivhead.benchmark.tasks import TaskSet
from mivhead.errors import InputError, NotAvailableError
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
    ("edit", "message"),
    [
        (lambda d: d["tasks"][0]["support"][0].reverse(), "was modified after it was written"),
        (lambda d: d.update(seed=4), "was modified"),
        (lambda d: d.update(left_out=["all"]), "was modified"),
        (lambda d: d["tasks"][0]["support"][0].append(9999), "refers to an image that it does not"),
        (lambda d: d["tasks"][0]["support"][0].append(-1), "refers to an image that it does not"),
        (lambda d: d["tasks"][0]["classes"].pop(), "classes and images do not match"),
        (lambda d: d["tasks"][0]["queries"].pop(), "classes and images do not match"),
        (lambda d: d["tasks"][0].update(classes="abc"), r"tasks\.classes is not valid"),
        (lambda d: d.update(sed=4), "unknown key 'sed'"),
        (lambda d: d.pop("images"), "lacks the key 'images'"),
        (lambda d: d.update(format=2), "has format 2, expected 1: remove it"),
    ],
)
def test_changed_files(edit, message, tasks, tmp_path):
    tasks.save(tmp_path / "a.json")
    change(tmp_path / "a.json", edit)
    with pytest.raises(InputError, match=message):
        TaskSet.load(tmp_path / "a.json")


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000])
def test_other_files(text, tmp_path):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(InputError, match=r"a\.json (cannot be read|has format None)"):
        TaskSet.load(tmp_path / "a.json")


def test_no_file(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        TaskSet.load(tmp_path / "a.json")


def test_a_folder_that_cannot_be_made(tasks, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotAvailableError, match="Nothing was changed"):
        tasks.save(tmp_path / "file" / "a.json")
