"""`miv plot`: pictures of what a model does with one image."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from mivhead.cli import options
from mivhead.errors import InputError, check_one_of

if TYPE_CHECKING:
    from PIL.Image import Image

    from mivhead.classifier import MIVClassifier
    from mivhead.diagnostics.tsne import Episode
    from mivhead.features import Features
    from mivhead.fewshot import Prediction
    from mivhead.images.imageset import ImageSet

TSNE_EXAMPLES = """
miv plot tsne birds.miv new.jpg -o tsne.png
miv plot tsne birds.miv new.jpg --truth robin --seed 3 -o tsne.pdf
miv plot tsne birds.miv new.jpg --beside tsa.miv --shots shots/ -o tsne.png
"""
ATTENTION_EXAMPLES = """
miv plot attention birds.miv new.jpg -o attention.png
miv plot attention birds.miv new.jpg --shots shots/ -o attention.png
"""


def add_parser(subparsers: Any) -> None:
    """Add the command and its actions."""
    parser = subparsers.add_parser(
        "plot",
        help="draw what a model does with an image",
        description="Pictures of what a MIV-head does with one image.",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)
    tsne = options.new_command(
        actions,
        "tsne",
        "shots, prototypes and query on a plane",
        "Lay the vectors of one episode out by t-SNE, one panel a block: shots are circles, "
        "prototypes squares, the image a star. Beside it, what nearest centroids compare.",
        TSNE_EXAMPLES,
    )
    _add_common(tsne)
    tsne.add_argument("--truth", metavar="CLASS", help="the image's class: the star's colour")
    tsne.add_argument(
        "--beside",
        metavar="MODEL",
        help="a model of a method that tunes the backbone, such as tsa, trained on the same "
        "images, instead of nearest centroids; needs --shots",
    )
    tsne.add_argument("--shots", metavar="DIR", help="the images both were trained on")
    tsne.add_argument(
        "--seed", type=options.not_negative, default=0, metavar="N", help="of the layout"
    )
    tsne.set_defaults(run=run_tsne)
    attention = options.new_command(
        actions,
        "attention",
        "where the head looked: in the image, and at which shots",
        "Show the attention of a MIV-head over the image, block by block, and over the shots of "
        "every class.",
        ATTENTION_EXAMPLES,
    )
    _add_common(attention)
    attention.add_argument(
        "--shots", metavar="DIR", help="the images the model was trained on, to be shown"
    )
    attention.set_defaults(run=run_attention)


def _add_common(parser: options.Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help="model file of the MIV-head")
    parser.add_argument("image", metavar="IMAGE", help="one image")
    parser.add_argument(
        "-o", "--output", required=True, metavar="FILE", help="picture: .png, .svg or .pdf"
    )
    options.add_model_backbone(parser)
    options.add_device(parser)


class _Case:
    """A model of the MIV-head, an image, and what the model says of it."""

    def __init__(self, args: argparse.Namespace) -> None:
        from mivhead.classifier import MIVClassifier
        from mivhead.cli.inputs import load_model
        from mivhead.cli.output import check_output
        from mivhead.diagnostics.pictures import check_format
        from mivhead.images.sources import open_unlabelled

        options.prepare(args)
        check_format(args.output)
        check_output(args.output)
        model = load_model(
            args.model, device=args.device, backbone=args.backbone, weights=args.weights
        )
        if not isinstance(model.classifier.classifier_, MIVClassifier):
            raise InputError(f"{args.model} is not a MIV-head, which alone can be drawn like this.")
        if model.identity is None:
            raise InputError(f"{args.model} knows no backbone, so images cannot pass it.")
        images: ImageSet = open_unlabelled([args.image])
        if len(images) != 1:
            raise InputError(f"{args.image} holds {len(images)} images; give one.")
        table = model.classifier.extract(images)
        self.classifier: MIVClassifier = model.classifier.classifier_
        self.features: Features = table.features
        self.prediction: Prediction = model.classifier.classify(table)[0]
        self.images = images
        self.names: list[str] = [str(name) for name in self.classifier.classes_]

    @property
    def title(self) -> str:
        return f"{self.prediction.label}: {100 * self.prediction.probability:.0f} %"


def run_tsne(args: argparse.Namespace) -> int:
    """Run `miv plot tsne`."""
    case = _Case(args)
    from mivhead.diagnostics.tsne import centroid_episode, draw_tsne, miv_episodes

    if args.truth is not None:
        check_one_of("--truth", args.truth, case.names)
    episodes = miv_episodes(case.classifier, case.features)
    if args.beside is None:
        episodes.append(centroid_episode(case.classifier, case.features))
    else:
        episodes.append(_tuned(args, case))
    draw_tsne(episodes, case.names, args.output, title=case.title, truth=args.truth, seed=args.seed)
    return _done(args)


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
        pictures=None if args.shots is None else _pictures(args.shots, case),
    )
    return _done(args)


def _tuned(args: argparse.Namespace, case: _Case) -> Episode:
    from mivhead.cli.inputs import load_model
    from mivhead.diagnostics.tsne import tuned_episode

    if args.shots is None:
        raise InputError("--beside needs --shots: a tuned backbone has to see the shots again.")
    shots = _shots(args.shots, case)
    model = load_model(args.beside, device=args.device)
    if [str(name) for name in model.classifier.classes_] != case.names:
        raise InputError(f"{args.beside} has other classes than {args.model}.")
    return tuned_episode(model.classifier, shots, case.images)


def _pictures(folder: str, case: _Case) -> list[Image]:
    shots = _shots(folder, case)
    return [shots.load(row) for row in range(len(shots))]


def _shots(folder: str, case: _Case) -> ImageSet:
    """Images of the shots, in the order that the model keeps them."""
    from mivhead.images.sources import open_labelled

    images = open_labelled(folder)
    labels = images.labels or ()
    counts = [labels.count(name) for name in case.names]
    if counts != case.classifier.shots_.tolist() or len(labels) != sum(counts):
        raise InputError(
            f"{folder} does not hold the images the model was trained on: the model has "
            f"{case.classifier.shots_.sum()} shots in {len(case.names)} classes, the folder "
            f"{len(labels)} in {len(set(labels))}."
        )
    order = sorted(range(len(labels)), key=lambda row: case.names.index(labels[row]))
    return images.take(order)


def _done(args: argparse.Namespace) -> int:
    if not args.quiet:
        print(f"Wrote {args.output}")
    return 0
