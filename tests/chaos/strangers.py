"""What strangers send on purpose: valid files that name code, links, other files, or never end."""

from __future__ import annotations

import copy
import io
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, helper
from PIL import Image
from safetensors.numpy import save_file

import mivhead
from mivhead import MIVClassifier, stores
from mivhead._util import files as safefile
from mivhead._util.schema import to_json
from mivhead.app.project import Project
from mivhead.benchmark.config import load_config
from mivhead.benchmark.results import CONFIG, RESULTS
from mivhead.cli.main import main
from mivhead.errors import ImageError, MivError
from mivhead.images.boxes import read_boxes
from mivhead.images.decoding import MAX_SCANS, load_image
from mivhead.methods import METHODS
from tests.chaos.campaign import Trial
from tests.chaos.damage import damage, small_features
from tests.helpers import hostile_onnx as hostile
from tests.helpers.bench_data import result
from tests.images import test_boxes
from tests.service.conftest import photo

PATIENCE = 20.0  # seconds that no trial may take, on a busy machine


def pick(rng: np.random.Generator, among: Any) -> Any:
    return among[rng.integers(len(among))]


# Project folders of `miv app`.

HIDDEN = ".miv-app"
PLACES = (
    *("", "robin", "wren", "robin/deep", HIDDEN, f"{HIDDEN}/kept", f"{HIDDEN}/new", ".git/hooks"),
    *(f"{HIDDEN}/thumbs", f"{HIDDEN}/kept/0", "away", "..", "../home", "/", "robin/../.."),
)
NAMES = (
    *("robin", "away", "1.png", "2.png", "lock", "token", "port", "journal.jsonl", "journal.part"),
    *("model.miv", "model.stamp", ".model.miv.0123456789ab.part", "kept", "new", "thumbs", "x.py"),
    *("..", "", "evil.desktop", "\0", "\ud800", "a" * 300, "home", ".bashrc"),
)
LINKS = tuple(name for name in NAMES if name.strip("."))


@contextmanager
def projects(folder: Path) -> Iterator[Trial]:
    """Folders with links, pipes and forged journals, opened and used by the app."""
    home, root = folder / "home", folder / "project"
    home.mkdir()
    (home / "thesis.txt").write_text("ten years")
    (home / "me.png").write_bytes(photo("red"))
    (home / "Pictures").mkdir()
    (home / "Pictures/1.png").write_bytes(photo("blue"))

    def state() -> dict[str, bytes | None]:
        return {
            str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None
            for p in sorted(folder.rglob("*"))
            if root not in (p, *p.parents)
        }

    before = state()
    # Nothing but the user's files: if a link were followed, its goal could be emptied.
    goals = [home, home / "thesis.txt", home / "Pictures", home / "new", root]

    def make(rng: np.random.Generator) -> None:
        shutil.rmtree(root, ignore_errors=True)
        for name in ("robin", "wren", f"{HIDDEN}/kept", f"{HIDDEN}/new", ".git/hooks"):
            (root / name).mkdir(parents=True)
        for name in ("robin/1.png", "robin/2.png", "wren/1.png", f"{HIDDEN}/new/1.png"):
            (root / name).write_bytes(photo("green"))
        for _ in range(rng.integers(0, 4)):
            link = root / pick(rng, PLACES[:11]) / pick(rng, LINKS)
            with suppress(OSError, ValueError):
                if rng.random() < 0.5 and link.is_dir() and not link.is_symlink():
                    shutil.rmtree(link)
                link.parent.mkdir(parents=True, exist_ok=True)
                if rng.random() < 0.1:
                    os.mkfifo(link)
                elif root in link.parent.resolve().parents or link.parent.resolve() == root:
                    link.symlink_to(pick(rng, goals))
        lines = [journal_line(rng) for _ in range(rng.integers(0, 5))]
        with suppress(OSError):
            file = root / HIDDEN / "journal.jsonl"
            if not file.is_symlink() and (file.is_file() or not file.exists()):
                file.write_text("".join(lines))

    def journal_line(rng: np.random.Generator) -> str:
        def path() -> Any:
            if rng.random() < 0.03:
                return pick(rng, [None, 7, [], {}, "", "/", "."])
            return f"{pick(rng, PLACES)}/{pick(rng, NAMES)}".removeprefix("/")

        change: dict[str, Any] = {
            "id": str(rng.integers(3)),
            "action": "add",
            "target": "",
            "moves": [[path(), path()] for _ in range(rng.integers(0, 4))],
        }
        if rng.random() < 0.05:
            change[pick(rng, list(change))] = pick(rng, [None, 1, [], {}, "x"])
        ids = [str(rng.integers(3)) for _ in range(rng.integers(0, 3))]
        kinds = [{"do": change}] * 6 + [{"undo": ids}, {"redo": ids}, {"made": []}, {"do": []}, []]
        text = json.dumps(pick(rng, kinds)) + "\n"
        return text if rng.random() < 0.95 else damage(text.encode(), rng).decode("latin-1")

    def use(project: Project, rng: np.random.Generator) -> None:
        photos = [p for found in project.snapshot().classes.values() for p in found]
        classes = list(project.snapshot().classes) or ["x"]
        ids = [pick(rng, photos).id] if photos else []
        for step in rng.permutation(8)[:3]:
            with suppress(MivError):
                [
                    project.undo,
                    project.redo,
                    lambda: project.remove(ids),
                    lambda: project.move(ids, pick(rng, classes)),
                    lambda: project.remove_class(pick(rng, classes)),
                    lambda: project.rename_class(pick(rng, classes), "dunnock"),
                    lambda: project.add_class("merl"),
                    lambda: project.add_photo(photo("blue", 3), "9.png", pick(rng, classes)),
                ][step]()

    def trial(rng: np.random.Generator) -> str:
        make(rng)
        hooks = set((root / ".git/hooks").iterdir())
        outcome = "opened"
        try:
            project = Project(root)
            try:
                use(project, rng)
            finally:
                project.close()
        except MivError:
            outcome = "refused"
        assert state() == before, "something outside the folder has changed"
        assert set((root / ".git/hooks").iterdir()) == hooks, "a hook of version control"
        return outcome

    yield trial


# Results and configurations of `miv bench`.


@contextmanager
def results(folder: Path) -> Iterator[Trial]:
    """Configurations and results that name modules, files and services, reported and priced."""
    (folder / "evil_head.py").write_text("from pathlib import Path\nPath('it ran').touch()\n")
    run = folder / "run"
    run.mkdir()
    homes = ("evil_head:Head", "evil_head.py:net", "./evil_head.py:net", "os:system", ":", "a..b:C")
    names = (*homes, "http://127.0.0.1:9/v1", "//127.0.0.1/x.onnx", "ncc", "miv", "x" * 5000)

    def trial(rng: np.random.Generator) -> str:
        document = {
            "methods": [{"name": f"m{i}", "method": pick(rng, names)} for i in range(2)],
            "backbones": [{"name": "b", "spec": pick(rng, names)}],
            "sets": ["birds"],
            "tasks": 1,
        }
        where, path = Path.cwd(), list(sys.path)
        os.chdir(folder)
        sys.path.append(str(folder))
        try:
            (run / CONFIG).write_text(json.dumps(document))
            line = json.dumps(to_json(result(method=pick(rng, names), backbone=pick(rng, names))))
            (run / RESULTS).write_text(line + "\n" if rng.random() < 0.9 else "")
            rows = [
                f"{key} = [{', '.join(_toml(each) for each in document[key])}]"  # type: ignore[attr-defined]
                for key in ("methods", "backbones")
            ]
            Path("their.toml").write_text("\n".join([*rows, 'sets = ["birds"]', "tasks = 1"]))
            command: list[str] = pick(
                rng,
                [
                    ["bench", "compare", "run", "run"],
                    ["bench", "compare", "run:evil_head:Head", "run:ncc"],
                    ["bench", "run", "their.toml", "--dry-run", "--data", "."],
                    ["bench", "run", "their.toml", "--data", ".", "-o", "new", "--workers", "0"],
                    *([["bench", "report", "run"]] if rng.random() < 0.1 else []),
                ],
            )
            with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
                code = main([*command, "--quiet"])
        finally:
            os.chdir(where)
            sys.path[:] = path
        assert "evil_head" not in sys.modules, document
        assert not (folder / "it ran").exists(), document
        return "refused" if code else "answered"

    yield trial


def _toml(entry: dict[str, str]) -> str:
    return "{" + ", ".join(f"{key} = {json.dumps(value)}" for key, value in entry.items()) + "}"


# Model files.


@contextmanager
def names(folder: Path) -> Iterator[Trial]:
    """Model files that name any method and any backbone."""
    X, y = small_features()
    path = folder / "model.miv"
    mivhead.save(MIVClassifier(random_state=0).fit(X, y), path)
    tensors, document = safefile.read(path)
    modules = sorted(sys.modules)

    def trial(rng: np.random.Generator) -> str:
        module = pick(rng, modules)
        members = dir(sys.modules.get(module)) or ["x"]
        method = pick(rng, [f"{module}:{pick(rng, members)}", module, "", ":", "x" * 5000, "ncc"])
        spec = pick(rng, ["", "/", "//host/share/", "../", "a.py:", "http://127.0.0.1:9/", "os:"])
        backbone = {
            "name": spec + pick(rng, ["x.onnx", "x" * 900 + ".onnx", "system", "\x1b[2J", "x"]),
            "weights": "0" * 64,
            "preprocessing": {},
            "taps": ["a", "b"],
        }
        changed = {**document, "backbone": backbone}
        if rng.random() < 0.7:
            changed["method"] = method
        save_file(tensors, path, metadata={"mivhead": json.dumps(changed)})
        try:
            model = mivhead.load(path)
            assert repr(model).isprintable()
            assert changed["method"] in METHODS
            model.predict(np.zeros((1, 8, 8, 3), np.uint8))
        except MivError as error:
            return "refused" if len(str(error)) < 4000 else "refused at length"
        raise AssertionError(f"images were predicted with {backbone['name']}")

    yield trial


# ONNX graphs.


def _graph(rng: np.random.Generator) -> ModelProto:
    """Compose a model from honest and hostile nodes."""
    value, nodes = "soft", []
    for number in range(rng.integers(0, 6)):
        name, kind = f"v{number}", rng.integers(9)
        if kind == 0:
            # Not to no rows: onnxruntime 1.31 ends the process at a slice of an empty tensor.
            nodes.append(helper.make_node("Slice", [value, "0", "1"], [name]))
        elif kind == 1:
            nodes.append(helper.make_node("Concat", [value] * 3, [name], axis=int(rng.integers(2))))
        elif kind == 2:
            nodes.append(helper.make_node(pick(rng, ["Sub", "Mul", "Div"]), [value, "ten"], [name]))
        elif kind == 3:
            nodes.append(
                helper.make_node(pick(rng, ["Log", "Neg", "Exp", "Sqrt"]), [value], [name])
            )
        elif kind == 4:
            nodes.append(helper.make_node("Softmax", [value], [name], axis=-1))
        elif kind == 5:
            nodes.append(helper.make_node("Expand", [value, pick(rng, ["billion", "1"])], [name]))
        elif kind == 6:
            nodes.append(
                helper.make_node("ReduceMax", [value], [name], keepdims=int(rng.integers(2)))
            )
        elif kind == 7:
            nodes.append(helper.make_node("Tile", [value, "01"], [name]))
        else:
            domain = pick(rng, ["", "", "com.microsoft", "theirs"])
            operator = pick(rng, ["If", "Scan", "RandomNormalLike", "Identity", "Gelu"])
            nodes.append(helper.make_node(operator, [value], [name], domain=domain))
        value = name
    return hostile.replaced(*nodes) if nodes else hostile.honest()


@contextmanager
def graphs(folder: Path) -> Iterator[Trial]:
    """Exported models that compute something else, too much, or without an end."""
    path = folder / "model.onnx"
    pictures = [np.full((8, 8, 3), grey, np.uint8) for grey in (0, 128, 255)]
    fixed = [made for made, _ in hostile.WRONG.values()]
    fixed += [hostile.external(where) for where in hostile.EXTERNAL]

    def trial(rng: np.random.Generator) -> str:
        made = pick(rng, fixed) if rng.random() < 0.2 else _graph(rng)
        content = made.SerializeToString()
        if rng.random() < 0.3:
            content = damage(content, rng)
        path.write_bytes(content)
        started = time.perf_counter()
        try:
            found = mivhead.load(path).classify(pictures)
        except MivError:
            return "refused"
        finally:
            spent = time.perf_counter() - started
            assert spent < PATIENCE, f"{spent:.0f} s"
        assert len(found) == len(pictures)
        assert all(0 <= each.probability <= 1.01 for each in found)
        return "answered"

    yield trial


# Boxes of detectors, configurations, arrays.

ODD = (None, [], {}, [[]], True, -1, 2.5, 10**400, 1e308, "", "1", "\ud800", "../x", "x\n\x1b", "/")


def _replaced(value: Any, rng: np.random.Generator) -> Any:
    """Put something of another kind into a random place of a JSON document."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.15:
        return pick(rng, ODD)
    keys = list(value) if isinstance(value, dict) else range(len(value))
    key = pick(rng, keys)
    changed = copy.copy(value)
    changed[key] = _replaced(value[key], rng)
    return changed


@contextmanager
def documents(folder: Path) -> Iterator[Trial]:
    """Documents with odd values and damage are refused, or read and written again."""
    boxes = [make(folder) for make in test_boxes.FORMATS]
    np.savez(folder / "a.npz", X=np.eye(4, dtype=np.float32), y=list("abab"))
    np.save(folder / "a.npy", np.eye(4, dtype=np.float32))
    (folder / "run.toml").write_text('methods = ["ncc"]\nsets = ["birds"]\ntasks = 2\n')
    files = [f for each in boxes for f in (each, *each.rglob("*")) if f.is_file()]
    files += [folder / name for name in ("a.npz", "a.npy", "run.toml")]
    contents = {path: path.read_bytes() for path in files}

    def use(path: Path) -> None:
        if path.suffix == ".toml":
            load_config(path)
        elif path.suffix in (".npz", ".npy"):
            stores.open(path).read()
        else:
            found = read_boxes(next(each for each in boxes if each in (path, *path.parents)))
            decided = {box.id: ("a\nb", "\x1b", 0.5) for box in found.boxes}
            found.write(folder / "out" / found.path.name, decided)

    def trial(rng: np.random.Generator) -> str:
        path = pick(rng, files)
        content = contents[path]
        if path.suffix == ".json" and rng.random() < 0.8:
            content = json.dumps(_replaced(json.loads(content), rng)).encode()
        else:
            content = damage(content, rng)
        path.write_bytes(content)
        (folder / "out").mkdir(exist_ok=True)
        started = time.perf_counter()
        try:
            use(path)
        except MivError:
            return "refused"
        finally:
            path.write_bytes(contents[path])
            shutil.rmtree(folder / "out")
            assert time.perf_counter() - started < PATIENCE
        return "read"

    yield trial


# Scans of progressive JPEGs.


@contextmanager
def scans(_folder: Path) -> Iterator[Trial]:
    """Progressive JPEGs with any number of scans in any order, and comments that look like them."""
    bases = []
    for side in (16, 200, 1500):
        buffer = io.BytesIO()
        picture = np.random.default_rng(side).integers(0, 255, (side, side, 3), np.uint8)
        Image.fromarray(picture).save(buffer, "JPEG", progressive=True, quality=20)
        bases.append(buffer.getvalue())

    def trial(rng: np.random.Generator) -> str:
        data = pick(rng, bases)
        starts = [i for i in range(len(data)) if data[i : i + 2] == b"\xff\xda"]
        ends = [*starts[1:], len(data) - 2]
        parts = [data[a:b] for a, b in zip(starts, ends, strict=True)]
        count = int(10 ** rng.uniform(0, 3.5 if len(data) < 10**6 else 2.5))
        body = b"".join(pick(rng, parts) for _ in range(count))
        note = b"\xff\xfe\x80\x00" + 16383 * b"\xff\xda" if rng.random() < 0.2 else b""
        made = data[:2] + note + data[2 : starts[0]] + body + data[-2:]
        if rng.random() < 0.1:
            made = damage(made, rng)
        started = time.perf_counter()
        try:
            load_image(made, name="x.jpg")
            outcome = "decoded"
        except ImageError:
            outcome = "refused"
        spent = time.perf_counter() - started
        assert spent < PATIENCE, f"{count} scans took {spent:.0f} s"
        assert outcome == "refused" or count <= 3 * MAX_SCANS, count
        return outcome

    yield trial
