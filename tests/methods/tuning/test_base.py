"""What all methods that tune the backbone share: chunks, files, errors, an untouched backbone."""

import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import mivhead
from mivhead import FewShotClassifier
from mivhead.backbones import from_module
from mivhead.errors import InputError, ModelFileError
from mivhead.methods import METHODS, make_method, method_name
from mivhead.methods.tuning.base import TuningClassifier
from tests.helpers.small_networks import backbone, digits, network, resnet, vit
from tests.helpers.tiny_backbone import TinyBackbone

TUNERS = tuple(name for name, method in METHODS.items() if method.needs == "images")


def model_for(method: str) -> torch.nn.Module:
    return resnet() if method in ("tsa", "finetune", "finetune-vote") else vit()


def fitted(method: str, **params: Any) -> FewShotClassifier:
    X, y = digits(2)
    params = {"steps": 2, **params}
    chosen = backbone(model_for(method))
    return FewShotClassifier(chosen, method=method, method_params=params, threshold=3).fit(
        list(X), [f"digit {label}" for label in y]
    )


def test_names_of_the_contract_are_there() -> None:
    assert set(TUNERS) == {"tsa", "ett", "ln-tune", "finetune", "finetune-vote"}


@pytest.mark.parametrize("method", TUNERS)
def test_registry_tells_the_truth(method: str) -> None:
    tuner = make_method(method, random_state=3)
    assert isinstance(tuner, TuningClassifier)
    assert method_name(tuner) == method
    assert tuner.use_views == METHODS[method].uses_views == (method == "ln-tune")
    assert tuner.steps == (20 if method == "ln-tune" else 40)
    with pytest.raises(InputError, match=r"tunes the backbone.* attach\(network\) before"):
        tuner.fit(digits(1)[0], digits(1)[1])


@pytest.mark.parametrize("method", TUNERS)
def test_the_backbone_is_not_touched(method: str) -> None:
    model = model_for(method)
    own = backbone(model)
    X, y = digits(2)
    before = own.extract(list(X)).tensors
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    classifier = FewShotClassifier(own, method=method, method_params={"steps": 2})
    classifier.fit(list(X), y).predict(list(X))
    for name, array in own.extract(list(X)).tensors.items():
        np.testing.assert_array_equal(array, before[name])
    assert all(torch.equal(tensor, state[k]) for k, tensor in model.state_dict().items())
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
    one = make_method(method, steps=2, random_state=0).attach(network(model_for(method))).fit(X, y)
    # Names that sort the other way round turn the classes round.
    names = np.array(["c", "b", "a"])[y]
    other = (
        make_method(method, steps=2, random_state=0)
        .attach(network(model_for(method)))
        .fit(X[order], names[order])
    )
    np.testing.assert_allclose(other.losses_, one.losses_, rtol=2e-3)
    found, expected = other.predict_proba(X)[:, ::-1], one.predict_proba(X)
    np.testing.assert_allclose(found, expected, atol=0.02)


@pytest.mark.parametrize("method", TUNERS)
def test_file_and_pickle_give_the_same_model(method: str, tmp_path: Path) -> None:
    classifier = fitted(method)
    Q = list(digits(2, skip=20)[0])
    expected = classifier.predict_proba(Q)
    classifier.save(tmp_path / "model.miv")
    loaded = mivhead.load(tmp_path / "model.miv", backbone=backbone(model_for(method)))
    assert isinstance(loaded, FewShotClassifier)
    np.testing.assert_array_equal(loaded.predict_proba(Q), expected)
    assert loaded.classify(Q[0])[0].label == classifier.predict(Q[:1])[0]
    loaded.save(tmp_path / "again.miv")
    assert (tmp_path / "again.miv").read_bytes() == (tmp_path / "model.miv").read_bytes()
    copy = pickle.loads(pickle.dumps(classifier.classifier_))
    copy.attach(network(model_for(method)))
    np.testing.assert_array_equal(copy.predict_proba(np.stack(Q)), expected)


def test_a_file_holds_adapters_and_class_means_only(tmp_path: Path) -> None:
    fitted("tsa").save(tmp_path / "model.miv")
    with safe_open(tmp_path / "model.miv", "np") as file:
        names = set(file.keys())
    convs = {f"params.layer{i}.0.conv{j}.alpha" for i in (1, 2, 3, 4) for j in (1, 2)}
    assert names == convs | {"params.beta", "params.means"}


def forge(path: Path, change: Any) -> None:
    tensors = load_file(path)
    with safe_open(path, "np") as file:
        document = json.loads(file.metadata()["mivhead"])
    document.pop("checksum.v1")
    change(tensors)
    save_file(tensors, path, metadata={"mivhead": json.dumps(document)})


FORGERIES = {
    "unknown name": (
        lambda t: t.update({"params.evil": np.ones(1, np.float32)}),
        "'evil' is unexpected",
    ),
    "no means": (lambda t: t.pop("params.means"), "'means' is missing"),
    "NaN": (
        lambda t: t.update({"params.beta": t["params.beta"] * np.float32(np.nan)}),
        "'beta' holds NaN",
    ),
    "other type": (
        lambda t: t.update({"params.beta": t["params.beta"].astype(np.float64)}),
        "'beta' is float64",
    ),
    "class too few": (
        lambda t: t.update({"params.means": t["params.means"][:2].copy()}),
        "expected a row for each of 3 classes",
    ),
}


@pytest.mark.parametrize("kind", FORGERIES)
def test_forged_files_are_refused(kind: str, tmp_path: Path) -> None:
    change, message = FORGERIES[kind]
    fitted("tsa").save(tmp_path / "model.miv")
    forge(tmp_path / "model.miv", change)
    with pytest.raises(ModelFileError, match=message):
        mivhead.load(tmp_path / "model.miv")


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.pop("params.layer1.0.conv1.alpha"),
        lambda t: t.update({"params.layer1.9.conv1.alpha": np.ones((64, 64), np.float32)}),
        lambda t: t.update({"params.beta": np.ones((4, 4), np.float32)}),
        lambda t: t.update({"params.means": np.ones((3, 4), np.float32)}),
    ],
)
def test_adapters_that_do_not_fit_the_network_are_refused(change: Any, tmp_path: Path) -> None:
    fitted("tsa").save(tmp_path / "model.miv")
    forge(tmp_path / "model.miv", change)
    loaded = mivhead.load(tmp_path / "model.miv", backbone=backbone(resnet()))
    with pytest.raises(InputError, match="tensor '"):
        loaded.predict(list(digits(1)[0]))


def test_a_file_without_a_backbone_is_refused(tmp_path: Path) -> None:
    X, y = digits(1)
    tuner = make_method("tsa", steps=0).attach(network(resnet())).fit(X, [f"{each}" for each in y])
    mivhead.save(tuner, tmp_path / "model.miv")  # type: ignore[arg-type]  # only FewShot's are read
    with pytest.raises(ModelFileError, match="names no backbone for its adapters"):
        mivhead.load(tmp_path / "model.miv")


def test_a_backbone_without_a_module_is_refused_before_images_are_read() -> None:
    blind = TinyBackbone()
    classifier = FewShotClassifier(blind, method="tsa")
    with pytest.raises(InputError, match=r"needs a torch module .* tiny only gives features"):
        classifier.fit(["missing.png", "nowhere.png"], ["a", "b"])
    assert blind.seen == 0


def test_the_default_backbone_can_be_finetuned_but_not_adapted() -> None:
    X, y = digits(1, classes=2)
    with pytest.raises(InputError, match="efficientnet_lite0 has none of them: choose a ResNet"):
        FewShotClassifier(method="tsa").fit(list(X), y)
    classifier = FewShotClassifier(method="finetune", method_params={"steps": 1}, cache=False)
    vectors = {label: np.ones(8) for label in y}
    with pytest.raises(InputError, match="finetune cannot learn from class vectors"):
        classifier.fit(list(X), y, class_vectors=vectors)
    ncc = FewShotClassifier(method="ncc", cache=False).fit(list(X), y).predict_proba(list(X))
    start = FewShotClassifier(method="finetune", method_params={"steps": 0}).fit(list(X), y)
    np.testing.assert_allclose(start.predict_proba(list(X)), ncc, atol=0.01)
    assert classifier.fit(list(X), y).predict(list(X)).tolist() == y.tolist()


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"steps": -1}, "steps must be an integer of at least 0"),
        ({"images_at_once": 0}, "images_at_once must be an integer of at least 1"),
        ({"learning_rate": 0.0}, "learning_rate must be a positive number"),
    ],
)
def test_bad_settings_are_named(params: dict[str, Any], message: str) -> None:
    X, y = digits(1)
    with pytest.raises(InputError, match=message):
        make_method("finetune", **params).attach(network(resnet())).fit(X, y)


def test_bad_labels_are_named() -> None:
    X, _ = digits(1)
    with pytest.raises(InputError, match="X holds 3 images, but y has 2 labels"):
        make_method("finetune").attach(network(resnet())).fit(X, ["a", "b"])
    with pytest.raises(InputError, match="y holds 1 class"):
        make_method("finetune").attach(network(resnet())).fit(X, ["a"] * 3)


def test_divergence_is_an_error() -> None:
    X, y = digits(2)
    tuner = make_method("finetune", steps=20, learning_rate=1e30)
    with pytest.raises(InputError, match=r"Training diverged at step \d+.* Lower learning_rate"):
        tuner.attach(network(resnet())).fit(X, y)


def test_features_cannot_be_given_to_a_tuned_model() -> None:
    classifier = fitted("finetune")
    with pytest.raises(InputError, match="it needs images, not features"):
        classifier.classify(classifier.extract(mivhead.model.fewshot.as_image_set(digits(1)[0])))


def test_other_taps_are_part_of_the_identity(tmp_path: Path) -> None:
    fitted("tsa").save(tmp_path / "model.miv")
    other = from_module(resnet(), ["layer3"], name="small", device="cpu")
    loaded = mivhead.load(tmp_path / "model.miv", backbone=other)
    with pytest.raises(mivhead.errors.MivError, match="has other weights, taps or preprocessing"):
        loaded.predict(list(digits(1)[0]))


def test_the_vote_is_the_mean_of_its_pairs_of_rates() -> None:
    X, y = digits(2)
    queries, _ = digits(1, skip=20)
    rates = {"backbone_rates": (1e-5, 1e-3), "head_rates": (1e-2,)}
    vote = make_method("finetune-vote", steps=2, **rates).attach(network(resnet())).fit(X, y)
    single = [
        make_method("finetune", steps=2, learning_rate=rate, head_rate=1e-2)
        .attach(network(resnet()))
        .fit(X, y)
        .predict_proba(queries)
        for rate in (1e-5, 1e-3)
    ]
    np.testing.assert_allclose(vote.predict_proba(queries), np.mean(single, axis=0), atol=1e-6)
    assert np.abs(single[0] - single[1]).max() > 1e-3


def test_a_vote_may_be_asked_by_several_threads() -> None:
    X, y = digits(2)
    rates = {"backbone_rates": (1e-5, 1e-2), "head_rates": (1e-2,)}
    vote = make_method("finetune-vote", steps=2, **rates).attach(network(resnet())).fit(X, y)
    expected = vote.predict_proba(X)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(vote.predict_proba, [X] * 12):
            np.testing.assert_allclose(found, expected, atol=1e-6)


def test_a_rate_of_the_head_trains_the_vectors_of_the_classes() -> None:
    X, y = digits(2)
    still, moved = (
        make_method("finetune", steps=1, learning_rate=1e-12, head_rate=rate)
        .attach(network(resnet()))
        .fit(X, y)
        .means_
        for rate in (1e-12, 0.5)
    )
    changes = (moved - still).abs()
    changed = changes > 1e-3  # the others have no gradient
    assert changed.float().mean() > 0.5
    # The first step of Adam changes every value by the rate.
    assert (changes[changed] - 0.5).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("method", "params", "words"),
    [
        ("finetune", {"head_rate": 0.0}, "head_rate must be a positive number"),
        ("finetune-vote", {"head_rates": ()}, "head_rates is empty"),
        ("finetune-vote", {"backbone_rates": (1e-5, -1.0)}, "learning_rate must be"),
    ],
)
def test_wrong_rates(method: str, params: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        make_method(method, **params).attach(network(resnet()))
