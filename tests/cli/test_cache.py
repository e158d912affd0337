"""`miv cache`."""

import json
from pathlib import Path

import numpy as np
import pytest

from mivhead.cli.main import main
from mivhead.extraction.cache import FeatureCache


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FeatureCache:
    monkeypatch.setenv("MIV_CACHE", str(tmp_path / "cache"))
    cache = FeatureCache(tmp_path / "cache")
    for i in range(3):
        cache.put(f"{i:064d}", {"block0.token": np.ones(4, np.float16)})
    return cache


def test_info_and_clear(cache: FeatureCache, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "info"]) == 0
    printed = capsys.readouterr().out
    assert printed == f"{cache.folder}: features of 3 images and views, 12.3 kB (limit 10.0 GB).\n"
    assert main(["cache", "info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts == {"folder": str(cache.folder), "entries": 3, "bytes": 12288, "limit": 10**10}
    assert main(["cache", "clear"]) == 0
    assert "Removed" in capsys.readouterr().out
    assert cache.info().entries == 0


def test_disabled(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MIV_CACHE", "off")
    for action in ("info", "clear"):
        assert main(["cache", action]) == 0
        assert "disabled" in capsys.readouterr().out
    assert main(["cache", "info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"folder": None}


def test_a_full_disk_does_not_stop_a_fit(
    shots: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("MIV_CACHE", str(tmp_path / "file" / "cache"))
    arguments = ["fit", str(shots), "-o", str(tmp_path / "m.miv"), "--no-augmentation"]
    assert main([*arguments, "--no-check"]) == 0
    assert len([r for r in caplog.records if "continuing without it" in r.message]) == 1
