"""`miv plot`: drawings of how a MIV-head classifies one image."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from mivhead.cli import options
from mivhead.cli.inputs import check_takes_images, load_model
from mivhead.cli.output import check_output, print_json
from mivhead.errors import InputError, check_one_of

if TYPE_CHECKING:
    from PIL.Image import Image

    from mivhead.classifier import MIVClassifier
    from mivhead.diagnostics.tsne import Embeddings
    from mivhead.features import Features
    from mivhead.images.imageset import ImageSet
    from mivhead.prediction import Prediction
    from mivhead.shots import Shots

TSNE_EXAMPLES = """
miv plot tsne birds.miv new.jpg -o tsne.png
miv plot tsne birds.miv new.jpg --truth robin --seed 3 -o tsne.pdf
miv plot tsne birds.miv new.jpg --compare tsa.miv --shots shots/ -o tsne.png
"""
ATTENTION_EXAMPLES = """
miv plot attention birds.miv new.jpg -o attention.png
miv plot attention birds.miv new.jpg --shots shots/ -o attention.png
"""


def add_parser(subparsers: Any) -> None:
    """Add the command and its actions."""
    actions = options.new_group(
        subparsers,
        "plot",
        "draw how a model classifies an image",
        "Draw how a MIV-head classifies one image.",
        "miv plot attention birds.miv new.jpg -o attention.png",
    )
    _add_tsne(actions)
    _add_attention(actions)


def _add_tsne(actions: Any) -> None:
    parser = options.new_command(
        actions,
        "tsne",
        "shots, prototypes and the image on a plane, by t-SNE",
        "Project the vectors that the head compares onto a plane by t-SNE, in one panel per block: "
        "shots are circles, prototypes squares, the image a star. Another panel shows the vectors "
        "that a nearest-centroid classifier compares.",
        TSNE_EXAMPLES,
    )
    _add_common(parser)
    parser.add_argument(
        "--truth", metavar="CLASS", help="true class of the image; colours the star"
    )
    parser.add_argument(
        "--compare",
        metavar="MODEL",
        help="compare with this model, which tunes the backbone (tsa, ...) and was trained on the "
        "same images, instead of nearest centroids; needs --shots",
    )
    parser.add_argument("--shots", metavar="DIR", help="the images both models were trained on")
    parser.add_argument(
        "--seed", type=options.not_negative, default=0, metavar="N", help="random seed of t-SNE"
    )
    parser.set_defaults(run=run_tsne)


def _add_attention(actions: Any) -> None:
    parser = options.new_command(
        actions,
        "attention",
        "the patches and the shots that the head attends to",
        "Draw the attention of a MIV-head over the image, block by block, and over the shots of "
        "every class.",
        ATTENTION_EXAMPLES,
    )
    _add_common(parser)
    parser.add_argument(
        "--shots",
        metavar="DIR",
        help="the images the model was trained on (default: the pictures in the model file)",
    )
    parser.set_defaults(run=run_attention)


def _add_common(parser: options.Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help="model file of a MIV-head")
    parser.add_argument("image", metavar="IMAGE", help="one image")
    parser.add_argument(
        "-o",
        "--output",
        required=True,
        metavar="FILE",
        help="picture to write: .png, .svg or .pdf",
    )
    options.add_model_backbone(parser)
    options.add_device(parser)
    options.add_json(parser)


class _Case:
    """A MIV-head, one image, and the prediction for it."""

    def __init__(self, args: argparse.Namespace) -> None:
        from mivhead.classifier import MIVClassifier
        from mivhead.diagnostics.pictures import check_format
        from mivhead.images.sources import open_unlabelled

        options.prepare(args)
        check_format(args.output)
        check_output(args.output)
        model = load_model(args.model, args)
        if not isinstance(model.classifier_, MIVClassifier):
            raise InputError(f"{args.model} is not a MIV-head; `miv plot` draws only those.")
        check_takes_images(model, args.model)
        self.images: ImageSet = open_unlabelled([args.image])
        if len(self.images) != 1:
            raise InputError(f"{args.image} holds {len(self.images)} images; give one.")
        table = model.extract(self.images)
        self.identity = model.identity_
        self.classifier: MIVClassifier = model.classifier_
        self.shots: Shots | None = model.shots_
        self.features: Features = table.features
        self.prediction: Prediction = model.classify(table)[0]
        self.names: list[str] = [str(name) for name in self.classifier.classes_]

    @property
    def title(self) -> str:
        return f"{self.prediction.label}: {100 * self.prediction.probability:.0f} %"


def run_tsne(args: argparse.Namespace) -> int:
    """Run `miv plot tsne`."""
    case = _Case(args)
    from mivhead.diagnostics.tsne import centroid_embeddings, draw_tsne, miv_embeddings

    if args.truth is not None:
        check_one_of("--truth", args.truth, case.names)
    panels = miv_embeddings(case.classifier, case.features)
    if args.compare is None:
        panels.append(centroid_embeddings(case.classifier, case.features))
    else:
        panels.append(_tuned(args, case))
    draw_tsne(panels, case.names, args.output, title=case.title, truth=args.truth, seed=args.seed)
    return _done(args, case)


def run_attention(args: argparse.Namespace) -> int:
    """Run `miv plot attention`."""
    import numpy as np

    case = _Case(args)
    from mivhead.diagnostics.attention import draw_attention, explain

    ends = np.cumsum(case.classifier.shots_)
    starts = ends - case.classifier.shots_
    rows = {n: np.arange(a, b) for n, a, b in zip(case.names, starts, ends, strict=True)}
    classes = [(str(n), p, rows[str(n)]) for n, p in case.prediction.probabilities.items()]
    draw_attention(
        case.images.load(0),
        explain(case.classifier, case.features),
        classes,
        args.output,
        title=case.title,
        pictures=_pictures(args.shots, case),
    )
    return _done(args, case)


def _tuned(args: argparse.Namespace, case: _Case) -> Embeddings:
    from mivhead.diagnostics.tsne import tuned_embeddings

    if args.shots is None:
        raise InputError(
            "--compare needs --shots, because a tuned backbone embeds the shots again."
        )
    shots = _shots(args.shots, case)
    model = load_model(args.compare, args)
    if model.identity_ != case.identity:  # --backbone and --weights belong to the other model
        own = {"backbone": None, "weights": None}
        model = load_model(args.compare, argparse.Namespace(**vars(args) | own))
    if [str(name) for name in model.classes_] != case.names:
        raise InputError(f"{args.compare} has other classes than {args.model}.")
    return tuned_embeddings(model, shots, case.images)


def _pictures(folder: str | None, case: _Case) -> list[Image] | None:
    """Load the pictures of the shots, in the order of the model's support."""
    from mivhead.images.decoding import load_image

    if folder is not None:
        images = _shots(folder, case)
        return [images.load(row) for row in range(len(images))]
    pictures = () if case.shots is None else case.shots.pictures
    kept = [load_image(each) for each in pictures if each is not None]
    return kept if kept and len(kept) == len(pictures) else None


def _shots(folder: str, case: _Case) -> ImageSet:
    """Open the images of the shots, in the order of the model's support."""
    from mivhead.extraction.pipeline import LoadedImage
    from mivhead.images.sources import open_labelled

    images = open_labelled(folder)
    labels = images.labels or ()
    counts = [labels.count(name) for name in case.names]
    if counts != case.classifier.shots_.tolist() or len(labels) != sum(counts):
        raise InputError(
            f"{folder} does not hold the images that the model was trained on: the model has "
            f"{case.classifier.shots_.sum()} shots in {len(case.names)} classes, the folder "
            f"{len(labels)} in {len(set(labels))}."
        )
    hashes = [LoadedImage(source).hash for source in images.sources]
    known = () if case.shots is None else case.shots.hashes
    if sorted(hashes) == sorted(known):
        rows = dict(zip(hashes, range(len(hashes)), strict=True))
        return images.take(rows[each] for each in known)
    # A model of an earlier version does not know its images: they are in the order of the folder.
    return images.take(sorted(range(len(labels)), key=lambda row: case.names.index(labels[row])))


def _done(args: argparse.Namespace, case: _Case) -> int:
    if args.json:
        prediction = {
            "label": str(case.prediction.label),
            "probability": case.prediction.probability,
        }
        print_json({"file": args.output, "image": args.image, **prediction})
    elif not args.quiet:
        print(f"Saved {args.output}.")
    return 0
