"""`miv serve` as a process of its own: an exported model without PyTorch, and memory."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mivhead import FewShotClassifier
from tests.conftest import write_images
from tests.helpers.web import web
from tests.service.conftest import PATH

SIDE = 8192  # 64 megapixels, the largest that is decoded
DECODED = 4 * SIDE * SIDE / 2**20  # megabytes, as Pillow stores a picture
SCRIPT = """
import sys
sys.path.insert(0, {root!r})
from tests.helpers.extras import block
block("torch", "sklearn", "scipy")
from mivhead.cli.main import main
sys.exit(main(["serve", {model!r}, "--port", "0", "--json", "--quiet"]))
"""


@contextmanager
def serving(model: Path) -> Iterator[tuple[Any, str]]:
    script = SCRIPT.format(root=str(Path(__file__).parents[2]), model=str(model))
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            lines: list[str] = []
            while not lines or lines[-1] != "}\n":
                lines.append(process.stdout.readline())  # type: ignore[union-attr]
                assert lines[-1], "it did not start"
            yield process, json.loads("".join(lines))["url"]
        finally:
            process.kill()


def test_an_exported_model_is_served_without_torch(tmp_path: Path) -> None:
    shots = write_images(tmp_path / "shots", 3)
    model = FewShotClassifier(threshold=0, verbose=False).fit(shots)
    model.export(tmp_path / "colours.onnx")
    files = sorted(shots.glob("*/*.png"))
    with serving(tmp_path / "colours.onnx") as (process, url):
        sent = [("images", (path.name, path.read_bytes())) for path in files]
        rows = web.post(url + PATH, files=sent).json()["predictions"]
        for ours, theirs in zip(rows, model.classify(files), strict=True):
            assert ours["closest"] == theirs.label
            assert ours["probability"] == pytest.approx(theirs.probability, abs=1e-3)
        (facts,) = web.get(f"{url}/v1/models").json()["models"]
        assert facts["shots"] == {"blue": 3, "green": 3, "red": 3}
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0


def memory(process: Any, what: str) -> float:
    """Megabytes: VmRSS is the present size, VmHWM the largest."""
    status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
    return int(status.partition(f"{what}:")[2].split()[0]) / 1024


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_memory_stays_low_with_large_pictures_and_many_requests(tmp_path: Path) -> None:
    shots = write_images(tmp_path / "shots", 3)
    FewShotClassifier(recipe="paper", verbose=False).fit(shots).save(tmp_path / "colours.miv")
    files = [("images", path.read_bytes()) for path in sorted(shots.glob("*/*.png"))]
    large = io.BytesIO()
    Image.new("RGB", (SIDE, SIDE), "red").save(large, "PNG")
    with serving(tmp_path / "colours.miv") as (process, url):

        def ask(times: int) -> float:
            for _ in range(times):
                assert web.post(url + PATH, files=files).status_code == 200
            return memory(process, "VmRSS")

        early = ask(20)
        assert ask(100) < 1.05 * early + 5
        before = memory(process, "VmHWM")
        codes: list[int] = []

        def ask_large() -> None:
            sent = {"images": large.getvalue()}
            codes.append(web.post(url + PATH, files=sent, timeout=300).status_code)

        clients = [threading.Thread(target=ask_large) for _ in range(8)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        assert codes == [200] * 8
        # Two copies while one picture is converted; all at once they would be sixteen.
        assert memory(process, "VmHWM") - before < 3 * DECODED
