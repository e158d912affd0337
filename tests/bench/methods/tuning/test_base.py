"""What all methods that tune the backbone share: chunks, memory, an untouched backbone."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from mivhead.backbones import from_module, load_backbone
from mivhead.backbones.preset import Preprocessing
from mivhead.errors import InputError
from mivhead_bench.methods import METHODS, make_method
from mivhead_bench.methods.tuning import network as sizes
from mivhead_bench.methods.tuning.network import chunk_size, network_of, predicted_at_once
from tests.helpers.small_networks import backbone, digits, network, resnet, vit
from tests.helpers.tiny_onnx import network as write_onnx

TUNERS = tuple(name for name, method in METHODS.items() if method.needs == "images")


def model_for(method: str) -> torch.nn.Module:
    return resnet() if method in ("tsa", "finetune") else vit()


@pytest.mark.parametrize("method", TUNERS)
def test_the_backbone_is_not_touched(method: str) -> None:
    model = model_for(method)
    own = backbone(model)
    X, y = digits(2)
    before = own.extract(list(X)).tensors
    tuner = make_method(method, steps=2, random_state=0).attach(network_of(own, method))
    tuner.fit(X, y).predict(X)
    for name, array in own.extract(list(X)).tensors.items():
        np.testing.assert_array_equal(array, before[name])
    assert not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("method", TUNERS)
def test_chunks_change_memory_and_not_the_result(method: str) -> None:
    X, y = digits(3)
    whole, parts = (
        make_method(method, steps=2, images_at_once=count, random_state=0)
        .attach(network(model_for(method)))
        .fit(X, y)
        for count in (None, 2)
    )
    np.testing.assert_allclose(parts.losses_, whole.losses_, rtol=1e-4)
    np.testing.assert_allclose(parts.predict_proba(X), whole.predict_proba(X), atol=2e-3)


@pytest.mark.parametrize("method", TUNERS)
def test_order_of_shots_and_classes_does_not_matter(method: str) -> None:
    X, y = digits(2)
    order = np.random.default_rng(0).permutation(len(y))
    # Names that sort the other way round turn the classes round.
    names = np.array(["c", "b", "a"])[y]
    one, other = (
        make_method(method, steps=2, random_state=0)
        .attach(network(model_for(method)))
        .fit(images, labels)
        for images, labels in ((X, y), (X[order], names[order]))
    )
    np.testing.assert_allclose(other.losses_, one.losses_, rtol=2e-3)
    np.testing.assert_allclose(other.predict_proba(X)[:, ::-1], one.predict_proba(X), atol=0.02)


class Activations:
    """Counts the bytes that are kept for backward passes, and the most of them at any time."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def keep(self, tensor: Tensor) -> "Kept":
        return Kept(self, tensor)


class Kept:
    """One kept tensor; gone when the graph that holds it is."""

    def __init__(self, activations: Activations, tensor: Tensor) -> None:
        self.activations, self.tensor = activations, tensor
        self.bytes = tensor.nbytes if tensor.ndim == 4 else 0  # maps, and kernels: small here
        activations.now += self.bytes
        activations.most = max(activations.most, activations.now)

    def __del__(self) -> None:
        self.activations.now -= self.bytes


@pytest.mark.parametrize("method", ["tsa", "finetune"])
def test_one_chunk_of_activations_is_kept_at_a_time(method: str) -> None:
    X, y = digits(16)

    def most_kept(images_at_once: int | None) -> int:
        tuner = make_method(method, steps=1, images_at_once=images_at_once)
        kept = Activations()
        with saved_tensors_hooks(kept.keep, lambda packed: packed.tensor):
            tuner.attach(network(resnet())).fit(X, y)
        return kept.most

    whole, half, quarter = (most_kept(count) for count in (None, 24, 12))  # of 48
    constant = 2 * quarter - half  # kernels, which do not depend on the images
    assert half - constant == pytest.approx((whole - constant) / 2, rel=0.05)
    assert quarter < half < whole


@pytest.mark.parametrize("method", TUNERS)
def test_a_step_is_one_pass_of_all_images(method: str) -> None:
    X, y = digits(2)

    def passed(steps: int) -> int:
        net = network(model_for(method))
        seen: list[int] = []
        net.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
        make_method(method, steps=steps).attach(net).fit(X, y)
        return sum(seen)

    assert passed(3) - passed(0) == 3 * len(X)


def test_images_at_once_follow_from_their_size_and_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """500 images of 84 px, as in large tasks, are more than one chunk; 25 of 224 px are not."""
    net = network(resnet())
    for size, images in ((224, 32), (84, 227), (2000, 1)):
        net.size = size
        assert chunk_size(net) == images
        assert chunk_size(net, 5) == 5
    net.size = 224
    assert predicted_at_once(net) == sizes.PREDICTED
    for free, expected in ((40e9, 239), (1e9, 32)):
        monkeypatch.setattr(sizes, "free_memory", lambda _, free=free: free)
        assert chunk_size(net) == expected


@pytest.mark.parametrize("method", TUNERS)
def test_default_settings_lower_the_loss_on_real_images(method: str) -> None:
    X, y = digits(4)
    tuner = make_method(method, random_state=0).attach(network(model_for(method)))
    losses = tuner.fit(X, y).losses_
    assert len(losses) == (20 if method == "ln-tune" else 40)
    assert losses[-1] < losses[0]


def test_the_default_backbone_can_be_finetuned_but_not_adapted() -> None:
    frozen = load_backbone("efficientnet_lite0", device="cpu", dtype="float32")
    net = network_of(frozen, "finetune")
    with pytest.raises(InputError, match="ResNet"):
        make_method("tsa").attach(net)
    X, y = digits(2)
    large = X.repeat(net.size // 32, axis=1).repeat(net.size // 32, axis=2)
    mean = frozen.extract(list(large)).blocks[-1].map.mean(axis=(2, 3))
    np.testing.assert_allclose(net.embed(large), mean, atol=1e-3)
    losses = make_method("finetune", steps=4).attach(net).fit(large, y).losses_
    assert all(after < 0.8 * before for before, after in pairwise(losses))


def test_what_cannot_be_tuned_is_named(tmp_path: Path) -> None:
    file = load_backbone(write_onnx(tmp_path / "model.onnx"), outputs=["shallow", "deep"])
    with pytest.raises(InputError, match="torch module"):
        network_of(file, "tsa")
    with pytest.raises(InputError, match="attach"):
        make_method("tsa").fit(*digits(1))
    with pytest.raises(InputError, match="steps"):
        make_method("finetune", steps=-1).attach(network(resnet()))


def test_divergence_is_an_error() -> None:
    tuner = make_method("finetune", steps=20, learning_rate=1e30)
    with pytest.raises(InputError, match="diverged"):
        tuner.attach(network(resnet())).fit(*digits(2))


def test_a_shallow_tap_leaves_deeper_weights_as_they_are() -> None:
    size = Preprocessing(size=32)
    early = from_module(resnet(), ["layer3"], name="early", preprocessing=size, device="cpu")
    tuner = make_method("tsa", steps=1).attach(network_of(early, "tsa")).fit(*digits(1))
    adapters = tuner.adapters_
    assert adapters["layer4.0.conv2.alpha"].grad is None
    assert adapters["layer3.0.conv2.alpha"].grad is not None
