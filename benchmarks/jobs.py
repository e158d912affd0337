"""What large jobs cost: images per second and core, and memory that does not grow with the rows.

    python benchmarks/jobs.py DATA [--rows 10000 100000]

DATA is a folder with one folder per class. A model of ten classes, and the same one exported,
predict JPEGs of 64 pixels and of 12 megapixels made from its photographs, in one thread. Then
`miv predict --job` runs in a process of its own on tars of many small images and reports its
largest resident size. Processor time counts; it takes a few minutes on an idle core.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

from mivhead import FewShotClassifier, jobs

WAYS, SHOTS, QUERIES = 10, 5, 8
SIDES = {"64 px": (64, 64), "12 MP": (4000, 3000)}
COUNT = {"64 px": 100, "12 MP": 12}
MEMORY = """
import json, sys
from pathlib import Path
from mivhead import jobs
assert not jobs.predict(*sys.argv[1:], threads=1, verbose=False).errors
# Not ru_maxrss, which starts with the size of the process that started this one.
lines = Path("/proc/self/status").read_text().splitlines()
print(next(int(line.split()[1]) // 1024 for line in lines if line.startswith("VmHWM")))
"""


def fit(data: Path, folder: Path) -> list[Path]:
    """Fit a model, export it, and return other images."""
    shots, labels, queries = [], [], []
    for group in sorted(path for path in data.iterdir() if path.is_dir())[:WAYS]:
        files = sorted(group.iterdir())
        shots += files[:SHOTS]
        labels += [group.name] * len(files[:SHOTS])
        queries += files[SHOTS : SHOTS + QUERIES]
    model = FewShotClassifier().fit(shots, labels)
    model.save(folder / "model.miv")
    model.export(folder / "model.onnx")
    return queries


def enlarge(path: Path, size: tuple[int, int]) -> bytes:
    """Return a photograph as a JPEG of another size, with some noise, as cameras have."""
    with Image.open(path) as image:
        picture = image.convert("RGB").resize(size, Image.Resampling.BICUBIC)
    noise = np.random.default_rng(0).normal(0, 4, (size[1], size[0], 1))
    pixels = np.clip(np.asarray(picture) + noise, 0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def speed(queries: list[Path], root: Path) -> None:
    """Print the processor time per image of jobs over small and large JPEGs."""
    for label, size in SIDES.items():
        folder = root / label.replace(" ", "")
        folder.mkdir()
        files = [enlarge(path, size) for path in queries[:8]]
        for i in range(COUNT[label]):
            (folder / f"{i}.jpg").write_bytes(files[i % len(files)])
        for model in (root / "model.miv", root / "model.onnx"):
            warm = root / f"warm-{folder.name}{model.suffix}.parquet"  # what a process does once
            jobs.predict(model, folder / "0.jpg", warm, verbose=False)
            output = root / f"{folder.name}{model.suffix}.parquet"
            started = time.process_time()
            jobs.predict(model, folder, output, threads=1, verbose=False)
            seconds = (time.process_time() - started) / COUNT[label]
            print(f"{label}, {model.suffix}: {1000 * seconds:.1f} ms, {1 / seconds:.0f} per second")


def memory(queries: list[Path], root: Path, rows: list[int]) -> None:
    """Print the largest resident size of jobs over tars of small images."""
    data = enlarge(queries[0], (64, 64))
    for count in rows:
        folder = root / f"tars{count}"
        folder.mkdir()
        for first in range(0, count, 10_000):
            with tarfile.open(folder / f"{first:07d}.tar", "w") as archive:
                for i in range(first, min(first + 10_000, count)):
                    info = tarfile.TarInfo(f"{i:07d}.jpg")
                    info.size = len(data)
                    archive.addfile(info, io.BytesIO(data))
        command = [
            sys.executable,
            "-c",
            MEMORY,
            root / "model.onnx",
            folder,
            root / f"{count}.parquet",
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        print(f"{count:,} rows: {json.loads(done.stdout)} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        queries = fit(args.data, root)
        speed(queries, root)
        memory(queries, root, args.rows)


if __name__ == "__main__":
    main()
