"""The tests that SECURITY.md and the tables of attacks name are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", ["SECURITY.md", "docs/research-log.md"])
def test_named_tests_and_cases_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    files = set(re.findall(r"`(tests/[\w/.]+)`", text))
    assert files
    assert not [name for name in files if not (ROOT / name).exists()]
    cases = (ROOT / "tests/chaos/cases.py").read_text(encoding="utf-8")
    named = set(re.findall(r"the case \*([^*]+)\*", text))
    assert not [name for name in named if f'Case("{name}"' not in cases]
