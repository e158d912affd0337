"""Metrics of models: drift, and the accuracy that the shots suggest; lines of the log."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mivhead import FewShotClassifier
from tests.helpers.services import serving, toy
from tests.service.conftest import photo

pytest.importorskip("starlette")
pytest.importorskip("httpx")
from mivhead.service.application import create_app
from mivhead.service.models import ModelLoader
from mivhead.service.observation import JsonFormatter, Metrics, ks_distance
from mivhead.service.server import Server
from tests.helpers.web import web

floats = st.lists(st.floats(-100, 100), min_size=1, max_size=30)


@given(floats, floats)
def test_distance_of_distributions(first: list[float], second: list[float]) -> None:
    def share(values: list[float], limit: float) -> float:
        return sum(value <= limit for value in values) / len(values)

    expected = max(abs(share(first, v) - share(second, v)) for v in first + second)
    assert ks_distance(first, second) == pytest.approx(expected)
    assert ks_distance(first, first) == 0


def test_drift_needs_images_and_starts_again_with_another_version() -> None:
    metrics = Metrics()
    rng = np.random.default_rng(0)
    shots = rng.normal(0, 1, 40).tolist()

    def drift() -> float | None:
        lines = [line for line in metrics.text().decode().splitlines() if "miv_drift{" in line]
        return float(lines[0].split()[1]) if lines else None

    metrics.watch_drift("birds", "1", shots, [0.0] * 5)
    assert drift() is None
    metrics.watch_drift("birds", "1", shots, rng.normal(0, 1, 400))
    assert (drift() or 0) < 0.3
    metrics.watch_drift("birds", "1", shots, rng.normal(5, 1, 500))  # the window holds 500
    assert (drift() or 0) > 0.9
    metrics.watch_drift("birds", "2", shots, rng.normal(0, 1, 400))
    assert (drift() or 0) < 0.3


def test_a_model_tells_what_accuracy_its_shots_suggest(tmp_path: Path) -> None:
    shots = [(name, i) for name in ("red", "green", "blue") for i in range(5)]
    images = [Image.open(io.BytesIO(photo(name, i))) for name, i in shots]
    model = FewShotClassifier(toy(), threshold=0, verbose=False)
    model.fit(images, [name for name, _ in shots]).save(tmp_path / "unchecked.miv")
    check = model.check()
    model.save(tmp_path / "colours.miv")
    files = [tmp_path / "colours.miv", tmp_path / "unchecked.miv"]
    app = create_app(files, load=ModelLoader(backbone=toy()))
    with serving(Server(app, port=0)) as url:
        assert web.get(f"{url}/v1/models/unchecked").json()["estimate"] is None
        estimate = web.get(f"{url}/v1/models/colours").json()["estimate"]
        assert (estimate["accuracy"], estimate["shots"]) == (check.accuracy, 15)
        assert (estimate["low"], estimate["high"]) == check.interval
        for i in range(3):
            files = [("images", photo((250, 250, 250), 10 * i + k)) for k in range(10)]
            sent = web.post(f"{url}/v1/predict?model=colours", files=files)
            assert sent.status_code == 200
        metrics = web.get(f"{url}/metrics").text
    (line,) = [each for each in metrics.splitlines() if each.startswith("miv_drift{")]
    assert float(line.split()[1]) > 0.7  # white is unlike all shots
    assert 'decision="none of these"' in metrics


def test_lines_of_the_log_are_json_whatever_they_hold() -> None:
    record = logging.makeLogRecord(
        {"msg": 'a "quoted"\nline', "levelname": "INFO", "facts": {"path": "/\x1b[31m\n"}}
    )
    line = JsonFormatter().format(record)
    assert "\n" not in line
    assert "\x1b" not in line
    assert json.loads(line)["path"] == "/\x1b[31m\n"
