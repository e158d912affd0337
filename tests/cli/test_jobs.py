"""`miv predict --job`."""

import json

import pytest

import mivhead

pq = pytest.importorskip("pyarrow.parquet", reason="the extra jobs is not installed")
pytest.importorskip("fsspec", reason="the extra jobs is not installed")


def test_predict(miv, fails, model, new, tmp_path):
    out = tmp_path / "out.parquet"
    answer = miv("predict", model, new, "--job", out)
    assert (answer.code, answer.out) == (0, "")
    assert f"Wrote 6 predictions to {out}, in " in answer.err
    rows = pq.read_table(out).to_pylist()
    for row, own in zip(rows, mivhead.load(model).classify(new), strict=True):
        assert (row["file"], row["closest"], row["decision"]) == (own.id, own.label, own.decision)
        assert row["probability"] == pytest.approx(own.probability, abs=1e-5)
    assert "--resume" in fails("predict", model, new, "--job", out)
    assert "nothing left to do" in miv("predict", model, new, "--job", out, "--resume").err
    again = miv("predict", model, new, "--job", out, "--overwrite", "--json", "--quiet")
    assert json.loads(again.out)["rows"] == 6
    assert "--html" in fails("predict", model, new, "--job", out, "--html", tmp_path / "p.html")
    assert "with --job" in fails("predict", model, new, "--resume")
