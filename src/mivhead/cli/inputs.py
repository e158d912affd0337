"""What `predict` and `evaluate` share: a model, images or features for it, and its answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mivhead.errors import InputError

if TYPE_CHECKING:
    from mivhead.backbones.base import Identity
    from mivhead.features import FeatureTable
    from mivhead.fewshot import FewShotClassifier, Prediction
    from mivhead.images.imageset import ImageSet, Skipped


@dataclass(frozen=True)
class Model:
    """A loaded model file."""

    path: str
    classifier: FewShotClassifier
    identity: Identity | None  # of the backbone; None: trained on features of unknown origin

    @property
    def names(self) -> list[str]:
        """The classes, as texts."""
        return [str(name) for name in self.classifier.classes_.tolist()]


def load_model(
    path: str, *, device: str | None, backbone: str | None = None, weights: str | None = None
) -> Model:
    """Read a model file; the backbone is loaded with the first image."""
    from mivhead.model_file import load

    loaded = load(path, backbone=backbone, weights=weights, device=device)
    return Model(path, loaded, loaded.identity_)


def classify_table(model: Model, table: FeatureTable) -> list[Prediction]:
    """Predict images whose features were extracted before, by the same backbone."""
    from mivhead.backbones.base import Identity

    # A tuned model takes no features at all, and says so itself.
    expected = None if model.classifier.needs_images else model.identity
    if expected and table.backbone and Identity.from_json(table.backbone) != expected:
        raise InputError(
            f"The features come from the backbone {table.backbone.get('name')!r}, the model "
            f"{model.path} from {expected.name!r} with its weights, taps and preprocessing: "
            "extract them with the model's backbone."
        )
    return model.classifier.classify(table)


def classify_images(model: Model, images: ImageSet, *, verbose: bool) -> list[Prediction]:
    """Predict any number of images in little memory."""
    from mivhead._progress import progress_bar

    if model.identity is None:
        raise InputError(
            f"The model {model.path} was trained on features of unknown origin, not on images: "
            "give it a features file."
        )
    classifier = model.classifier.set_params(verbose=False)  # this bar is enough
    predictions: list[Prediction] = []
    with progress_bar("predicting", len(images), show=verbose) as advance:
        for part in classifier.classify_parts(images):
            predictions += part
            advance(len(part))
    return predictions


def drop_bad(images: ImageSet, skip_bad: bool) -> tuple[ImageSet, list[Skipped]]:
    """With `--skip-bad`, leave out what cannot be read; else the first such image is an error."""
    from mivhead.images.imageset import check_images

    skipped = check_images(images) if skip_bad else []
    return images.without(skipped), skipped
