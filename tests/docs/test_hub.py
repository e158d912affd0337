"""The example for the Hugging Face Hub, against an endpoint on this machine."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.test_pages import BLOCK, DOCS
from tests.helpers.services import FaultyServer, Reply, Request, as_json, running

pytest.importorskip("huggingface_hub")

COMMIT = "0123456789" * 4
PUSH_AND_LOAD = """
expected = model.predict(X)
HubModel(model).push_to_hub("me/animals", token="hf_secret")
found = HubModel.from_pretrained("me/animals", token="hf_secret")
assert (found.model.predict(X) == expected).all()
"""


class Hub:
    """As much of the Hub's interface as publishing and loading a small model needs."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def answer(self, request: Request) -> Reply:
        path, address = (
            request.path.partition("?")[0],
            f"http://{request.headers['Host']}/me/animals",
        )
        if path == "/api/repos/create":
            return as_json({"url": address})
        if path == "/api/models/me/animals/preupload/main":
            how = {"uploadMode": "regular", "shouldIgnore": False}
            files = json.loads(request.body)["files"]
            return as_json({"files": [{"path": each["path"], **how} for each in files]})
        if path == "/api/models/me/animals/commit/main":
            for line in map(json.loads, request.body.splitlines()):
                if line["key"] == "file":
                    value = line["value"]
                    self.files[value["path"]] = base64.b64decode(value["content"])
            return as_json({"commitUrl": f"{address}/commit/{COMMIT}", "commitOid": COMMIT})
        name = path.rpartition("/")[2]
        if path.startswith("/me/animals/resolve/") and name in self.files:
            content = self.files[name]
            headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
            return Reply(content, 200, headers)
        if path.startswith("/me/animals/resolve/"):
            return as_json({"error": "Entry not found"}, 404, X_Error_Code="EntryNotFound")
        return as_json({})


def test_a_model_is_published_and_loaded_again(tmp_path: Path) -> None:
    hub, blocks = Hub(), BLOCK.findall((DOCS / "ecosystem.md").read_text())
    code = "".join(code for package, *_, code in blocks if package in ("", "huggingface_hub"))
    (tmp_path / "page.py").write_text(code.partition("import json")[0] + PUSH_AND_LOAD)
    with running(FaultyServer(hub.answer)) as endpoint:
        settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "cache")}
        done = subprocess.run(
            [sys.executable, "page.py"],
            cwd=tmp_path,
            env={**os.environ, **settings},
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    assert set(hub.files) == {"model.miv", "README.md"}
    card = hub.files["README.md"].decode()
    assert card.startswith("---\nlibrary_name: mivhead\n")
    assert "# cat, dog, owl" in card
