"""`miv bench methods`."""

import json

from mivhead_bench.methods import METHODS


def test_all_methods_are_listed(miv):
    out = miv("bench", "methods").out
    assert all(f"\n{name} " in out for name in METHODS)


def test_one_method_with_its_hyperparameters(miv, fails):
    (facts,) = json.loads(miv("bench", "methods", "knn", "--json").out)["methods"]
    assert facts["hyperparameters"]["neighbours"] == 5
    assert "1805.01978" in miv("bench", "methods", "knn").out
    (facts,) = json.loads(miv("bench", "methods", "tsa", "--json").out)["methods"]
    rates = {name: facts["hyperparameters"][name] for name in ("learning_rate", "map_rate", "rho")}
    assert (facts["optimiser"], *rates.values()) == ("Adadelta", 0.5, 1.0, 0.9)  # tab:opt_setting
    assert "by AdamW (eps 0.0001, weight decay 0.01)" in miv("bench", "methods", "ett").out
    assert "ncc" in fails("bench", "methods", "nnc")
