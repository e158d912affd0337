"""`miv plot`: drawings of how a MIV-head classifies one image."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from mivhead.cli import options
from mivhead.cli.loading import load_model
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
EPISODE_EXAMPLES = """
miv plot episode aircraft --data sets/ -o aircraft.pdf
miv plot episode omniglot --data sets/ --backbone dino_vits16 --compare ett -o omniglot.pdf
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
    _add_episode(actions)


def _add_tsne(actions: Any) -> None:
    parser = options.new_command(
        actions,
        "tsne",
        "draw shots, prototypes and the image on a plane, by t-SNE",
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
        "draw which patches and shots the head attends to",
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


def _add_episode(actions: Any) -> None:
    parser = options.new_command(
        actions,
        "episode",
        "draw the paper's t-SNE figure of one episode",
        "Sample a task of a data set, fit the MIV-head with the paper's recipe and a method that "
        "tunes the backbone, and project the vectors that both compare for one query onto a plane "
        "by t-SNE: one panel per block of the MIV-head, and one for the other method. Shots are "
        "circles, prototypes squares, the query a star.",
        EPISODE_EXAMPLES,
    )
    parser.add_argument("set", metavar="SET", help="data set, such as aircraft or omniglot")
    parser.add_argument(
        "--data", metavar="DIR", help="folder of data sets (default: the variable MIV_DATA)"
    )
    _add_output(parser)
    parser.add_argument(
        "--backbone",
        default="resnet50",
        metavar="NAME",
        help="a name from `miv backbones list`, or timm:NAME (default: %(default)s)",
    )
    parser.add_argument("--weights", metavar="FILE", help="checkpoint of the backbone")
    parser.add_argument(
        "--compare",
        default="tsa",
        metavar="METHOD",
        help="method that tunes the backbone, or none for nearest centroids (default: %(default)s)",
    )
    parser.add_argument(
        "--protocol", default="varying", metavar="NAME", help="as for `miv bench run`"
    )
    for name, text in (("task", "number of the task"), ("query", "number of its query")):
        parser.add_argument(
            f"--{name}", type=options.not_negative, default=0, metavar="N", help=f"{text} (from 0)"
        )
    parser.add_argument(
        "--seed", type=options.not_negative, default=0, metavar="N", help="random seed"
    )
    options.add_device(parser)
    options.add_json(parser)
    parser.set_defaults(run=run_episode)


def run_episode(args: argparse.Namespace) -> int:
    """Run `miv plot episode`."""
    import os

    from mivhead.diagnostics.pictures import check_format

    options.prepare(args)
    check_format(args.output)
    check_output(args.output)
    data = args.data or os.environ.get("MIV_DATA")
    if data is None:
        raise InputError(
            "Name the folder of your data sets with --data or in the variable MIV_DATA."
        )
    from mivhead.benchmark.episode import draw_episode

    draw_episode(
        args.set,
        data,
        args.output,
        backbone=args.backbone,
        weights=args.weights,
        compare=None if args.compare == "none" else args.compare,
        protocol=args.protocol,
        task=args.task,
        query=args.query,
        seed=args.seed,
        device=args.device,
    )
    if args.json:
        print_json({"file": args.output, "set": args.set, "task": args.task, "query": args.query})
    elif not args.quiet:
        print(f"Saved {args.output}.")
    return 0


def _add_output(parser: options.Parser) -> None:
    parser.add_argument(
        "-o",
        "--output",
        required=True,
        metavar="FILE",
        help="picture to write: .png, .svg or .pdf",
    )


def _add_common(parser: options.Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help="model file of a MIV-head")
    parser.add_argument("image", metavar="IMAGE", help="one image")
    _add_output(parser)
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
    model.check_takes(features=False)
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
