"""A method of the user's own, added literally as CONTRIBUTING says: a file with a class."""

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

import mivhead
from mivhead import Features, FewShotClassifier
from mivhead.benchmark.gflops import Cost, count
from mivhead.benchmark.results import RESULTS, read_results
from mivhead.cli.main import main
from mivhead.errors import InputError, ModelFileError
from mivhead.methods import METHODS, get_method, make_method, method_name, registry
from mivhead.methods.cost import BackboneWork, TaskSize
from tests.helpers.bench_data import write_sets
from tests.helpers.few_shots import clusters
from tests.helpers.tiny_backbone import TinyBackbone

MY_MODULE = '''
import numpy as np


def vectors(features):
    block = features.blocks[-1]
    pooled = block.token if block.token is not None else block.map.mean(axis=(2, 3), dtype=float)
    return np.asarray(pooled, dtype=float)


class MyHead:
    """Softmax of distances to the class means."""

    def __init__(self, scale=1.0):
        self.scale = scale

    def fit(self, X, y):
        x, y = vectors(X), np.asarray(y)
        self.means = np.stack([x[y == name].mean(axis=0) for name in np.unique(y)])
        return self

    def predict_proba(self, X):
        distances = np.linalg.norm(vectors(X)[:, None] - self.means, axis=2)
        shares = np.exp(-self.scale * distances)
        return shares / shares.sum(axis=1, keepdims=True)


class WithViews(MyHead):
    uses_views = True

    def fit(self, X, y, views=None, view_of=None):
        self.view_count = 0 if views is None else len(view_of)
        return super().fit(X, y)


class Mute:
    def fit(self, X, y):
        return self


class Faulty(MyHead):
    def fit(self, X, y):
        return self.no_such_helper(X)


class TooNarrow(MyHead):
    def predict_proba(self, X):
        return super().predict_proba(X)[:, :1]
'''


NO_NAMES = (":", "a:", ":B", ".a:B", "a..b:C", "a\0b:C", "my_module:A.B", "a/b:C", "a:B:C", "a b:C")


@pytest.fixture
def my_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module in the current folder, which is not on the path yet."""
    (tmp_path / "my_module.py").write_text(MY_MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    yield tmp_path
    sys.modules.pop("my_module", None)


@pytest.fixture
def installed(my_module: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The same module as an installed package with an entry point."""
    place = my_module / "my_package-1.0.dist-info"
    place.mkdir()
    (place / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (place / "entry_points.txt").write_text("[mivhead.methods]\nmy-head = my_module:MyHead\n")
    monkeypatch.syspath_prepend(my_module)
    registry._homes.cache_clear()
    yield my_module
    registry._homes.cache_clear()


def test_a_class_with_fit_and_predict_proba_is_a_method(my_module: Path) -> None:
    method = get_method("my_module:MyHead")
    assert method.summary == "Softmax of distances to the class means"
    assert (method.needs, method.uses_views, method.has_recipe) == ("features", False, False)
    assert method.hyperparameters() == {"scale": 1.0}
    X, y = clusters([3, 2, 3], 8)
    Q = clusters([2, 2, 2], 8, seed=1)[0]
    fitted = make_method("my_module:MyHead", scale=3.0).fit(X, y)
    assert method_name(fitted) == "my_module:MyHead"
    np.testing.assert_allclose(
        fitted.predict_proba(Q), fitted.estimator_.predict_proba(Features(Q)), rtol=1e-12
    )
    assert fitted.estimator_.scale == 3.0


def test_views_go_to_a_class_that_uses_them(my_module: Path) -> None:
    X, y = clusters([3, 2, 3], 8)
    Q = clusters([2, 2, 2], 8, seed=1)[0]
    for name, expected in (("WithViews", len(Q)), ("MyHead", None)):
        fitted = make_method(f"my_module:{name}")
        fitted.fit(X, y, views=Q, view_of=np.zeros(len(Q), int))
        assert getattr(fitted.estimator_, "view_count", None) == expected


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere:MyHead", "'nowhere:MyHead' cannot be imported .*such as my_module:MyHead"),
        ("my_module:YourHead", "my_module has no 'YourHead'"),
        *((name, "cannot be a method: give an importable module") for name in NO_NAMES),
        ("my_module:Mute", r"my_module:Mute cannot be used as a method: it has no predict_proba"),
    ],
)
def test_what_cannot_be_a_method_is_named(name: str, message: str, my_module: Path) -> None:
    with pytest.raises(InputError, match=message):
        make_method(name)


def test_wrong_parameters_and_probabilities_are_named(my_module: Path) -> None:
    with pytest.raises(InputError, match="parameter of my_module:MyHead must be one of scale"):
        make_method("my_module:MyHead", power=2)
    X, y = clusters([3, 2, 3], 8)
    Q = clusters([2, 2, 2], 8, seed=1)[0]
    with pytest.raises(InputError, match=r"predict_proba of my_module:TooNarrow returned shape"):
        make_method("my_module:TooNarrow").fit(X, y).predict_proba(Q)


def test_its_cost_is_unknown_unless_it_counts_it(my_module: Path) -> None:
    features, size = Features(np.ones((1, 8), np.float32)), TaskSize((2, 2), (0, 0))
    assert count("my_module:MyHead", features, size, BackboneWork(1e9)) == Cost(None, None, None)


def test_a_model_file_keeps_it_without_running_foreign_code(
    my_module: Path, shots: Path, queries: Path
) -> None:
    classifier = FewShotClassifier(
        TinyBackbone(), method="my_module:WithViews", method_params={"scale": 30.0}
    ).fit_folder(shots)
    classifier.save("m.miv")
    own = import_module("my_module").WithViews
    again = mivhead.load("m.miv", backbone=TinyBackbone(), method=own)
    expected = classifier.predict_proba(queries)
    np.testing.assert_array_equal(again.predict_proba(queries), expected)
    assert again.method_params == {"scale": 30.0}
    with pytest.raises(ModelFileError, match="not registered: give its class"):
        mivhead.load("m.miv")  # that it is imported is no permission
    with pytest.raises(ModelFileError, match="WithViews', not with my_module:MyHead"):
        mivhead.load("m.miv", method=import_module("my_module").MyHead)
    del sys.modules["my_module"]
    with pytest.raises(ModelFileError, match="not registered: give its class"):
        mivhead.load("m.miv")
    assert "my_module" not in sys.modules


def test_an_entry_point_is_a_method_by_name(installed: Path, shots: Path, queries: Path) -> None:
    assert list(METHODS)[-1] == "my-head"
    assert method_name(make_method("my-head")) == "my-head"
    assert main(["methods", "my-head"]) == 0
    classifier = FewShotClassifier(TinyBackbone(), method="my-head").fit_folder(shots)
    classifier.save("m.miv")
    del sys.modules["my_module"]  # an installed package is trusted
    again = mivhead.load("m.miv", backbone=TinyBackbone())
    np.testing.assert_array_equal(again.predict_proba(queries), classifier.predict_proba(queries))


def test_commands_take_it(my_module: Path, shots: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", "my_module:MyHead", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["methods"][0]["hyperparameters"] == {"scale": 1.0}
    command = ["fit", str(shots), "-o", "m.miv", "--method", "my_module:MyHead", "--quiet"]
    assert main([*command, "--param", "scale=9.0"]) == 0
    own = import_module("my_module").MyHead
    assert mivhead.load("m.miv", method=own).method == "my_module:MyHead"


def test_a_benchmark_with_it(my_module: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_sets(my_module / "data", names=("dots",), images=4)
    command = ["bench", "run", "--data", str(data), "--sets", "dots", "-o", "run", "--quiet"]
    command += ["--methods", "my_module:MyHead,ncc", "--protocol", "5-way 1-shot", "--tasks", "2"]
    assert main([*command, "--workers", "0"]) == 0
    results = {(r.method, r.task): r for r in read_results("run")}
    assert len(results) == 4
    assert all(r.error is None for r in results.values())
    mine = results["my_module:MyHead", 0]
    assert mine.gflops is None
    assert mine.gflops_paper is None
    assert results["ncc", 0].gflops is not None
    line = json.loads(Path("run", RESULTS).read_text().splitlines()[0])
    assert line["gflops"] is None
    assert main(["bench", "report", "run"]) == 0
    assert "unknown" in Path("run/report/report.md").read_text()


def test_a_faulty_method_shows_where_it_failed(
    my_module: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_sets(tmp_path / "data", names=("dots",))
    command = ["bench", "run", "--data", str(data), "--methods", "ncc,my_module:Faulty"]
    command += ["--protocol", "2-way 1-shot, max_queries 2", "--tasks", "4", "--workers", "0"]
    assert main([*command, "-o", str(tmp_path / "run")]) == 0
    text = capsys.readouterr().err
    assert "dots, task 0, my_module:Faulty failed: AttributeError" in text
    assert text.count("return self.no_such_helper(X)") == 1
    results = read_results(tmp_path / "run")
    assert [r.error is None for r in results if r.method == "ncc"] == [True] * 4
    assert sum("no_such_helper" in str(r.error) for r in results) == 4


def test_a_class_is_registered_by_a_decorator(
    my_module: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(my_module)
    module = import_module("my_module")
    try:
        registry.register_method("mine")(module.MyHead)
        assert get_method("mine").summary == "Softmax of distances to the class means"
        assert "mine" in METHODS
        X, y = clusters([3, 2, 3], 8)
        assert method_name(make_method("mine").fit(X, y)) == "mine"
        registry.register_method("mine")(module.MyHead)  # a cell of a notebook that runs again
        with pytest.raises(InputError, match="already a method 'mine'"):
            registry.register_method("mine")(module.WithViews)
        with pytest.raises(InputError, match="already a method 'ncc'"):
            registry.register_method("ncc")(module.MyHead)
        with pytest.raises(InputError, match="it has no predict_proba"):
            registry.register_method("mute")(module.Mute)
    finally:
        registry._REGISTERED.clear()
        registry._homes.cache_clear()
