"""The daily path needs neither PyTorch nor scikit-learn, SciPy or pandas."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import mivhead
from mivhead import FewShotClassifier, Preprocessing
from mivhead.backbones import from_module
from mivhead.export.model import export_model

ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "torchvision", "timm", "sklearn", "scipy", "pandas", "matplotlib", "onnx")
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
    model = FewShotClassifier(backbone, threshold=0).fit_folder(images / "new")
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
        ["predict", "model.onnx", "new/dark/0.png", "--json", "--top", "2"],
        ["predict", "model.onnx", "new/", "--csv", "--reject", "20%"],
        ["evaluate", "model.onnx", "new/"],
        ["info", "model.onnx"],
        ["methods"],
        ["backbones", "list"],
    ],
    ids=" ".join,
)
def test_commands_work(arguments: list[str], folder: Path) -> None:
    done = run(MIV, *arguments, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("workers", [[], ["--workers", "2"]], ids=["", "workers"])
def test_jobs_work(workers: list[str], folder: Path) -> None:
    pytest.importorskip("pyarrow", reason="the extra batch is not installed")
    pytest.importorskip("fsspec", reason="the extra batch is not installed")
    job = ["predict", "model.onnx", "new/", "--job", "out.csv", "--overwrite", "--part-rows", "3"]
    program = folder / "miv.py"  # workers import it, so that PyTorch is absent there too
    program.write_text(
        f"{BLOCKED}from mivhead.cli.main import main\n"
        "if __name__ == '__main__':\n    sys.exit(main(sys.argv[1:]))\n"
    )
    done = run(program, *job, *workers, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert len((folder / "out.csv").read_text().splitlines()) == 1 + 8


def test_python_works(folder: Path) -> None:
    code = BLOCKED + (
        "import mivhead\n"
        "model = mivhead.load('model.onnx')\n"
        "print(*model.predict('new/'), model.classify('new/')[0].decision)\n"
    )
    done = run(code, cwd=folder)
    assert done.stdout.split() == ["dark"] * 4 + ["light"] * 4 + ["dark"], done.stderr


DAILY = [
    "fit new/ -o daily.miv --html fit.html",
    "fit new/ -o more.miv --unlabelled unlabelled/ --no-check",
    "predict daily.miv new/ --reject 20%",
    "predict daily.miv new/ --csv",
    "evaluate daily.miv other/",
    "add daily.miv grey/",
    "relabel daily.miv dark/0.png light",
    "relabel daily.miv dark/0.png dark",
    "rename daily.miv grey middle",
    "remove daily.miv middle",
    "explain daily.miv new/dark/0.png",
    "explain daily.miv new/ -o why.html",
    "suggest daily.miv unlabelled/ -n 2",
    "info daily.miv --shots",
    "info daily.miv --json",
    "cache info",
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
    assert {"daily.miv", "fit.html", "more.miv", "why.html"} <= {
        each.name for each in images.iterdir()
    }


def test_the_daily_calls_work(images: Path) -> None:
    program = f"""{BLOCKED}
import mivhead
import numpy as np

model = mivhead.FewShotClassifier(cache=False, verbose=False)
model.fit_folder("new/", unlabelled="unlabelled/")
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


def test_a_service_works(folder: Path) -> None:
    pytest.importorskip("starlette")
    code = BLOCKED + (
        "from starlette.testclient import TestClient\n"
        "from mivhead.service.application import create_app\n"
        "client = TestClient(create_app(['model.onnx']))\n"
        "with client:\n"
        "    image = open('new/light/0.png', 'rb').read()\n"
        "    answer = client.post('/v1/predict', files={'images': image})\n"
        "    print(answer.status_code, answer.json()['predictions'][0]['label'])\n"
    )
    done = run(code, cwd=folder)
    assert done.stdout.split() == ["200", "light"], done.stderr[-2000:]


def test_a_cold_start_is_quick(folder: Path) -> None:
    """One image from a cold start: under 0.8 s of processor time, here with a small network."""
    import resource

    times = []
    for _ in range(3):  # the best of three: other work on the machine only makes it slower
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert run(MIV, "predict", "model.onnx", "new/dark/0.png", cwd=folder).returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(times) < 0.8, times


@pytest.mark.slow
def test_in_a_virtualenv_without_pytorch(folder: Path, tmp_path: Path) -> None:
    """Install exactly what the package requires, and nothing else."""
    import venv

    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lock = ("-c", ROOT / "constraints.txt")
    install = [python, "-m", "pip", "install", "-q", "--no-cache-dir", *lock]
    subprocess.run([*install, *project["dependencies"]], check=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "MIV_CACHE": str(tmp_path)}

    def miv(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [python, "-m", "mivhead", *arguments]
        return subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )

    assert subprocess.run(
        [python, "-c", "import torch"], check=False, capture_output=True
    ).returncode
    for arguments in (["predict", "model.onnx", "new/"], ["evaluate", "model.onnx", "new/"]):
        done = miv(*arguments)
        assert done.returncode == 0, done.stderr
    for line in DAILY:
        done = miv(*line.split())
        assert done.returncode == 0, done.stderr
    size = sum(f.stat().st_size for f in (tmp_path / "venv").rglob("*") if f.is_file())
    assert size < 250e6, f"{size / 1e6:.0f} MB"
    assert mivhead.load(folder / "model.onnx").classes_.tolist() == ["dark", "light"]
