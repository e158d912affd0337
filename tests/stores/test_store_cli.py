"""`miv extract`, `fit`, `evaluate` and `predict` with tables."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import mivhead
from mivhead import FewShotClassifier, stores
from mivhead.cli.main import main
from mivhead.images.sources import open_labelled
from tests.helpers.tiny_backbone import TinyBackbone

Address = Callable[[str], str]


def state(classifier: object) -> dict[str, np.ndarray]:
    assert isinstance(classifier, FewShotClassifier)
    tensors: dict[str, np.ndarray] = classifier.classifier_._state()[1]
    return tensors


def assert_same(expected: object, found: object) -> None:
    assert state(expected).keys() == state(found).keys()
    for name, tensor in state(expected).items():
        np.testing.assert_array_equal(tensor, state(found)[name], err_msg=name)


def test_the_same_model_from_images_and_from_a_table(address: Address, shots: Path) -> None:
    backbone = TinyBackbone()
    from_images = FewShotClassifier(backbone, threshold=6, verbose=False)
    table = from_images.extract(open_labelled(shots))
    from_images.fit_folder(shots)
    with stores.open(address("birds")) as store:
        store.write(table)
        found = store.read()
    assert found.views is not None
    assert len(found.views) == 24
    assert_same(from_images, FewShotClassifier(backbone, verbose=False).fit_table(found))


def test_the_same_model_on_the_command_line(
    lancedb_address: Address, shots: Path, tmp_path: Path
) -> None:
    uri = lancedb_address("birds")
    outputs = [str(tmp_path / name) for name in ("images.miv", "table.miv")]
    assert main(["fit", str(shots), "-o", outputs[0], "--no-check", "--threshold", "4"]) == 0
    assert main(["extract", str(shots), "-o", uri, "--threshold", "4"]) == 0
    assert main(["fit", uri, "-o", outputs[1], "--no-check"]) == 0
    assert_same(*(mivhead.load(path) for path in outputs))


def test_predictions_are_written_back(
    lancedb_address: Address, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import lancedb
    import pyarrow as pa

    rng = np.random.default_rng(0)
    kinds = np.arange(40) % 2
    centres = 3 * rng.normal(size=(2, 8))
    vectors = (centres[kinds] + rng.normal(size=(40, 8))).astype(np.float32)
    species = [("wren", "owl")[k] if i < 10 else None for i, k in enumerate(kinds)]
    data = {
        "file": [f"{i}.jpg" for i in range(40)],
        "species": species,
        "vector": pa.array(list(vectors), pa.list_(pa.float32(), 8)),
    }
    folder, _, name = lancedb_address("birds").removeprefix("lancedb://").rpartition("/")
    lancedb.connect(folder).create_table(name, pa.table(data))
    uri, model = f"{lancedb_address('birds')}?id=file", str(tmp_path / "m.miv")

    assert main(["fit", uri, "-o", model]) == 2
    assert "--label" in capsys.readouterr().err
    assert main(["fit", uri, "-o", model, "--label", "species"]) == 2
    assert "row '10.jpg'" in capsys.readouterr().err
    labelled = ["--label", "species", "--where", "species IS NOT NULL"]
    assert main(["fit", uri, "-o", model, "--no-check", *labelled]) == 0, capsys.readouterr().err
    capsys.readouterr()
    unlabelled = ["--where", "species IS NULL", "--write", "guess"]
    assert main(["predict", model, uri, *unlabelled]) == 0, capsys.readouterr().err
    answer = capsys.readouterr()
    assert answer.out == ""  # not 30 rows, which may be 100,000
    written = "Wrote guess, guess_decision, guess_probability of 30 rows to lancedb://"
    assert written in answer.err
    assert main(["predict", model, uri, *unlabelled, "--csv"]) == 0
    assert "10.jpg" in capsys.readouterr().out

    with stores.open(uri, label="guess", where="species IS NULL") as store:
        found = store.read()
    guesses = dict(zip(found.ids, found.labels or (), strict=True))
    assert len(guesses) == 30
    right = [guesses[f"{i}.jpg"] == ("wren", "owl")[kinds[i]] for i in range(10, 40)]
    assert np.mean(right) > 0.9
    rows = lancedb.connect(folder).open_table(name).to_arrow().to_pylist()
    assert all((row["guess"] is None) == (row["species"] is not None) for row in rows)
    assert all(0.5 <= row["guess_probability"] <= 1 for row in rows if row["guess"])
    allowed = {"unsure", "none of these"}
    guessed = [row for row in rows if row["guess"]]
    assert all(row["guess_decision"] in allowed | {row["guess"]} for row in guessed)
    assert any(row["guess_decision"] == row["guess"] for row in guessed)
    with stores.open(uri) as store:  # what was there before is as it was
        again = {i: f for t in [store.read()] for i, f in zip(t.ids, t.features, strict=True)}
    for i in range(40):
        np.testing.assert_array_equal(again[f"{i}.jpg"].tensors["block0.token"][0], vectors[i])

    shots = f"{uri}&label=species&where=species IS NOT NULL"
    assert main(["evaluate", model, shots]) == 2
    assert "--include-shots" in capsys.readouterr().err
    assert main(["evaluate", model, shots, "--include-shots"]) == 0


def test_options_of_tables_need_a_table(
    shots: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(tmp_path / "m.miv")
    assert main(["fit", str(shots), "-o", model, "--where", "species"]) == 2
    assert "is for database tables" in capsys.readouterr().err
