"""Memory under hostile images: eight requests of 64 megapixels at the same time, and a soak."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from tests.conftest import write_images

pytest.importorskip("starlette")
pytest.importorskip("httpx")
from mivhead import FewShotClassifier
from tests.helpers.web import web

SIDE = 8192  # 64 megapixels, the largest that is decoded
DECODED = 4 * SIDE * SIDE / 2**20  # megabytes, as Pillow stores a picture

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc"),
]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str, Path]]:
    shots = write_images(tmp_path / "shots", 3)
    model = tmp_path / "colours.miv"
    FewShotClassifier(threshold=0, recipe="paper", verbose=False).fit_folder(shots).save(model)
    command = [sys.executable, "-m", "mivhead", "serve", str(model), "--port", "0", "--json"]
    command += ["--quiet", "--threads", "1", "--deadline", "300"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            lines: list[str] = []
            while not lines or lines[-1] != "}\n":
                lines.append(process.stdout.readline())  # type: ignore[union-attr]
                assert lines[-1]
            yield process, json.loads("".join(lines))["url"], shots
        finally:
            process.kill()


def memory(process: subprocess.Popen[str], what: str) -> float:
    """Megabytes: VmRSS is the present size, VmHWM the largest."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.partition(f"{what}:")[2].split()[0]) / 1024


def test_large_pictures_are_decoded_one_at_a_time(
    server: tuple[subprocess.Popen[str], str, Path],
) -> None:
    process, url, shots = server
    photo = (shots / "red/0.png").read_bytes()
    web.post(f"{url}/v1/predict", files={"images": photo})
    before = memory(process, "VmHWM")
    file = io.BytesIO()
    Image.new("RGB", (SIDE, SIDE), "red").save(file, "PNG")
    codes: list[int] = []

    def ask() -> None:
        response = web.post(f"{url}/v1/predict", files={"images": file.getvalue()}, timeout=300)
        codes.append(response.status_code)

    clients = [threading.Thread(target=ask) for _ in range(8)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    assert codes == [200] * 8
    # Two copies while one picture is converted; all at once they would be sixteen.
    assert memory(process, "VmHWM") - before < 3 * DECODED


def test_memory_is_flat(server: tuple[subprocess.Popen[str], str, Path]) -> None:
    process, url, shots = server
    files = [("images", path.read_bytes()) for path in sorted(shots.glob("*/*.png"))]

    def ask(times: int) -> float:
        for _ in range(times):
            assert web.post(f"{url}/v1/predict", files=files).status_code == 200
        return memory(process, "VmRSS")

    early = ask(20)
    assert ask(100) < 1.05 * early + 5
