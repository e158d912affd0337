"""An exported model is served without PyTorch."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mivhead import FewShotClassifier
from tests.conftest import write_images

pytest.importorskip("starlette")
pytest.importorskip("httpx")
pytest.importorskip("onnxscript")
from tests.helpers.web import web

SCRIPT = """
import sys
sys.path.insert(0, {root!r})
from tests.helpers.extras import block
block("torch", "sklearn", "scipy")
from mivhead.cli.main import main
sys.exit(main(["serve", {model!r}, "--port", "0", "--json", "--quiet"]))
"""


def test_an_exported_model_is_served_without_torch(tmp_path: Path) -> None:
    from mivhead.export.model import export_model

    shots = write_images(tmp_path / "shots", 3)
    classifier = FewShotClassifier(threshold=0, verbose=False).fit_folder(shots)
    export_model(classifier, tmp_path / "colours.onnx")
    root = str(Path(__file__).parents[2])
    script = SCRIPT.format(root=root, model=str(tmp_path / "colours.onnx"))
    command = [sys.executable, "-c", script]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            lines: list[str] = []
            while not lines or lines[-1] != "}\n":
                lines.append(process.stdout.readline())  # type: ignore[union-attr]
                assert lines[-1], process.stderr.read()  # type: ignore[union-attr]
            url = json.loads("".join(lines))["url"]
            files = sorted(shots.glob("*/*.png"))
            sent = [("images", (path.name, path.read_bytes())) for path in files]
            response = web.post(f"{url}/v1/predict", files=sent)
            assert response.status_code == 200, response.text
            found = response.json()["predictions"]
            expected = classifier.classify(files)
            for ours, theirs in zip(found, expected, strict=True):
                assert ours["label"] == theirs.label
                assert ours["probability"] == pytest.approx(theirs.probability, abs=1e-3)
            model = web.get(f"{url}/v1/models/colours").json()
            assert model["shots"] == {"blue": 3, "green": 3, "red": 3}
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=20) == 0
        finally:
            process.kill()
