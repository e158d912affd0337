"""The service under load: real HTTP over loopback, against the backbone alone in the same run.

    python benchmarks/serve.py DATA [--seconds 10] [--rounds 3] [--json service.json]

DATA is a folder with one folder per class. `miv serve` serves a model of 10 classes and 5 shots in
a process of its own, with one thread for the backbone. 1, 8 and 64 clients send one image per
request, one request after the other, in turns with the backbone alone, which gets the same images
decoded and resized, in batches of as many images, at most 32. Takes about three minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mivhead import FewShotClassifier
from mivhead._util.threads import set_threads
from mivhead.backbones import load_backbone
from mivhead.backbones.base import to_picture
from mivhead.images.decoding import load_image

CLASSES, SHOTS, QUERIES = 10, 5, 200
CLIENTS = (1, 8, 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--seconds", type=float, default=10, help="per measurement and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    set_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model, exported, queries = prepare(args.data, Path(folder))
        facts: dict[str, Any] = {"images": len(queries)}
        facts["start"] = {
            "model file": start_seconds(model),
            "exported model": start_seconds(exported) if exported else None,
        }
        print("start-up, seconds until /readyz answers:", facts["start"], flush=True)
        facts["load"] = under_load(model, queries, args)
        if exported:
            print("the exported model:")
            facts["exported load"] = under_load(exported, queries, args)
    if args.json:
        args.json.write_text(json.dumps(facts, indent=2) + "\n")


def prepare(data: Path, folder: Path) -> tuple[Path, Path | None, list[bytes]]:
    """Train a model, export it, and read other images."""
    rng = random.Random(0)
    classes = sorted(p for p in data.iterdir() if p.is_dir())[:CLASSES]
    files = {each.name: sorted(p for p in each.iterdir() if p.is_file()) for each in classes}
    for each in files.values():
        rng.shuffle(each)
    shots = [(path, name) for name, paths in files.items() for path in paths[:SHOTS]]
    rest = [path for paths in files.values() for path in paths[SHOTS:]]
    classifier = FewShotClassifier(verbose=False, cache=False)
    classifier.fit([path for path, _ in shots], [name for _, name in shots])
    classifier.save(folder / "model.miv")
    exported = None
    try:
        from mivhead.export.model import export_model

        export_model(classifier, folder / "model.onnx")
        exported = folder / "model.onnx"
    except (ImportError, RuntimeError) as error:
        print(f"not exported: {error}")
    chosen = rng.sample(rest, min(QUERIES, len(rest)))
    return folder / "model.miv", exported, [path.read_bytes() for path in chosen]


@contextmanager
def served(model: Path, *options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run `miv serve`; gives its address and process."""
    command = [sys.executable, "-m", "mivhead", "serve", str(model), "--port", "0", "--json"]
    command += ["--threads", "1", "--quiet", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            lines: list[str] = []
            while not lines or lines[-1] != "}\n":
                lines.append(process.stdout.readline())  # type: ignore[union-attr]
                if not lines[-1]:
                    raise SystemExit("the service did not start")
            yield json.loads("".join(lines))["url"], process
        finally:
            process.terminate()
            process.wait()


def start_seconds(model: Path) -> float:
    start = time.perf_counter()
    with served(model) as (url, _):
        asyncio.run(Client(url).ask(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n"))
        return round(time.perf_counter() - start, 2)


def under_load(model: Path, queries: list[bytes], args: argparse.Namespace) -> dict[str, Any]:
    """Measure numbers of clients in turns with the backbone alone."""
    backbone = load_backbone("efficientnet_lite0", device="cpu")
    size = backbone.preset.preprocessing.size
    pictures = [to_picture(load_image(each), 0, size) for each in queries]
    rates: dict[int, list[float]] = {count: [] for count in CLIENTS}
    alone: dict[int, list[float]] = {count: [] for count in CLIENTS}
    seconds: dict[int, list[float]] = {count: [] for count in CLIENTS}
    with served(model) as (url, _):
        asyncio.run(load(url, queries, 8, 2))  # warm
        for _ in range(args.rounds):
            for count in CLIENTS:
                alone[count].append(backbone_rate(backbone, pictures, count, args.seconds / 2))
                found = asyncio.run(load(url, queries, count, args.seconds))
                rates[count].append(found.rate)
                seconds[count] += found.seconds
                alone[count].append(backbone_rate(backbone, pictures, count, args.seconds / 2))
    rows = {}
    for count in CLIENTS:
        ratios = [
            rate / statistics.mean(alone[count][2 * i : 2 * i + 2])
            for i, rate in enumerate(rates[count])
        ]
        times = sorted(seconds[count])
        rows[str(count)] = {
            "images per second": round(statistics.median(rates[count]), 1),
            "backbone alone": round(statistics.median(alone[count]), 1),
            "ratio": round(statistics.median(ratios), 2),
            "median ms": round(1000 * times[len(times) // 2]),
            "p99 ms": round(1000 * times[int(0.99 * (len(times) - 1))]),
            "requests": len(times),
        }
        print(f"{count} clients:", json.dumps(rows[str(count)]), flush=True)
    return rows


def backbone_rate(backbone: Any, pictures: list[Any], count: int, seconds: float) -> float:
    """Images per second of the backbone alone."""
    batch = min(count, 32)
    start = time.perf_counter()
    done = 0
    while time.perf_counter() - start < seconds:
        first = done % max(1, len(pictures) - batch + 1)
        backbone.extract(pictures[first : first + batch])
        done += batch
    return done / (time.perf_counter() - start)


# Clients, as light as possible: they share the processor with the service.


@dataclass
class Found:
    """What clients saw."""

    duration: float = 0.0
    codes: Counter[int] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Images per second."""
        return self.codes[200] / self.duration


class Client:
    """One connection."""

    def __init__(self, url: str) -> None:
        self._host, self._port = urlsplit(url).hostname, urlsplit(url).port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, request: bytes) -> int:
        """Send a request and return the status of the answer."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port)
        reader, writer = self._streams
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length:")[2].partition("\r\n")[0])
        await reader.readexactly(length)
        return int(head.split()[1])

    def close(self) -> None:
        """Close the connection."""
        if self._streams is not None:
            self._streams[1].close()


def predict(image: bytes) -> bytes:
    return (
        b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/octet-stream"
        b"\r\nContent-Length: %d\r\n\r\n%s" % (len(image), image)
    )


async def load(url: str, queries: list[bytes], count: int, seconds: float) -> Found:
    """Let clients send one request after the other."""
    found = Found()
    requests = [predict(each) for each in queries]
    end = time.perf_counter() + seconds

    async def run(number: int) -> None:
        client = Client(url)
        i = number
        while time.perf_counter() < end:
            start = time.perf_counter()
            code = await client.ask(requests[i % len(requests)])
            found.codes[code] += 1
            found.seconds.append(time.perf_counter() - start)
            i += count
        client.close()

    start = time.perf_counter()
    await asyncio.gather(*(run(number) for number in range(count)))
    found.duration = time.perf_counter() - start
    return found


if __name__ == "__main__":
    main()
