"""The OpenAPI schema: complete, valid, and true."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mivhead.service.application import Service
from mivhead.service.engine import ModelLoader, Models
from mivhead.service.middleware import Limits, Metrics
from tests.helpers.services import toy
from tests.helpers.web import web


def test_every_route_and_method_is_described(url: str, model_file: Path) -> None:
    service = Service(Models([model_file], load=ModelLoader(backbone=toy())), Limits(), Metrics())
    service.engine.close()
    served = {(r.path, method) for r in service.routes for method in r.methods or () if r.methods}
    paths = web.get(f"{url}/openapi.json").json()["paths"]
    described = {(path, method.upper()) for path, methods in paths.items() for method in methods}
    assert {pair for pair in served if pair[1] != "HEAD"} == described


@pytest.mark.slow
def test_schemathesis_finds_no_lie(url: str, tmp_path: Path) -> None:
    """Hundreds of requests made from the schema, valid ones and others: all answers fit it."""
    pytest.importorskip("schemathesis")
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json"),
        *("--checks", "all", "--max-examples", "25", "--seed", "1"),
        *("--exclude-checks", "positive_data_acceptance"),  # a valid string need not be an image
        *("--generation-database", "none", "--suppress-health-check", "all"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
