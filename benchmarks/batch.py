"""What large jobs cost: images per second and core, where the time goes, decoders, and memory.

    python benchmarks/batch.py speed   --data DIR [--models a.onnx b.miv] [--json batch.json]
    python benchmarks/batch.py decode  --data DIR
    python benchmarks/batch.py memory  [--rows 10000 100000]

`speed` predicts JPEGs of 64 pixels and of 12 megapixels, made from the photographs of a set, with a
model of ten classes in PyTorch and exported, in one thread. `decode` compares ways to decode and
shrink JPEGs: time, and how far they move the probabilities of a model. `memory` runs
`miv predict --job` in a process of its own on tars of many small images and reports its largest
resident size. Processor time counts; each takes a few minutes on an idle core.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import resource
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

SETS = ("cub200_birds", "vgg_flower102", "isic_skin_lesions")
WAYS, SHOTS, QUERIES = 10, 5, 12
SIDES = {"64 px": (64, 64), "12 MP": (4000, 3000)}
SIZE = 224


def pick(folder: Path) -> tuple[list[Path], list[str], list[Path]]:
    """Shots, their labels, and other images of the first classes."""
    shots, labels, queries = [], [], []
    for group in sorted(each for each in folder.iterdir() if each.is_dir())[:WAYS]:
        files = sorted(each for each in group.iterdir() if each.suffix.lower() in (".jpg", ".jpeg"))
        shots += files[:SHOTS]
        labels += [group.name] * len(files[:SHOTS])
        queries += files[SHOTS : SHOTS + QUERIES]
    return shots, labels, queries


def enlarge(path: Path, size: tuple[int, int], quality: int = 90) -> bytes:
    """Return a photograph as a JPEG of another size, with some noise, as cameras have."""
    with Image.open(path) as image:
        picture = image.convert("RGB").resize(size, Image.Resampling.BICUBIC)
    noise = np.random.default_rng(0).normal(0, 4, (size[1], size[0], 1))
    pixels = np.clip(np.asarray(picture) + noise, 0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


def fit(folder: Path, out: Path) -> list[Path]:
    """Fit a model to a set, export it, and return other images."""
    import mivhead
    from mivhead.export.model import export_model

    shots, labels, queries = pick(folder)
    model = mivhead.FewShotClassifier().fit(shots, labels)
    model.save(out / "model.miv")
    export_model(model, out / "model.onnx")
    return queries


def timed(action: Callable[[], Any], repeats: int) -> float:
    """Return the median of the processor time of an action, in seconds."""
    seconds = []
    for _ in range(repeats):
        started = time.process_time()
        action()
        seconds.append(time.process_time() - started)
    return statistics.median(seconds)


def speed(data: Path, count: int, models: list[Path] | None = None) -> list[dict[str, Any]]:
    """Predict jobs of small and large JPEGs, and time their stages."""
    from mivhead import batch
    from mivhead.backbones.preprocessing import to_picture
    from mivhead.batch.work import Predicting, hash_file
    from mivhead.images.decoding import load_image

    found = []
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        if models is None:
            queries = fit(data / SETS[0], root)
            models = [root / "model.onnx", root / "model.miv"]
        else:
            queries = pick(data / SETS[0])[2]
        for label, size in SIDES.items():
            number = count if label == "64 px" else max(8, count // 8)
            folder = root / label.replace(" ", "")
            folder.mkdir()
            files = [enlarge(queries[i % len(queries)], size) for i in range(min(number, 8))]
            for i in range(number):
                (folder / f"{i}.jpg").write_bytes(files[i % len(files)])
            for path in models:
                work = Predicting(str(path), hash_file(path), None, None, None, 1)
                shrunk = 2 * SIZE  # as jobs decode
                small = [to_picture(load_image(each), 0, SIZE) for each in files[:8]]
                work.compute(small)  # the model is loaded
                decoded = [load_image(each, at_least=shrunk) for each in files[:8]]
                stages = {
                    "decoding in full": timed(lambda: [load_image(d) for d in files[:8]], 1) / 8,  # noqa: B023
                    "decoding": timed(
                        lambda: [load_image(d, at_least=shrunk) for d in files[:8]],  # noqa: B023
                        3,
                    )
                    / 8,
                    "resizing": timed(lambda: [to_picture(d, 0, SIZE) for d in decoded], 3) / 8,  # noqa: B023
                    "model": timed(lambda: work.compute(small), 3) / 8,  # noqa: B023
                }
                out = root / f"{label}-{path.name}.parquet"
                warm = root / f"warm{path.suffix}.parquet"  # what a process does only once
                batch.predict(path, folder / "0.jpg", warm, overwrite=True, verbose=False)
                wall = time.perf_counter()
                total = timed(lambda: batch.predict(path, folder, out, threads=1, verbose=False), 1)  # noqa: B023
                found.append(
                    {
                        "images": label,
                        "bytes": round(statistics.mean(map(len, files))),
                        "model": path.suffix,
                        "milliseconds": {k: round(1000 * v, 2) for k, v in stages.items()},
                        "job_milliseconds": round(1000 * total / number, 2),
                        "per_core_second": round(number / total, 1),
                        "wall_per_second": round(number / (time.perf_counter() - wall), 1),
                    }
                )
                print(found[-1], flush=True)
    return found


# Decoders: from the bytes of a JPEG to an RGB square, as the backbone sees it.


def with_pillow(data: bytes) -> Image.Image:
    """Decode in full, then resize: what mivhead does."""
    with Image.open(io.BytesIO(data)) as image:
        return image.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BICUBIC)


def with_draft(data: bytes, factor: int = 1) -> Image.Image:
    """Let libjpeg decode at 1/2, 1/4 or 1/8 of the size, at least `factor` times the square."""
    with Image.open(io.BytesIO(data)) as image:
        image.draft("RGB", (factor * SIZE, factor * SIZE))
        return image.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BICUBIC)


def with_simplejpeg(data: bytes) -> Image.Image:
    """libjpeg-turbo without Pillow."""
    import simplejpeg

    pixels = simplejpeg.decode_jpeg(data)
    return Image.fromarray(pixels).resize((SIZE, SIZE), Image.Resampling.BICUBIC)


def with_simplejpeg_scaled(data: bytes) -> Image.Image:
    """libjpeg-turbo without Pillow, at a fraction of the size."""
    import simplejpeg

    pixels = simplejpeg.decode_jpeg(data, min_height=2 * SIZE, min_width=2 * SIZE)
    return Image.fromarray(pixels).resize((SIZE, SIZE), Image.Resampling.BICUBIC)


def with_pyvips(data: bytes) -> Image.Image:
    """Libvips' thumbnail, which decodes at a fraction of the size."""
    import pyvips

    image = pyvips.Image.thumbnail_buffer(data, SIZE, height=SIZE, size="force")
    return Image.fromarray(image.numpy()[..., :3])


def with_torchvision(data: bytes) -> Image.Image:
    """Torchvision's decoder and antialiased resize."""
    import torch
    from torchvision.io import ImageReadMode, decode_jpeg
    from torchvision.transforms.v2 import functional

    pixels = decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.RGB)
    small = functional.resize(
        pixels, [SIZE, SIZE], functional.InterpolationMode.BICUBIC, antialias=True
    )
    return Image.fromarray(small.permute(1, 2, 0).numpy())


DECODERS: dict[str, Callable[[bytes], Image.Image]] = {
    "Pillow (mivhead)": with_pillow,
    "Pillow, draft": with_draft,
    "Pillow, draft x2": lambda data: with_draft(data, 2),
    "Pillow, draft x4": lambda data: with_draft(data, 4),
    "simplejpeg": with_simplejpeg,
    "simplejpeg, scaled x2": with_simplejpeg_scaled,
    "pyvips thumbnail": with_pyvips,
    "torchvision": with_torchvision,
}


def decode(data: Path, count: int) -> list[dict[str, Any]]:
    """Compare decoders on photographs at their own size, and at 12 megapixels."""
    import mivhead

    found = []
    for number, name in enumerate(SETS):
        with tempfile.TemporaryDirectory() as folder:
            queries = fit(data / name, Path(folder))[:count]
            model: Any = mivhead.load(Path(folder, "model.onnx"))
        kinds = {"own size": [each.read_bytes() for each in queries]}
        if not number:
            kinds["12 MP"] = [enlarge(each, SIDES["12 MP"]) for each in queries[: count // 5]]
        for kind, files in kinds.items():
            own = None
            for label, decoder in DECODERS.items():
                try:
                    squares = [decoder(each) for each in files]
                except ImportError as error:
                    print(f"{label}: {error}")
                    continue
                scores = [
                    model.score(squares[i : i + 8]).probabilities for i in range(0, len(squares), 8)
                ]
                probabilities = np.concatenate(scores)
                own = probabilities if own is None else own
                differences = np.abs(probabilities - own).max(axis=1)
                seconds = timed(lambda: [decoder(each) for each in files[:10]], 3) / len(files[:10])  # noqa: B023
                same = int((probabilities.argmax(1) == own.argmax(1)).sum())
                found.append(
                    {
                        "set": name,
                        "size": kind,
                        "decoder": label,
                        "milliseconds": round(1000 * seconds, 2),
                        "largest": float(f"{differences.max():.1e}"),
                        "mean": float(f"{differences.mean():.1e}"),
                        "above_0.01": int((differences > 0.01).sum()),
                        "images": len(files),
                        "same_names": same,
                    }
                )
                print(found[-1], flush=True)
    return found


def memory(rows: list[int]) -> list[dict[str, Any]]:
    """Report the largest resident size of a job over tars of small images."""
    import torch

    from mivhead import FewShotClassifier, Preprocessing
    from mivhead.backbones import from_module
    from mivhead.export.model import export_model

    found = []
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        torch.manual_seed(0)
        network = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 8, 8), torch.nn.ReLU())
        backbone = from_module(network, ["1"], name="small", preprocessing=Preprocessing(size=32))
        shots = [rng.integers(c, c + 100, (32, 32, 3), dtype=np.uint8) for c in (0, 150) * 4]
        model = FewShotClassifier(backbone, threshold=0).fit(shots, ["dark", "light"] * 4)
        export_model(model, root / "model.onnx")
        buffer = io.BytesIO()
        Image.fromarray(shots[0]).save(buffer, "JPEG")
        for count in rows:
            for kind in ("tar", "folder"):
                source = root / f"{kind}{count}"
                _write_many(source, buffer.getvalue(), count, kind)
                out = root / f"{kind}{count}.parquet"
                command = [
                    sys.executable,
                    "-c",
                    MEMORY,
                    str(root / "model.onnx"),
                    str(source),
                    str(out),
                ]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                found.append({"rows": count, "source": kind, **json.loads(done.stdout)})
                print(found[-1], flush=True)
    return found


MEMORY = """
import json, sys, time
from pathlib import Path
from mivhead import batch
started = time.process_time()
result = batch.predict(*sys.argv[1:], threads=1, verbose=False)
assert not result.errors
# Not ru_maxrss, which starts with the size of the process that started this one.
lines = Path("/proc/self/status").read_text().splitlines()
peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
print(json.dumps({"MB": round(peak / 1024), "seconds": round(time.process_time() - started, 1)}))
"""


def _write_many(source: Path, data: bytes, count: int, kind: str) -> None:
    if kind == "folder":
        source.mkdir()
        for i in range(count):
            (source / f"{i}.jpg").write_bytes(data)
        return
    source.mkdir()
    for first in range(0, count, 10_000):
        with tarfile.open(source / f"{first:07d}.tar", "w") as archive:
            for i in range(first, min(first + 10_000, count)):
                info = tarfile.TarInfo(f"{i:07d}.jpg")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("speed", "decode", "memory"))
    parser.add_argument("--data", type=Path, default=os.environ.get("MIV_DATA"))
    parser.add_argument("--count", type=int, default=100, help="images")
    parser.add_argument("--models", type=Path, nargs="+", help="instead of fitting one")
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.what == "memory":
        found = memory(args.rows)
    elif args.data is None:
        parser.error("--data, or the variable MIV_DATA, must name a folder of image sets")
    else:
        data = Path(args.data)
        decodes = args.what == "decode"
        found = decode(data, args.count) if decodes else speed(data, args.count, args.models)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    print(f"peak of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024} MB")


if __name__ == "__main__":
    main()
