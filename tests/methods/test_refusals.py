"""Invalid requests are rejected before any image is decoded."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from mivhead import FewShotClassifier
from mivhead.backbones import load_backbone
from mivhead.errors import InputError
from mivhead.methods import METHODS
from tests.helpers.extras import needs
from tests.helpers.few_shots import ON_FEATURES
from tests.helpers.services import FaultyServer, relay, running, toy_server
from tests.helpers.small_networks import backbone, resnet, vit
from tests.helpers.tiny_backbone import TinyBackbone

TUNERS = [name for name, method in METHODS.items() if method.needs == "images"]
MISSING = ["missing.png", "nowhere.png"]  # to decode them would be another error
WHY = (
    "{} tunes the backbone, so it needs a torch module that gradients can flow through; {} only "
    "gives features, as an ONNX file, a service or a function does: choose a backbone of timm or "
    "`from_module`, or a method on features, such as miv."
)


@contextmanager
def no_passes() -> Iterator[None]:
    """Check that no PyTorch module runs in here, neither a backbone nor a copy of one."""
    ran: list[str] = []
    hook = register_module_forward_pre_hook(lambda module, _: ran.append(type(module).__name__))
    try:
        yield
    finally:
        hook.remove()
    assert ran == []


def test_the_counter_counts() -> None:
    own = backbone(resnet())
    with pytest.raises(AssertionError, match="ResNet"), no_passes():
        own.extract([torch.zeros(8, 8, 3, dtype=torch.uint8).numpy()])


@pytest.mark.parametrize("method", ["miv", "ncc", "tsa"])
@pytest.mark.parametrize("count", [1, 2])
def test_one_class_and_one_sample(method: str, count: int) -> None:
    own: Any = TinyBackbone() if method in ON_FEATURES else backbone(resnet())
    classifier = FewShotClassifier(own, method=method)
    message = "All images have the label 'a'; a classifier needs at least 2 classes"
    with no_passes(), pytest.raises(InputError, match=message):
        classifier.fit(MISSING[:count], ["a"] * count)
    assert getattr(own, "seen", 0) == 0


def test_no_samples_at_all() -> None:
    with pytest.raises(InputError, match="There are no images: give images of at least 2 classes"):
        FewShotClassifier(TinyBackbone(), method="ncc").fit([], [])


@pytest.mark.parametrize(
    ("method", "model", "message"),
    [
        ("tsa", vit, "tsa adapts the 3x3 convolutions of a ResNet .* small has none of them"),
        ("ett", resnet, "ett adds keys and values .* of a vision transformer; small is not one"),
        (
            "ln-tune",
            resnet,
            "ln-tune trains the LayerNorms .* transformer; small is not one",
        ),
    ],
)
def test_networks_of_the_wrong_kind(method: str, model: Any, message: str) -> None:
    classifier = FewShotClassifier(backbone(model()), method=method)
    with no_passes(), pytest.raises(InputError, match=message):
        classifier.fit(MISSING, ["a", "b"])


@pytest.mark.parametrize(
    ("method", "params", "message"),
    [
        ("knn", {"neighbours": 0}, "neighbours must be an integer of at least 1, got 0"),
        ("knn", {"neighbors": 3}, "parameter of knn must be .*Did you mean 'neighbours'"),
        ("miv", {"eta": -1}, "eta must not be negative, got -1"),
        ("miv-paper", {"steps": "many"}, "steps must be an integer, got 'many'"),
        ("miv-eta0", {"temperature": 0}, "temperature must be positive, got 0"),
        ("miv-d1", {"candidates": 0}, "candidates must be an integer of at least 1, got 0"),
        ("miv-gap", {"tau": -3.0}, "tau must be a number of at least 0, got -3.0"),
        ("miv", {"pool_sizes": [[2], [2], [2]]}, "pool_sizes has lists for 3 blocks"),
        ("miv", {"eat": 0.1}, "parameter of miv must be .*Did you mean 'eta'"),
        ("tsa", {"steps": -1}, "steps must be an integer of at least 0, got -1"),
        ("finetune", {"rate": 1.0}, "parameter of finetune must be one of"),
    ],
)
def test_wrong_hyperparameters(method: str, params: dict[str, Any], message: str) -> None:
    own: Any = TinyBackbone() if method in ON_FEATURES else backbone(resnet())
    classifier = FewShotClassifier(own, method=method, method_params=params)
    with no_passes(), pytest.raises(InputError, match=message):
        classifier.fit(MISSING, ["a", "b"])
    assert getattr(own, "seen", 0) == 0


@pytest.mark.parametrize("recipe", ["papr", 3])
def test_a_wrong_recipe(recipe: Any) -> None:
    own = TinyBackbone()
    with no_passes(), pytest.raises(InputError, match="recipe must be"):
        FewShotClassifier(own, recipe=recipe).fit(MISSING, ["a", "b"])
    assert own.seen == 0


@pytest.mark.parametrize("method", TUNERS)
def test_an_onnx_file_cannot_be_tuned(method: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    from tests.helpers.tiny_onnx import network

    file = load_backbone(network(tmp_path / "model.onnx"), outputs=["shallow", "deep"])
    with pytest.raises(InputError) as caught:
        FewShotClassifier(file, method=method).fit(MISSING, ["a", "b"])
    assert str(caught.value) == WHY.format(method, "model.onnx")


@needs("httpx", "http")
@pytest.mark.parametrize("method", TUNERS)
def test_a_service_cannot_be_tuned_and_is_sent_no_image(method: str) -> None:
    with toy_server() as address, running(watched := FaultyServer(relay(address))) as url:
        with pytest.raises(InputError) as caught:
            FewShotClassifier(url, method=method).fit(MISSING, ["a", "b"])
        assert str(caught.value) == WHY.format(method, "toy")
        assert watched.requests  # it was asked what it is
        assert watched.posts == []
