"""The beginning of the process: what is not imported is there all the same."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

# A distribution of SciPy's statistics, reached in every way there is.
USES = {
    "of the package": "import scipy\nnorm = scipy.stats.norm",
    "of the module": "import scipy.stats\nnorm = scipy.stats.norm",
    "by name": "from scipy.stats import norm",
    "from the package": "from scipy import stats\nnorm = stats.norm",
    "below it": "import scipy.stats._continuous_distns as d\nnorm = d.norm",
    "all names": "from scipy.stats import *",
}
BEGIN = """
import gc, inspect, sys
from mivhead.cli.main import begin
begin()
"""
SKLEARN = """
import sklearn.base
inspect.getmodule(inspect.currentframe())  # looks at all modules
assert "scipy.stats" not in sys.modules
"""
END = """
from scipy.stats._distn_infrastructure import rv_generic
assert norm.cdf(0) == 0.5
assert isinstance(norm, rv_generic)  # nothing was loaded twice
assert sys.modules["scipy.stats"].norm is norm
import scipy
assert scipy.stats is sys.modules["scipy.stats"]
assert scipy.stats.__spec__.loader
from sklearn.utils.fixes import _mode
assert _mode([1, 1, 2]).mode == 1
"""


FAULTS = """
from resource import RUSAGE_SELF, getrusage
def allocate(): [b"x" * 20_000_000 for _ in range(4)]
allocate()
before = getrusage(RUSAGE_SELF).ru_minflt
for _ in range(20): allocate()
print(getrusage(RUSAGE_SELF).ru_minflt - before)
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return done.stdout


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("before", ["", SKLEARN], ids=["before sklearn", "after sklearn"])
def test_a_module_is_imported_when_it_is_used(use: str, before: str) -> None:
    run(BEGIN + before + USES[use] + END)


def test_another_import_may_come_between() -> None:
    between = "sys.modules['scipy.stats'] = _Once('scipy.stats')\nfrom scipy.stats import norm\n"
    run(BEGIN + "from mivhead.cli.main import _Once\n" + between + END)


def test_what_is_there_already_stays() -> None:
    run("import scipy.stats\nbefore = scipy.stats\n" + BEGIN + SKLEARN.replace("not in", "in"))


def test_garbage_is_sought_seldom() -> None:
    assert run(BEGIN + "print(gc.get_threshold()[0])") == "100000\n"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_freed_memory_is_used_again() -> None:
    usual, ours = (int(run(before + FAULTS)) for before in ("", BEGIN))
    assert ours < usual / 5
