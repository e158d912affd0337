"""The beginning of the process: what is not imported is there all the same."""

from __future__ import annotations

import subprocess
import sys

import pytest

# A function that scikit-learn and SciPy's statistics share, reached in every way there is.
USES = {
    "of the package": "import scipy\nnorm = scipy.stats.norm",
    "of the module": "import scipy.stats\nnorm = scipy.stats.norm",
    "by name": "from scipy.stats import norm",
    "from the package": "from scipy import stats\nnorm = stats.norm",
    "below it": "import scipy.stats.distributions\nnorm = scipy.stats.distributions.norm",
    "all names": "from scipy.stats import *",
}
BEGIN = """
import inspect, sys
from mivhead.cli.beginning import begin
begin()
import sklearn.base
inspect.getmodule(inspect.currentframe())  # looks at all modules
assert "scipy.stats._stats_py" not in sys.modules
assert "scipy.stats" in sys.modules
"""
END = """
assert norm.cdf(0) == 0.5
assert sys.modules["scipy.stats"].norm is norm
assert scipy.stats.norm is norm if "scipy" in globals() else True
"""


@pytest.mark.parametrize("use", USES)
def test_a_module_is_imported_when_it_is_used(use: str) -> None:
    code = f"{BEGIN}\n{USES[use]}\n{END}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_is_there_already_stays() -> None:
    code = (
        "import scipy.stats\nfrom mivhead.cli.beginning import begin\nbefore = scipy.stats\n"
        "begin()\nimport scipy.stats\nassert scipy.stats is before"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
