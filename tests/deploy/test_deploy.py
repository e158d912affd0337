"""The files in deploy/: linted, and the same command and port as the service's."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mivhead import FewShotClassifier
from mivhead.cli.main import build_parser
from mivhead.cli.serving import DEFAULT_PORT
from tests.conftest import write_images
from tests.helpers.extras import needs

DEPLOY = Path(__file__).parents[2] / "deploy"
WORKFLOWS = DEPLOY.parent / ".github" / "workflows"


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("hadolint", ["Dockerfile"]),
        ("yamllint", ["-d", "{extends: default, rules: {line-length: disable}}", "compose.yaml"]),
    ],
)
def test_linters_find_nothing(tool: str, arguments: list[str]) -> None:
    found = shutil.which(
        tool, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    )
    if found is None:
        pytest.skip(f"{tool} is not installed")
    done = subprocess.run([found, *arguments], cwd=DEPLOY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_container_runs_the_command_that_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    entry = json.loads(re.search(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)[1])  # type: ignore[index]
    args = build_parser().parse_args([*entry[1:], "/models/birds.miv"])
    assert (args.host, args.key, args.port) == ("0.0.0.0", "MIV_KEY", DEFAULT_PORT)
    assert f"EXPOSE {DEFAULT_PORT}" in text
    assert f"127.0.0.1:{DEFAULT_PORT}:{DEFAULT_PORT}" in (DEPLOY / "compose.yaml").read_text()
    copied = re.search(r"^COPY (pyproject.*) \./$", text, re.MULTILINE)[1].split()  # type: ignore[index]
    assert all((DEPLOY.parent / name).exists() for name in copied)


@pytest.mark.parametrize("path", sorted(WORKFLOWS.glob("*.yml")), ids=lambda path: path.stem)
def test_workflows_pin_actions_and_may_only_read(path: Path) -> None:
    text = path.read_text()
    used = re.findall(r"uses: *(.+)", text)
    for action in used:
        pinned = re.fullmatch(r"[\w./-]+@[0-9a-f]{40}  # v[\d.]+", action)
        assert pinned or action.startswith("./.github/workflows/"), action
    assert "\npermissions:\n  contents: read\n" in text


RAY = """
import json, sys
import httpx, ray
from ray import serve
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[2])})
import ray_serve
serve.run(ray_serve.app)
url = f"http://127.0.0.1:{sys.argv[2]}"
files = {"images": open(sys.argv[1], "rb")}
answer = httpx.post(f"{url}/v1/predict", files=files, timeout=60).json()
label = answer["predictions"][0]["label"]
models = httpx.get(f"{url}/readyz").json()["models"]
code = httpx.post(f"{url}/v1/predict", content=b"x").status_code
print("found:", json.dumps([label, models, code]))
serve.shutdown()
"""


@pytest.mark.slow
@needs("ray")
@needs("httpx", "serve")
def test_ray_serve(tmp_path: Path) -> None:
    pytest.importorskip("ray.serve")
    import socket

    shots = write_images(tmp_path / "shots", 3)
    model = tmp_path / "colours.miv"
    FewShotClassifier(threshold=0, recipe="paper", verbose=False).fit_folder(shots).save(model)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    path = os.pathsep.join([str(DEPLOY), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "MIV_MODELS": str(model), "PYTHONPATH": path}
    command = [sys.executable, "-W", "ignore", "-c", RAY, str(shots / "red/0.png"), str(port)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=400, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (found,) = (line for line in done.stdout.splitlines() if line.startswith("found: "))
    assert json.loads(found.removeprefix("found: ")) == ["red", ["colours"], 415]
