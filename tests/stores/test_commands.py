"""`miv extract`, `fit`, `evaluate` and `predict` with tables."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mivhead import FewShotClassifier, stores
from mivhead.cli.main import main
from mivhead.images.sources import open_labelled
from tests.helpers.tiny_backbone import TinyBackbone

Address = Callable[[str], str]


def state(classifier: object) -> dict[str, np.ndarray]:
    assert isinstance(classifier, FewShotClassifier)
    tensors: dict[str, np.ndarray] = classifier.classifier_.state()[1]
    return tensors


def assert_same(expected: object, found: object) -> None:
    assert state(expected).keys() == state(found).keys()
    for name, tensor in state(expected).items():
        np.testing.assert_array_equal(tensor, state(found)[name], err_msg=name)


def test_the_same_model_from_images_and_from_a_table(address: Address, shots: Path) -> None:
    backbone = TinyBackbone()
    from_images = FewShotClassifier(backbone, threshold=0, verbose=False)
    table = from_images.extract(open_labelled(shots))
    from_images.fit(shots)
    stores.open(address("birds")).write(table)
    found = stores.open(address("birds")).read()
    assert found.features == table.features
    assert_same(from_images, FewShotClassifier(backbone, verbose=False).fit(found))


@pytest.mark.parametrize("suffix", ["npz", "parquet"])
def test_the_command_line_fits_and_predicts_files(tmp_path, monkeypatch, capsys, suffix):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    vectors = 0.2 * rng.normal(size=(12, 6)) + np.repeat([[1], [-1]], 6, axis=0)
    labels = ["cat"] * 6 + ["dog"] * 6
    if suffix == "npz":
        np.savez("shots.npz", X=vectors, y=labels)
    else:
        pa = pytest.importorskip("pyarrow", reason="the extra jobs is not installed")
        import pyarrow.parquet as pq

        pq.write_table(pa.table({"embedding": vectors.tolist(), "label": labels}), "shots.parquet")
    assert main(["fit", f"shots.{suffix}", "-o", "m.miv", "--no-check"]) == 0
    np.save("new.npy", vectors[::-1])
    assert main(["predict", "m.miv", "new.npy", "-o", "names.csv"]) == 0
    rows = Path("names.csv").read_text(encoding="utf-8").splitlines()[1:]
    assert [row.split(",")[2] for row in rows] == labels[::-1]
