"""Damaged and forged files: every one of them is refused, or says the same as before."""

from __future__ import annotations

import copy
import csv
import io
import json
import os
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from safetensors.numpy import save_file

import mivhead
from mivhead import Features
from mivhead._util import files as safefile
from mivhead.benchmark.results import read_results, read_run_config, read_weights
from mivhead.benchmark.runner import Place, run
from mivhead.benchmark.tasks import TaskSet
from mivhead.errors import MivError
from mivhead.extraction.cache import FeatureCache
from mivhead.features import FeatureTable
from mivhead.images.decoding import load_image
from mivhead.images.sources import open_labelled, open_unlabelled
from mivhead.methods import make_method
from tests.chaos.campaign import Trial
from tests.conftest import write_images
from tests.helpers.bench_data import config, write_sets
from tests.helpers.tiny_backbone import TinyBackbone
from tests.service.conftest import train

METHODS = ("miv", "miv-paper", "ncc", "svm", "knn", "fit-qda", "ridge", "tip-adapter")


def damage(data: bytes, rng: np.random.Generator, other: bytes = b"") -> bytes:
    """Damage bytes as disks, networks and people do; the result differs from the original."""
    kind = rng.integers(7)
    start, end = sorted(rng.integers(0, len(data) + 1, 2))
    found = bytearray(data)
    if kind == 0:  # single bits
        for place in rng.integers(0, len(data), rng.integers(1, 4)):
            found[place] ^= 1 << rng.integers(8)
    elif kind == 1:  # bytes
        for place in rng.integers(0, len(data), rng.integers(1, 9)):
            found[place] = rng.integers(256)
    elif kind == 2:
        found = found[:start]
    elif kind == 3:  # a lost block
        del found[start:end]
    elif kind == 4:  # a block of zeros
        found[start:end] = bytes(end - start)
    elif kind == 5:  # a block from elsewhere
        source = other or data
        found[start:end] = source[len(source) - (end - start) :]
    else:  # noise in between
        found[start:start] = rng.bytes(rng.integers(1, 64))
    return bytes(found) if bytes(found) != data else damage(data, rng, other)


def small_features() -> tuple[Features, np.ndarray]:
    rng = np.random.default_rng(0)
    maps = rng.normal(size=(6, 4, 3, 3)).astype(np.float16)
    tokens = rng.normal(size=(6, 8)).astype(np.float16)
    return Features([maps, {"token": tokens}]), np.array(["a", "b", "b", "c", "d", "d"])


@contextmanager
def model_files(folder: Path) -> Iterator[Trial]:
    """Damaged model files of several methods, in-process."""
    X, y = small_features()
    path = folder / "model.miv"
    originals = []
    for name in METHODS:
        mivhead.save(make_method(name, random_state=0).fit(X, y), path)
        originals.append((path.read_bytes(), mivhead.load(path).predict_proba(X)))
    contents = [content for content, _ in originals]
    file = path.open("rb+", buffering=0)  # kept open: opening it takes longer than writing

    def trial(rng: np.random.Generator) -> str:
        content = contents[rng.integers(len(contents))]
        damaged = damage(content, rng, contents[rng.integers(len(contents))])
        os.pwrite(file.fileno(), damaged, 0)
        file.truncate(len(damaged))
        try:
            model = mivhead.load(path)
        except MivError:
            return "refused"
        found = model.predict_proba(X)  # a change that means nothing, such as of padding
        assert any(np.array_equal(found, known) for _, known in originals), "damage went unnoticed"
        return "same model"

    with file:
        yield trial


NASTY: tuple[Any, ...] = (
    *(None, True, 0, -1, 1, 2**31, 2**63, 10**400, 1e308, 1e-320, 0.5, float("inf"), float("nan")),
    *("", "\ud800", "a" * 300, "../x", "os:system", "subprocess:Popen", "miv", "block0.map"),
    *([], {}, [[]], [None], {"a": 1}, [1] * 50, ["a", "b"], [10**400, 1, 2, 3], [0, 0, 0, 0]),
    *([1, 2, 2, 1], [4, 3, 3], [2**20] * 3, [3] * 9, [["x"] * 2] * 2),
)
KEYS = ("x", "shots.v1", "decision.v1", "history.v1", "layout", "params", "scale", "block9.map")
TYPES = (np.float16, np.float32, np.float64, np.int64, np.uint8, np.bool_)


@contextmanager
def forged_models(folder: Path) -> Iterator[Trial]:
    """Well-formed files with wrong contents: any value in the JSON, any tensor."""
    X, y = small_features()
    path = folder / "model.miv"
    bases = []
    for name in METHODS:
        mivhead.save(make_method(name, random_state=0).fit(X, y), path)
        bases.append(safefile.read(path))
    train().save(path)  # with shots, decisions and a history
    bases.append(safefile.read(path))

    def trial(rng: np.random.Generator) -> str:
        tensors, document = bases[rng.integers(len(bases))]
        changed = _forge_document(document, rng) if rng.random() < 0.7 else document
        with np.errstate(all="ignore"):  # numbers that another type cannot hold
            forged = _forge_tensors(tensors, rng)
        save_file(forged, path, metadata={"mivhead": json.dumps(changed)})
        try:
            model = mivhead.load(path)
            probabilities = model.predict_proba(X)
        except MivError:
            return "refused"
        assert np.isfinite(probabilities).all()
        np.testing.assert_allclose(probabilities.sum(axis=1), 1, atol=1e-6)
        return "valid"

    yield trial


def _places(node: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        yield (*above, key)
        if isinstance(value, dict | list):
            yield from _places(value, (*above, key))


def _forge_document(document: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    document = copy.deepcopy(document)
    for _ in range(rng.integers(1, 4)):
        places = list(_places(document))
        if not places:
            break
        *above, key = places[rng.integers(len(places))]
        node = document
        for each in above:
            node = node[each]
        value = copy.deepcopy(NASTY[rng.integers(len(NASTY))])
        kind = rng.random()
        if kind < 0.7:
            node[key] = value
        elif kind < 0.85:
            del node[key]
        elif isinstance(node, dict):
            node[KEYS[rng.integers(len(KEYS))]] = value
        else:
            node.insert(0, value)
    return document


def _forge_tensors(
    tensors: Mapping[str, np.ndarray], rng: np.random.Generator
) -> dict[str, np.ndarray]:
    tensors = dict(tensors)
    for _ in range(rng.integers(0, 3)):
        name = list(tensors)[rng.integers(len(tensors))]
        tensor = tensors[name]
        kind = rng.integers(5)
        if kind == 0 and len(tensors) > 1:
            del tensors[name]
        elif kind == 1:
            tensors[f"{name}.x"] = np.zeros(rng.integers(0, 5, rng.integers(0, 4)), np.float32)
        elif kind == 2:
            tensors[name] = tensor.astype(TYPES[rng.integers(len(TYPES))])
        elif kind == 3:
            tensors[name] = tensor.reshape(-1)[: rng.integers(tensor.size + 1)]
        elif tensor.dtype.kind == "f":
            tensors[name] = tensor * float(rng.choice([1e4, 1e20, 3e38, 1e-30, 0, np.nan]))
    return {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}


FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF", "PPM")


@contextmanager
def images(_folder: Path) -> Iterator[Trial]:
    """Damaged images of every format."""
    rng = np.random.default_rng(0)
    originals = []
    for mode in ("RGB", "L", "RGBA", "CMYK", "P", "I;16"):
        array = rng.integers(0, 255, (24, 32, 4), np.uint8)
        picture = Image.fromarray(array).convert("L" if mode == "I;16" else mode)
        if mode == "I;16":
            picture = Image.fromarray(array[..., 0].astype(np.uint16) * 200)
        for kind in FORMATS:
            file = io.BytesIO()
            try:
                picture.save(file, kind)
            except (OSError, ValueError):  # formats that cannot hold this mode
                continue
            originals.append(file.getvalue())

    def trial(rng: np.random.Generator) -> str:
        content = originals[rng.integers(len(originals))]
        other = originals[rng.integers(len(originals))]
        try:
            picture = load_image(damage(content, rng, other), name="damaged")
        except MivError:
            return "refused"
        assert picture.mode == "RGB"
        return "decoded"

    yield trial


@contextmanager
def archives(folder: Path) -> Iterator[Trial]:
    """Damaged and hostile zips of class folders."""
    shots = write_images(folder / "shots", 2)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(shots.rglob("*.png")):
            archive.write(path, path.relative_to(shots).as_posix())
    content, target = file.getvalue(), folder / "shots.zip"

    def trial(rng: np.random.Generator) -> str:
        target.write_bytes(damage(content, rng))
        loaded = 0
        try:
            for source in open_labelled(target, min_classes=1).sources:
                assert source.load().mode == "RGB"
                loaded += 1
        except MivError:
            return "refused" if not loaded else "refused in part"
        return "read"

    yield trial


@contextmanager
def tables(folder: Path) -> Iterator[Trial]:
    """Damaged CSVs of paths and labels."""
    shots = write_images(folder, 2)
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["path", "label"])
    for path in sorted(shots.rglob("*.png")):
        writer.writerow([path.relative_to(folder).as_posix(), path.parent.name])
    content, target = text.getvalue().encode(), folder / "shots.csv"

    def trial(rng: np.random.Generator) -> str:
        target.write_bytes(damage(content, rng))
        try:
            open_labelled(target, min_classes=1).sources[0].load()
        except MivError:
            return "refused"
        return "read"

    yield trial


@contextmanager
def features_files(folder: Path) -> Iterator[Trial]:
    """Damaged files of `miv extract`."""
    X, y = small_features()
    path = folder / "features.safetensors"
    table = FeatureTable(X, tuple("123456"), tuple(y), X, np.arange(6), None)
    table.save(path)
    content = path.read_bytes()

    def trial(rng: np.random.Generator) -> str:
        path.write_bytes(damage(content, rng))
        try:
            found = FeatureTable.load(path)
        except MivError:
            return "refused"
        assert found.features == X, "damage went unnoticed"
        assert found.labels == tuple(y), "damage went unnoticed"
        return "same features"

    yield trial


@contextmanager
def cache_entries(folder: Path) -> Iterator[Trial]:
    """Damaged entries of the feature cache."""
    cache = FeatureCache(folder / "cache")
    parts = {"block0.map": np.random.default_rng(0).normal(size=(8, 7, 7)).astype(np.float16)}
    key = "ab" * 32
    cache.put(key, parts)
    path = folder / "cache" / key[:2] / key[2:]
    content = path.read_bytes()

    def trial(rng: np.random.Generator) -> str:
        path.write_bytes(damage(content, rng))
        assert cache.get(key) is None, "damage went unnoticed"
        assert not path.exists()
        return "missing"

    yield trial


@contextmanager
def journals(folder: Path) -> Iterator[Trial]:
    """Damaged results, configurations and tasks of a benchmark."""
    data = write_sets(folder / "data")
    place = Place(folder / "run", data)
    run(config(methods=["ncc"]), place, None, backbones={"tiny": TinyBackbone()})
    names = ["results.jsonl", "config.json", "seconds.json", "weights.json"]
    files = [place.folder / name for name in names if (place.folder / name).exists()]
    files += sorted(place.folder.glob("tasks/*/*.json"))
    contents = {path: path.read_bytes() for path in files}

    def trial(rng: np.random.Generator) -> str:
        path = files[rng.integers(len(files))]
        path.write_bytes(damage(contents[path], rng))
        try:
            read_results(place.folder)
            read_run_config(place.folder)
            read_weights(place.folder)
            if path.parent.parent.name == "tasks":
                TaskSet.load(path)
        except MivError:
            return "refused"
        finally:
            path.write_bytes(contents[path])
        return "read"

    yield trial


@contextmanager
def extreme_numbers(_folder: Path) -> Iterator[Trial]:
    """Features of any scale, shape and degeneracy: a finite answer, or an error."""

    def trial(rng: np.random.Generator) -> str:
        n, channels, side = rng.integers(2, 9), rng.integers(1, 9), rng.integers(1, 4)
        dtype = [np.float16, np.float32, np.float64][rng.integers(3)]
        scale = 10.0 ** rng.uniform(-320, 308)
        with np.errstate(all="ignore"):
            X = (rng.normal(size=(2 * n, channels, side, side)) * scale).astype(dtype)
            X[rng.random(X.shape) < 0.2] = 0
            if rng.random() < 0.1:
                X.flat[rng.integers(X.size)] = rng.choice([np.nan, np.inf, -np.inf])
            Q = (X * 10.0 ** rng.choice([0, 0, 0, 10, 100])).astype(dtype)
        y = np.arange(2 * n) % rng.integers(2, 4)
        name = METHODS[rng.integers(len(METHODS))]
        try:
            classifier = make_method(name, random_state=0).fit([X], y)
            probabilities = classifier.predict_proba([Q])
        except MivError:
            return "refused"
        assert np.isfinite(probabilities).all(), (name, scale)
        np.testing.assert_allclose(probabilities.sum(axis=1), 1, atol=1e-6)
        return "finite"

    yield trial


@contextmanager
def folders(folder: Path) -> Iterator[Trial]:
    """Folders with random links, names and depths."""

    def trial(rng: np.random.Generator) -> str:
        root = folder / "root"
        shutil.rmtree(root, ignore_errors=True)
        made = [root]
        root.mkdir()
        for number in range(rng.integers(1, 12)):
            parent = made[rng.integers(len(made))]
            made.append(parent / f"{number}")
            made[-1].mkdir()
            (made[-1] / "1.png").write_bytes(b"x")
        for number in range(rng.integers(0, 30)):
            link = made[rng.integers(len(made))] / f"to{number}"
            link.symlink_to(made[rng.integers(len(made))])
        found = open_unlabelled(root)
        assert len(found) == len(made) - 1  # every real folder once
        return "listed"

    yield trial
