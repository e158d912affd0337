"""`miv mcp`: its tools, called by the official client over real pipes, and what they refuse."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from mivhead.cli import mcp
from mivhead.errors import InputError
from tests.helpers.extras import needs

ROOT = Path(__file__).parents[2]


@pytest.fixture
def project(shots: Path, new: Path, tmp_path: Path) -> Path:
    """An allowed folder with labelled images; next to it, one that is not allowed."""
    project = tmp_path / "project"
    shutil.copytree(shots, project / "shots")
    shutil.copytree(new, project / "new")
    shutil.copytree(new, tmp_path / "private")
    return project


def call(folder: Path, *calls: tuple[str, dict[str, Any]]) -> list[Any]:
    """Start the server, list its tools, and call some of them; return the answers."""
    import anyio
    from mcp import Client, StdioServerParameters

    async def talk() -> list[Any]:
        paths = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
        server = StdioServerParameters(
            command=sys.executable,
            args=["-m", "mivhead", "mcp", "--allow", str(folder)],
            env={**os.environ, "PYTHONPATH": paths},
            cwd=folder.parent,
        )
        async with Client(server) as client:
            answers: list[Any] = [await client.list_tools()]
            for name, arguments in calls:
                answers.append(await client.call_tool(name, arguments))
            return answers

    return anyio.run(talk)


@needs("mcp")
def test_an_assistant_fits_predicts_and_adds(project: Path) -> None:
    (project / "numpy.py").write_text("raise SystemExit('code of the folder ran')")
    listed, fitted, predicted, added, evaluated, why, proposed = call(
        project,
        ("fit", {"shots": "shots", "output": "m.miv", "no_augmentation": True}),
        ("predict", {"model": "m.miv", "images": ["new"], "top": 2}),
        ("add", {"model": "m.miv", "source": "new"}),
        ("evaluate", {"model": "m.miv", "images": str(project / "new"), "include_shots": True}),
        ("explain", {"model": "m.miv", "images": ["new/rings/5.png"]}),
        ("suggest", {"images": ["m.miv", "new"], "count": 2}),
    )
    assert [tool.name for tool in listed.tools] == list(mcp.TOOLS)
    for answer in (fitted, predicted, added, evaluated, why, proposed):
        assert not answer.is_error, answer.content[0].text
        assert json.loads(answer.content[0].text) == answer.structured_content
    assert fitted.structured_content["images"] == 9
    found = predicted.structured_content["predictions"]
    assert {each["label"] for each in found} == {"checks", "rings", "stripes"}
    assert added.structured_content["classes"] == {"checks": 5, "rings": 5, "stripes": 5}
    assert evaluated.structured_content["accuracy"] == 1.0
    assert len(proposed.structured_content["suggestions"]) == 2


@needs("mcp")
def test_nothing_outside_the_folder_is_reached(project: Path, model: Path) -> None:
    """Neither by an argument, nor by what a file in the folder says."""
    outside = project.parent / "private"
    shutil.copy(model, project / "m.miv")
    picture = outside / "rings" / "5.png"
    (project / "list.csv").write_text(f"path,label\n{picture},a\n{outside / 'checks/5.png'},b\n")
    (project / "links").mkdir()
    (project / "links" / "x.png").symlink_to(picture)
    _, *answers = call(
        project,
        ("predict", {"model": "m.miv", "images": [str(outside)]}),
        ("predict", {"model": "m.miv", "images": ["../private"]}),
        ("predict", {"model": "m.miv", "images": ["links"]}),
        ("fit", {"shots": "list.csv", "output": "n.miv"}),
        ("fit", {"shots": "shots", "output": str(outside / "n.miv")}),
        ("fit", {"shots": "https://192.0.2.1/shots.zip", "output": "n.miv"}),
        ("fit", {"shots": "shots", "output": "n.miv", "backbone": "os:system"}),
        ("predict", {"model": "--help", "images": ["new"]}),
        ("remove", {"model": "m.miv"}),
    )
    for answer in answers:
        assert answer.is_error, answer.content
    texts = [answer.content[0].text for answer in answers]
    assert all("is outside the allowed folders" in text for text in texts[:5]), texts
    assert "is an address" in texts[5]
    assert "no parameter 'backbone'" in texts[6]
    assert "must not start with '-'" in texts[7]
    assert "no tool 'remove'" in texts[8]
    assert sorted(each.name for each in outside.iterdir()) == ["checks", "rings", "stripes"]


@pytest.mark.parametrize(
    "code",
    [
        "import socket; socket.create_connection(('127.0.0.1', 9))",
        "import socket; socket.getaddrinfo('localhost', 80)",
        "import subprocess; subprocess.run(['true'])",
        "import os; os.system('true')",
        "open('/etc/hostname')",
        "open(OUTSIDE + '/x', 'w')",
        "import os; os.open(OUTSIDE + '/x', os.O_CREAT | os.O_WRONLY)",
        "import os; os.mkdir(OUTSIDE + '/x')",
        "import os; os.listdir(OUTSIDE)",
        "import shutil; shutil.rmtree(OUTSIDE)",
        "import os; os.rename('inside.txt', OUTSIDE + '/x')",
        "import os; os.symlink(OUTSIDE, 'link')",
    ],
)
def test_a_confined_process_refuses(code: str, tmp_path: Path) -> None:
    import subprocess

    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "in" / "inside.txt").write_text("inside")
    program = (
        "import sys, tempfile; from pathlib import Path; from mivhead.cli.mcp import _Confinement\n"
        "tempfile.tempdir = '.'\n"
        "sys.addaudithook(_Confinement([Path.cwd()]))\n"
        "assert open('inside.txt').read() == 'inside'; open('new.txt', 'w').close()\n"
        f"OUTSIDE = {str(tmp_path / 'out')!r}\n{code}"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "MIV_CACHE": "off"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path / "in",
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "NotAvailableError" in done.stderr, done.stderr
    assert not list((tmp_path / "out").iterdir())


def test_the_parameters_are_those_of_the_command_line(miv: Any, tmp_path: Path) -> None:
    tools = {
        each["name"]: each
        for each in json.loads(miv("mcp", "--allow", tmp_path, "--json").out)["tools"]
    }
    assert list(tools) == list(mcp.TOOLS)
    predict = tools["predict"]["inputSchema"]
    assert predict["required"] == ["model", "images"]
    assert predict["properties"]["images"]["items"] == {"type": "string"}
    assert predict["properties"]["top"] | {"description": ""} == {
        "type": "integer",
        "minimum": 1,
        "default": 1,
        "description": "",
    }
    assert predict["properties"]["reject"]["maximum"] == 1
    assert predict["properties"]["skip_bad"]["type"] == "boolean"
    for tool in tools.values():
        assert tool["description"]
        for name, schema in tool["inputSchema"]["properties"].items():
            assert schema["description"], name
            assert name not in mcp.HIDDEN


def test_arguments_become_options(tmp_path: Path) -> None:
    given = {
        "model": "m.miv",
        "images": ["a.png", "b.png"],
        "top": 3,
        "skip_bad": True,
        "reject": 0.2,
    }
    command = mcp.arguments("predict", mcp.commands()["predict"], given, [tmp_path])
    assert command[:3] == ["predict", "--json", "--quiet"]
    assert {"--top=3", "--skip-bad", "--reject=0.2"} < set(command)
    assert command[-3:] == ["m.miv", "a.png", "b.png"]


@pytest.mark.parametrize("value", [{"a": 1}, ["x", ["y"]], True, "a\0b"])
def test_strange_values_are_refused(value: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError):
        mcp.arguments("predict", mcp.commands()["predict"], {"images": value}, [tmp_path])


def test_a_folder_that_does_not_exist(fails: Any, tmp_path: Path) -> None:
    assert "is not a folder" in fails("mcp", "--allow", tmp_path / "no")


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, []), ({"names": True}, ["--names"]), ({"names": False}, ["--no-names"])],
)
def test_a_choice_between_two_options(
    given: dict[str, bool], expected: list[str], tmp_path: Path
) -> None:
    command = {"shots": "shots", "output": "m.miv", "no_augmentation": False, **given}
    found = mcp.arguments("fit", mcp.commands()["fit"], command, [tmp_path])
    assert [each for each in found if each.endswith("names")] == expected
    assert "--no-augmentation" not in found
