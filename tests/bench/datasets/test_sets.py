"""Sets in a data folder, found by name."""

import os
import shutil

import pytest
from PIL import Image

from mivhead.errors import InputError
from mivhead_bench.benchmark.samplers import Protocol, sample_tasks
from mivhead_bench.benchmark.tasks import TaskSet
from mivhead_bench.datasets.sets import find_sets, open_set
from tests.helpers.record_files import write_set
from tests.helpers.sample_files import make_folder, make_zip, png

PETS = {f"{name}/{i}.png": png(i) for name in ("cat", "dog") for i in range(2)}


@pytest.fixture
def data(tmp_path):
    make_folder(tmp_path / "pets", PETS)
    make_zip(tmp_path / "zipped.zip", PETS)
    write_set(tmp_path / "birds", [("owl", [png(1)]), ("robin", [png(2)]), ("wren", [png(3)])], 1)
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "notes.txt").write_text("")
    return tmp_path


def test_sets_are_found_by_name(data):
    assert find_sets(data) == ("birds", "pets", "zipped")
    assert open_set("pets", data).ids == open_set("zipped", data).ids == tuple(PETS)
    assert open_set("birds", data).classes == ("robin", "wren")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("petz", "has no set 'petz': did you mean 'pets'?"),
        ("cu_birds", "`miv bench data list cu_birds` says how to get it"),
        ("../pets", "has no set '../pets'"),
        ("things", "it has birds, pets, zipped"),
    ],
)
def test_a_set_that_is_not_there(name, message, data):
    with pytest.raises(InputError) as caught:
        open_set(name, data)
    assert message in str(caught.value)


def test_no_data_folder(tmp_path):
    with pytest.raises(InputError, match=r"The data folder .* cannot be read: No such file"):
        find_sets(tmp_path / "none")


def test_real_sets(tmp_path):
    folder = os.environ.get("MIV_DATA")
    if not folder:
        pytest.skip("MIV_DATA names no folder of image sets")
    for name in find_sets(folder):
        images = open_set(name, folder)
        tasks = sample_tasks(images, name, Protocol(), seed=0, count=5)
        assert isinstance(tasks, TaskSet), tasks
        known = set(images.ids)
        assert all(known.issuperset(task.support + task.queries) for task in tasks.tasks)
        images.load(0)


def test_task_files_fit_another_copy_of_the_set(data):
    """A folder and a zip of it, on two machines, give the same tasks."""
    for i in range(6):
        (data / "pets" / f"more{i}").mkdir()
        for j in range(2):
            Image.new("RGB", (4, 4)).save(data / "pets" / f"more{i}" / f"{j}.png")
    shutil.make_archive(str(data / "other" / "pets"), "zip", data / "pets")
    first = sample_tasks(open_set("pets", data), "pets", Protocol(), 0, 3)
    other = sample_tasks(open_set("pets", data / "other"), "pets", Protocol(), 0, 3)
    assert first.hash == other.hash
