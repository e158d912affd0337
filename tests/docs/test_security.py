"""The tests that SECURITY.md names are there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_named_tests_exist() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    files = set(re.findall(r"`(tests/[\w/.]+)`", text))
    assert files
    assert not [name for name in files if not (ROOT / name).exists()]
