"""`miv suggest`."""

import json


def test_suggestions_with_and_without_a_model(miv, fails, model, new, tmp_path):
    answer = miv("suggest", new, "-n", "3")
    assert answer.code == 0, answer.err
    assert answer.out.startswith("file")
    assert answer.out.count("typical of") == 3
    page = tmp_path / "label.html"
    document = json.loads(miv("suggest", model, new, "-n", "4", "--json", "--html", page).out)
    assert 1 <= len(document["suggestions"]) <= 4
    assert "What do they show?" in page.read_text()
    assert "unlabelled" in fails("suggest", model)
