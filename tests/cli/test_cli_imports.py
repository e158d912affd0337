"""What the commands do not import: a heavy library takes longer than the work on a few images."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# timm and torchvision bring PyTorch's compiler, that and some calls bring sympy, scikit-learn
# brings SciPy's statistics: seconds that nothing needs.
HEAVY = (
    "matplotlib",
    "onnxruntime",
    "scipy.stats._stats_py",
    "sympy",
    "timm",
    "torch._dynamo",
    "torchvision",
)
LISTING = (*HEAVY, "PIL", "numpy", "scipy", "sklearn", "torch")

RUN = """
import json, sys
from mivhead.cli.main import begin
from mivhead.cli.main import main
begin()
code = main(sys.argv[1:])
print(json.dumps([code, sorted(sys.modules)]), file=sys.stderr)
"""


def imported(*arguments: str | Path) -> set[str]:
    """Modules that are in memory after a command, which must succeed."""
    command = [sys.executable, "-c", RUN, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    code, names = json.loads(done.stderr.splitlines()[-1])
    assert code == 0, done.stderr
    return set(names)


def test_fit_and_predict_with_the_default_backbone(
    shots: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIV_CACHE", str(tmp_path / "cache"))
    model = tmp_path / "model.miv"
    # Views are made and pass the backbone; few steps, as training imports nothing by itself.
    few = ("--threshold", "3", "--param", "steps=1", "--no-check", "--quiet")
    found = imported("fit", shots, "-o", model, *few)
    entries = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert len(entries) == 9 + 9  # images and views passed the backbone
    assert not found.intersection(HEAVY)
    images = sorted(shots.rglob("*.png"))[:2]
    assert not imported("predict", model, *images).intersection(HEAVY)


def test_lists_import_no_library() -> None:
    assert not imported("methods").intersection(LISTING)
    assert not imported("backbones", "list").intersection(LISTING)
