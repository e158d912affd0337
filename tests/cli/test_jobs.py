"""`miv predict --job` and `miv extract --job`."""

import json

import pytest

import mivhead

pq = pytest.importorskip("pyarrow.parquet", reason="the extra batch is not installed")
pytest.importorskip("fsspec", reason="the extra batch is not installed")


def test_predict(miv, fails, model, new, tmp_path):
    out = tmp_path / "out.parquet"
    answer = miv("predict", model, new, "--job", out)
    assert (answer.code, answer.out) == (0, "")
    assert f"Wrote 6 predictions to {out}, in " in answer.err
    rows = pq.read_table(out).to_pylist()
    for row, own in zip(rows, mivhead.load(model).classify(new), strict=True):
        assert (row["file"], row["label"], row["decision"]) == (own.id, own.label, own.decision)
        assert row["probability"] == pytest.approx(own.probability, abs=1e-5)
        assert row["unknown"] == pytest.approx(own.unknown, abs=1e-4)
    assert "exists: complete it with --resume" in fails("predict", model, new, "--job", out)
    assert "nothing left to do" in miv("predict", model, new, "--job", out, "--resume").err
    again = miv("predict", model, new, "--job", out, "--overwrite", "--json", "--quiet")
    assert json.loads(again.out)["rows"] == 6
    assert "together with --job" in fails("predict", model, new, "--job", out, "--csv")
    assert "--top" in fails("predict", model, new, "--job", out, "--top", "2")
    assert "with --job" in fails("predict", model, new, "--resume")


def test_extract_and_predict_the_features(miv, fails, model, new, tmp_path):
    assert miv("extract", new, "--job", tmp_path / "features").code == 0
    answer = miv("predict", model, tmp_path / "features", "--json")
    own = mivhead.load(model).classify(new)
    found = json.loads(answer.out)["predictions"]
    assert [each["label"] for each in found] == [each.label for each in own]
    assert miv("predict", model, tmp_path / "features", "--job", tmp_path / "out.jsonl").code == 0
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert [json.loads(line)["label"] for line in lines] == [each.label for each in own]
    assert "-o FILE or --job PATH" in fails("extract", new)
    assert ".parquet file or a folder" in fails("extract", new, "--job", tmp_path / "x.csv")


def test_the_old_name_of_the_option_is_understood(miv, model, new, tmp_path):
    answer = miv("predict", model, new, "--out", tmp_path / "names.csv")
    assert answer.err.startswith("--out is now called --job.\nWrote ")
    assert (tmp_path / "names.csv").exists()


def test_the_extra_is_named(fails, model, new, tmp_path, monkeypatch):
    from mivhead._util import optional as _optional

    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name.partition(".")[0])

    monkeypatch.setattr(_optional, "import_module", missing)
    assert "mivhead[batch]" in fails("predict", model, new, "--job", tmp_path / "x.parquet")
