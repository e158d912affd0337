"""The OpenAPI schema: complete, valid, and true."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.services import serving, toy

pytest.importorskip("starlette")
pytest.importorskip("httpx")
from starlette.routing import Route

from mivhead.service.application import Service, create_app
from mivhead.service.models import ModelLoader, Models
from mivhead.service.observation import Metrics
from mivhead.service.openapi import openapi
from mivhead.service.protection import ApiKeys, Limits
from mivhead.service.server import Server
from tests.helpers.web import web

KEY = "correct-horse"


def test_every_route_and_method_is_described(model_file: Path) -> None:
    models = Models([model_file], load=ModelLoader(backbone=toy()))
    service = Service(models, Limits(), Metrics(), toy(), allow_changes=True)
    routes = [route for route in service.routes if isinstance(route, Route)]
    schema = openapi([route.path for route in routes], Limits())
    described = {
        (path, method.upper()) for path, methods in schema["paths"].items() for method in methods
    }
    served = {
        (route.path.replace(":path}", "}"), method)
        for route in routes
        for method in (route.methods or ()) - {"HEAD"}
    }
    service.engine.close()
    assert served == described
    assert json.loads(json.dumps(schema)) == schema


def test_a_service_describes_what_it_has(url: str) -> None:
    paths = web.get(f"{url}/openapi.json").json()["paths"]
    assert "/v1/predict" in paths
    assert "/v1/features" not in paths  # no backbone
    assert "/v1/models/{name}/shots" not in paths  # no changes


@pytest.fixture
def changing(model_file: Path, tmp_path: Path) -> Iterator[str]:
    """A service that has everything."""
    (tmp_path / "birds.miv").write_bytes(model_file.read_bytes())
    app = create_app(
        [tmp_path / "birds.miv"],
        load=ModelLoader(backbone=toy()),
        backbone=toy(),
        keys=ApiKeys([KEY]),
        allow_changes=True,
        reload_seconds=None,
    )
    with serving(Server(app, port=0)) as address:
        yield address


@pytest.mark.slow
def test_schemathesis_finds_no_lie(changing: str, tmp_path: Path) -> None:
    """Thousands of requests made from the schema, valid ones and others: all answers fit it."""
    pytest.importorskip("schemathesis")
    command = [
        sys.executable,
        "-m",
        "schemathesis.cli",
        "run",
        f"{changing}/openapi.json",
        *("--header", f"Authorization: Bearer {KEY}"),
        *("--checks", "all", "--max-examples", "25", "--seed", "1"),
        *("--exclude-checks", "positive_data_acceptance"),  # a valid string need not be an image
        *("--generation-database", "none", "--suppress-health-check", "all"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert web.get(f"{changing}/healthz").status_code == 200
