"""A small exported model, images of its classes, and what it says about each of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import mivhead
from mivhead import FewShotClassifier, Preprocessing
from mivhead.backbones import from_module
from mivhead.export.model import export_model

pytest.importorskip("pyarrow", reason="the extra jobs is not installed")
pytest.importorskip("fsspec", reason="the extra jobs is not installed")
pytest.importorskip("onnxscript", reason="the extra bench is not installed")


def write_pictures(root: Path, count: int, seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)
    for name, low in (("dark", 0), ("light", 150)):
        (root / name).mkdir(parents=True)
        for i in range(count):
            pixels = rng.integers(low, low + 100, (40, 50, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{i}.png")
    return root


@pytest.fixture(scope="session")
def here(tmp_path_factory) -> Path:
    """A folder with `model.onnx`, `head.onnx` for features, and images in `new/`, two of them bad.

    Do not change it.
    """
    root = tmp_path_factory.mktemp("jobs")
    write_pictures(root / "new", 9)
    (root / "new" / "dark" / "empty.png").touch()
    (root / "new" / "light" / "text.jpg").write_text("not an image")
    (root / "new" / "notes.txt").write_text("not an image either")
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 8, 8), torch.nn.ReLU())
    backbone = from_module(network, ["1"], name="small", preprocessing=Preprocessing(size=32))
    model = FewShotClassifier(backbone, threshold=0).fit(root / "new", skip_bad=True)
    export_model(model, root / "model.onnx")
    export_model(model, root / "head.onnx", input="features")
    return root


@pytest.fixture(scope="session")
def expected(here) -> dict[str, float]:
    """Probability of the first class by path inside `new/`."""
    model = mivhead.load(here / "model.onnx")
    answers = {}
    for path in sorted((here / "new").rglob("*.png")):
        if path.stat().st_size:
            answers[path.relative_to(here / "new").as_posix()] = model.predict_proba(path)[0, 0]
    return answers
