"""The daily path needs neither PyTorch nor scikit-learn, SciPy or pandas."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mivhead import FewShotClassifier, Preprocessing
from mivhead.backbones import from_module
from mivhead.export.model import export_model

ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "torchvision", "timm", "sklearn", "scipy", "pandas", "matplotlib")
BLOCKED = f"""
import sys
from tests.helpers.extras import Blocked
sys.meta_path.insert(0, Blocked(*{PACKAGES!r}))
"""
ABSENT = f"\nassert not {set(PACKAGES)!r} & set(sys.modules), sorted(sys.modules)\n"
MIV = f"{BLOCKED}from mivhead.cli.main import main\ncode = main(sys.argv[1:]){ABSENT}sys.exit(code)"


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """A folder with images: labelled in `new`, `other` and `grey`, or not."""
    root = tmp_path_factory.mktemp("runtime")
    rng = np.random.default_rng(0)
    folders = {"new/dark": (0, 4), "new/light": (150, 4), "other/dark": (0, 2)}
    folders |= {"other/light": (150, 2), "grey/grey": (75, 3), "unlabelled": (30, 4)}
    for name, (low, count) in folders.items():
        (root / name).mkdir(parents=True)
        for i in range(count):
            pixels = rng.integers(low, low + 100, (40, 50, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{i}.png")
    return root


@pytest.fixture(scope="module")
def folder(images: Path) -> Path:
    """The same folder, with `model.onnx`, a model on a small network."""
    import torch

    pytest.importorskip("onnxscript")  # to export; not needed afterwards
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 8, 8), torch.nn.ReLU())
    backbone = from_module(network, ["1"], name="small", preprocessing=Preprocessing(size=32))
    model = FewShotClassifier(backbone, threshold=0).fit(images / "new")
    export_model(model, images / "model.onnx")
    return images


def run(
    code: str | Path, *arguments: object, cwd: Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": paths, **variables}
    program = [code] if isinstance(code, Path) else ["-c", code]
    command = [sys.executable, *map(str, program), *map(str, arguments)]
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["predict", "model.onnx", "new/"],
        ["evaluate", "model.onnx", "new/"],
        ["info", "model.onnx"],
        ["backbones", "list"],
    ],
    ids=" ".join,
)
def test_commands_work(arguments: list[str], folder: Path) -> None:
    done = run(MIV, *arguments, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_python_works(folder: Path) -> None:
    code = BLOCKED + (
        "import mivhead\n"
        "model = mivhead.load('model.onnx')\n"
        "print(*model.predict('new/'), model.classify('new/')[0].decision)\n"
    )
    done = run(code, cwd=folder)
    assert done.stdout.split() == ["dark"] * 4 + ["light"] * 4 + ["dark"], done.stderr


DAILY = [
    "fit new/ -o daily.miv --no-check",
    "fit new/ -o more.miv --unlabelled unlabelled/ --no-check",
    "predict daily.miv new/ --reject 20%",
    "evaluate daily.miv other/",
    "add daily.miv grey/",
    "relabel daily.miv dark/0.png light",
    "rename daily.miv grey middle",
    "remove daily.miv middle",
    "explain daily.miv new/dark/0.png",
    "predict daily.miv new/ --html why.html",
    "suggest daily.miv unlabelled/ -n 2",
    "info daily.miv --shots",
    "info daily.miv --json",
    "info",
]


def test_the_daily_commands_work(images: Path) -> None:
    """All with the default backbone, in one process."""
    program = f"""{BLOCKED}
from mivhead.cli.main import main
for line in {DAILY!r}:
    assert main(line.split()) == 0, line
{ABSENT}"""
    done = run(program, cwd=images, MIV_CACHE=str(images / "cache"))
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert {"daily.miv", "more.miv", "why.html"} <= {each.name for each in images.iterdir()}


def test_the_daily_calls_work(images: Path) -> None:
    program = f"""{BLOCKED}
import mivhead
import numpy as np

model = mivhead.FewShotClassifier(cache=False, verbose=False)
model.fit("new/", unlabelled="unlabelled/")
assert model.classifier_.unlabelled_.images == 4
assert model.evaluate("other/").accuracy == 1
model.add("grey/")
assert model.classes_.tolist() == ["dark", "grey", "light"]
model.rename("grey", "middle")
model.relabel("grey/0.png", "light")
model.remove("middle", "grey/0.png")
model.save("called.miv")
again = mivhead.load("called.miv")
assert again.predict("other/").tolist() == model.predict("other/").tolist() == ["dark"] * 2 + [
    "light"
] * 2
assert again.explain("other/dark/0.png").prediction.label == "dark"
table = np.eye(4)
head = mivhead.MIVClassifier(random_state=0).fit(table, list("aabb"))
assert head.score(table, list("aabb")) == 1
{ABSENT}"""
    done = run(program, cwd=images)
    assert done.returncode == 0, done.stderr
