"""Faults at random: damage and kills, for some minutes, and a table of what was tried and lost.

    make chaos MINUTES=10      # or: python -m tests.chaos --minutes 10 --seed 0 --only kill

Each trial damages a file that a stranger may have written, or kills a process in the middle of its
work. It is lost if an error is not a `MivError`, if damage changes an answer, or if anything that
was there before, or that was confirmed, is gone. A lost trial prints its seed, and
`--seed N --trials 1` tries it again. The same faults are plain tests beside their rooms.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image

from mivhead import FewShotClassifier, load
from mivhead.app.project import Project
from mivhead.errors import MivError
from mivhead.images.decoding import load_image
from mivhead.images.sources import open_labelled

Trial = Callable[["Ground", np.random.Generator, Path], None]
CASES: dict[str, Trial] = {}


def case(name: str) -> Callable[[Trial], Trial]:
    """Add a kind of fault to the table."""

    def add(trial: Trial) -> Trial:
        CASES[name] = trial
        return trial

    return add


@dataclass
class Ground:
    """What all trials start from, made once: photos, a model of them, and its answers."""

    root: Path
    probabilities: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(0)
        for label, level in {"dark": 0, "light": 150}.items():
            for number in range(3):
                path = self.root / "shots" / label / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                pixels = rng.integers(level, level + 100, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(path)
        model = FewShotClassifier(cache=str(self.root / "cache"), verbose=False)
        model.fit(self.root / "shots").save(self.root / "model.miv")
        model.export(self.root / "model.onnx")
        shutil.make_archive(str(self.root / "shots"), "zip", self.root / "shots")
        self.probabilities = model.predict_proba(self.root / "shots" / "dark")

    def check_model(self, path: Path) -> None:
        """Require that a model is refused, or answers as it did."""
        try:
            answer = load(path).predict_proba(self.root / "shots" / "dark")
        except MivError:
            return
        np.testing.assert_allclose(answer, self.probabilities, atol=1e-4)


def damage(data: bytes, rng: np.random.Generator) -> bytes:
    """Flip a byte, cut the end off, repeat a part, or overwrite one."""
    content, place = bytearray(data), int(rng.integers(len(data)))
    kind = int(rng.integers(4))
    if kind == 0:
        content[place] ^= 1 << int(rng.integers(8))
    elif kind == 1:
        del content[place:]
    elif kind == 2:
        content[place:place] = content[place : place + int(rng.integers(1, 200))]
    else:
        size = int(rng.integers(1, 50))
        content[place : place + size] = rng.bytes(size)
    return bytes(content)


@case("damaged model file")
def _(ground: Ground, rng: np.random.Generator, folder: Path) -> None:
    path = folder / "model.miv"
    path.write_bytes(damage((ground.root / "model.miv").read_bytes(), rng))
    ground.check_model(path)


@case("damaged exported model")
def _(ground: Ground, rng: np.random.Generator, folder: Path) -> None:
    path = folder / "model.onnx"
    path.write_bytes(damage((ground.root / "model.onnx").read_bytes(), rng))
    ground.check_model(path)


@case("damaged image")
def _(ground: Ground, rng: np.random.Generator, folder: Path) -> None:
    buffer = io.BytesIO()
    kind = str(rng.choice(["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"]))
    Image.open(ground.root / "shots" / "dark" / "0.png").save(buffer, kind)
    with suppress(MivError):
        assert load_image(damage(buffer.getvalue(), rng)).mode == "RGB"


@case("damaged zip of shots")
def _(ground: Ground, rng: np.random.Generator, folder: Path) -> None:
    path = folder / "shots.zip"
    path.write_bytes(damage((ground.root / "shots.zip").read_bytes(), rng))
    with suppress(MivError):
        images = open_labelled(path)
        for row in range(len(images)):
            images.load(row)
    assert [file.name for file in folder.iterdir()] == ["shots.zip"], "something was unpacked"


@case("damaged cache entry")
def _(ground: Ground, rng: np.random.Generator, folder: Path) -> None:
    shutil.copytree(ground.root / "cache", folder / "cache")
    entries = sorted(path for path in (folder / "cache").rglob("*") if path.is_file())
    entry = entries[int(rng.integers(len(entries)))]
    entry.write_bytes(damage(entry.read_bytes() or b"\0", rng))
    model = FewShotClassifier(cache=str(folder / "cache"), verbose=False)
    answer = model.fit(ground.root / "shots").predict_proba(ground.root / "shots" / "dark")
    np.testing.assert_allclose(answer, ground.probabilities, atol=1e-4)


def kill_while(code: str, rng: np.random.Generator, *arguments: object) -> list[str]:
    """Run code until it has said "start", kill it some time later, and return its other lines."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "start\n"
        time.sleep(rng.exponential(0.15))
        child.send_signal(signal.SIGKILL)
        return child.stdout.read().splitlines()


CHANGE = """
import sys
from mivhead.cli.main import main
import mivhead.cli.change
print("start", flush=True)
for number in range(1000):
    main(["rename", sys.argv[1], f"dark{number or ''}", f"dark{number + 1}", "--quiet"])
"""


@case("kill while a model is changed")
def _(ground: Ground, rng: np.random.Generator, folder: Path) -> None:
    path = folder / "model.miv"
    shutil.copy(ground.root / "model.miv", path)
    kill_while(CHANGE, rng, path)
    for file in (path, path.with_name("model.miv.bak")):
        if file.exists():
            answer = load(file).predict_proba(ground.root / "shots" / "dark")
            np.testing.assert_allclose(answer, ground.probabilities, atol=1e-4)
    assert path.exists()


JOB = """
import sys
from mivhead import jobs
print("start", flush=True)
jobs.predict(*sys.argv[1:4], part_rows=4, resume=True, verbose=False)
"""


@case("kill while a job runs")
def _(ground: Ground, rng: np.random.Generator, folder: Path) -> None:
    import pyarrow.parquet

    from mivhead import jobs

    photo = (ground.root / "shots" / "dark" / "0.png").read_bytes()
    (folder / "new").mkdir()
    for number in range(30):
        (folder / "new" / f"{number}.png").write_bytes(photo)
    arguments = ground.root / "model.miv", folder / "new", folder / "names.parquet"
    for _ in range(2):
        kill_while(JOB, rng, *arguments)
    jobs.predict(*arguments, part_rows=4, resume=True, verbose=False)
    rows = pyarrow.parquet.read_table(arguments[2]).to_pylist()
    assert len(rows) == len({row["file"] for row in rows}) == 30


UPLOADS = """
import sys
from pathlib import Path
from mivhead.app.project import Project
project, photo = Project(sys.argv[1]), Path(sys.argv[2]).read_bytes()
project.add_class("a")
print("start", flush=True)
for number in range(10_000):
    data = photo + str(number).encode()
    made = project.add_photo(data, f"{number}.png", "a" if number % 2 else None)
    print(f"{number} there", flush=True)
    if number % 3 == 0:
        project.remove([made.id])
"""


@case("kill of the app while photos arrive")
def _(ground: Ground, rng: np.random.Generator, folder: Path) -> None:
    lines = kill_while(UPLOADS, rng, folder / "project", ground.root / "shots/dark/0.png")
    confirmed = {int(line.split()[0]) for line in lines if line.endswith(" there")}
    Project(folder / "project").close()
    kept = [
        int(path.read_bytes().rpartition(b"\x60\x82")[2])  # what follows the end of a PNG
        for path in (folder / "project").rglob("*")
        if path.is_file() and path.suffix == ".png" and "thumbs" not in path.parts
        if not path.name.startswith(".")  # what the process had begun to write
    ]
    assert confirmed <= set(kept), f"lost: {sorted(confirmed - set(kept))}"
    assert len(kept) == len(set(kept)), "a photo is there twice"


def main() -> int:
    """Try faults until the time is over, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--trials", type=int, help="instead of minutes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="cases whose name contains this text")
    args = parser.parse_args()
    names = [name for name in CASES if args.only in name]
    tried, lost = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
    end, seed = time.monotonic() + 60 * args.minutes, args.seed
    with tempfile.TemporaryDirectory() as root:
        os.environ["MIV_CACHE"] = "off"
        ground = Ground(Path(root))
        while seed - args.seed < args.trials if args.trials else time.monotonic() < end:
            rng = np.random.default_rng(seed)
            name = names[int(rng.integers(len(names)))]
            tried[name] += 1
            try:
                with tempfile.TemporaryDirectory() as folder:
                    CASES[name](ground, rng, Path(folder))
            except Exception:
                lost[name] += 1
                print(f"lost with seed {seed}: {name}\n{traceback.format_exc()}", flush=True)
            seed += 1
    print("| fault | tried | lost |\n|---|---:|---:|")
    for name in names:
        print(f"| {name} | {tried[name]:,} | {lost[name]:,} |")
    return int(any(lost.values()))


if __name__ == "__main__":
    sys.exit(main())
