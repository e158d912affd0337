"""`miv plot`: drawings of how a MIV-head classifies one image."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from mivhead.cli import options
from mivhead.cli.loading import check_takes_images, load_model
from mivhead.cli.output import check_output, print_json
from mivhead.errors import InputError, check_one_of

if TYPE_CHECKING:
    from mivhead.diagnostics.plots import Case
    from mivhead.model.fewshot import FewShotClassifier

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


def _case(args: argparse.Namespace) -> Case:
    """Check the arguments, load the model and classify the image."""
    from mivhead.classifier import MIVClassifier
    from mivhead.diagnostics.pictures import check_format

    options.prepare(args)
    check_format(args.output)
    check_output(args.output)
    model = load_model(args.model, args)
    if not isinstance(model.classifier_, MIVClassifier):
        raise InputError(f"{args.model} is not a MIV-head; `miv plot` draws only those.")
    check_takes_images(model, args.model)
    from mivhead.diagnostics.plots import Case

    return Case(model, args.image)


def run_tsne(args: argparse.Namespace) -> int:
    """Run `miv plot tsne`."""
    case = _case(args)
    if args.truth is not None:
        check_one_of("--truth", args.truth, case.names)
    compare = None if args.compare is None else _load_compared(args, case)
    how = {"truth": args.truth, "seed": args.seed, "shots": args.shots}
    case.plot_tsne(args.output, compare=compare, **how)
    return _done(args, case)


def run_attention(args: argparse.Namespace) -> int:
    """Run `miv plot attention`."""
    case = _case(args)
    case.plot_attention(args.output, shots=args.shots)
    return _done(args, case)


def _load_compared(args: argparse.Namespace, case: Case) -> FewShotClassifier:
    if args.shots is None:
        raise InputError(
            "--compare needs --shots, because a tuned backbone embeds the shots again."
        )
    model = load_model(args.compare, args)
    if model.identity_ != case.model.identity_:  # --backbone and --weights are the other model's
        own = {"backbone": None, "weights": None}
        model = load_model(args.compare, argparse.Namespace(**vars(args) | own))
    return model


def _done(args: argparse.Namespace, case: Case) -> int:
    if args.json:
        prediction = {
            "label": str(case.prediction.label),
            "probability": case.prediction.probability,
        }
        print_json({"file": args.output, "image": args.image, **prediction})
    elif not args.quiet:
        print(f"Saved {args.output}.")
    return 0
