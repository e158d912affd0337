"""What a fit asks of its backbone, and features that give a head nothing to hold on to."""

import numpy as np
from PIL import Image

from mivhead import FewShotClassifier
from tests.helpers.tiny_backbone import TinyBackbone


def test_each_image_and_view_passes_the_backbone_once():
    backbone = TinyBackbone(threshold=3)
    classifier = FewShotClassifier(backbone, cache=False, verbose=False)
    colours = np.random.default_rng(0).integers(0, 255, (6, 3), np.uint8)
    images = [Image.new("RGB", (20, 20), tuple(colour)) for colour in colours.tolist()]
    classifier.fit(images, [0, 0, 0, 1, 1, 1])
    assert backbone.seen == 6 + 6  # one view of each image: threshold 3, three shots
    classifier.predict(images[:4])
    assert backbone.seen == 6 + 6 + 4  # the support does not pass again


def test_images_that_look_the_same_do_not_end_in_nan():
    """The gradient of a cosine explodes where centred vectors are almost zero."""
    colours = np.random.default_rng(0).integers(0, 255, (6, 3), np.uint8)
    images = [Image.new("RGB", (20, 20), tuple(colour)) for colour in colours.tolist()]
    classifier = FewShotClassifier(TinyBackbone(threshold=3), cache=False, verbose=False)
    classifier.fit(images, [0, 0, 0, 1, 1, 1])
    assert np.isfinite(classifier.classifier_.losses_).all()
    assert np.isfinite(classifier.predict_proba(images)).all()
