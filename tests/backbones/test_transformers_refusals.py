"""Folders of transformers that cannot be used, and code that must not be run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from mivhead.backbones import load_backbone
from mivhead.errors import InputError, NotAvailableError
from tests.helpers.conformance import photos
from tests.helpers.towers import clip, dinov2, save, vit


def test_incomplete_weights_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save(dinov2, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["encoder.layer.1.norm1.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"not a complete Dinov2Model: it lacks .*norm1\.weight"):
        load_backbone(f"hf:{tmp_path}")


def test_weights_of_another_architecture_are_refused(tmp_path: Path) -> None:
    save(clip, tmp_path / "clip")
    save(vit, tmp_path / "vit")
    shutil.copy(tmp_path / "clip" / "model.safetensors", tmp_path / "vit")
    with pytest.raises(InputError, match="not a complete ViTModel"):
        load_backbone(f"hf:{tmp_path / 'vit'}")


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    save(clip, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    with pytest.raises(InputError, match="cannot be loaded as CLIPVisionModel"):
        load_backbone(f"hf:{tmp_path}")


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    save(clip, tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(InputError, match="cannot be loaded as CLIPVisionModel"):
        load_backbone(f"hf:{tmp_path}")


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    model = save(clip, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(NotAvailableError, match=r"no model\.safetensors"):
        load_backbone(f"hf:{tmp_path}")


def test_code_in_the_folder_is_not_run(tmp_path: Path) -> None:
    save(clip, tmp_path)
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass C: pass\n")
    config = json.loads((tmp_path / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.C", "AutoModel": "evil.C"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert len(load_backbone(f"hf:{tmp_path}", device="cpu").extract(photos(1))) == 1
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"model_type": "bert"}', "the model type 'bert'; .* clip"),
        ("{}", "the model type None"),
        ("[]", "does not contain a JSON object"),
        ("{", "cannot be read as JSON"),
        (None, r"has no config\.json"),
    ],
)
def test_other_folders(content: str | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(InputError, match=message):
        load_backbone(f"hf:{tmp_path}")


def test_no_folder_and_no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def unreachable(*_: Any, **__: Any) -> str:
        raise ConnectionError("no route to the hub.\nMore lines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(NotAvailableError, match=r"\(no route to the hub\): .* as hf:FOLDER"):
        load_backbone("hf:openai/clip-vit-large-patch14")
    for name in (str(tmp_path / "absent"), "../absent/model", "absent"):
        with pytest.raises(InputError, match="neither a folder nor"):
            load_backbone(f"hf:{name}")
    with pytest.raises(InputError, match="has its own weights"):
        load_backbone(f"hf:{tmp_path}", weights="random")
