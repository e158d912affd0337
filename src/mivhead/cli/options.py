"""Options that several commands share, each defined once."""

from __future__ import annotations

import argparse
import textwrap
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from mivhead.backbones import DEFAULT_BACKBONE
from mivhead.errors import InputError
from mivhead.methods import METHODS

if TYPE_CHECKING:
    from mivhead.fewshot import FewShotClassifier

WORDS = {"true": True, "false": False, "none": None}
HAVE_OPTIONS = {
    "random_state": "give --seed",
    "device": "give --device",
    "recipe": "give --recipe",
    "verbose": "give --quiet",
    "preset": "it belongs to the backbone",
}
LINE = 79  # characters; argparse leaves descriptions as they are, for the sake of the examples


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are one sentence, like all other errors of `miv`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and where help is, and exit with code 2."""
        self.exit(2, f"miv: error: {message.rstrip('.')}; see `{self.prog} --help`.\n")


def new_command(
    subparsers: Any, name: str, summary: str, description: str, examples: str
) -> Parser:
    """Add a command with what all have in common."""
    parser: Parser = subparsers.add_parser(
        name,
        help=summary,
        description=textwrap.fill(description, LINE),
        epilog="examples:\n" + "".join(f"  {line}\n" for line in examples.strip().splitlines()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    group = parser.add_argument_group("general options")
    group.add_argument("--threads", type=positive, metavar="N", help="processor cores to use")
    group.add_argument("--quiet", action="store_true", help="no progress bars, no remarks")
    group.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def add_json(parser: argparse._ActionsContainer) -> None:
    """Add `--json`."""
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def add_device(parser: Parser) -> None:
    """Add `--device`."""
    parser.add_argument("--device", metavar="NAME", help="where to run, such as cpu or cuda")


def add_skip_bad(parser: Parser) -> None:
    """Add `--skip-bad`."""
    parser.add_argument(
        "--skip-bad",
        action="store_true",
        help="leave out images that cannot be read, and list them, instead of stopping",
    )


def add_model_backbone(parser: Parser) -> None:
    """Add `--backbone` for a model that was trained with one already."""
    parser.add_argument(
        "--backbone",
        metavar="NAME",
        help="where the model's backbone is, if not under its name: an address or a file",
    )
    _add_weights(parser)


def add_table(parser: Parser) -> argparse._ArgumentGroup:
    """Add what chooses rows of a table in a database."""
    group = parser.add_argument_group("tables in databases")
    group.add_argument(
        "--where",
        metavar="FILTER",
        help="only these rows; passed on to the database as it is: SQL, or JSON for Qdrant",
    )
    return group


def add_extraction(parser: Parser) -> None:
    """Add what decides about the features of labelled images."""
    parser.add_argument(
        "--backbone",
        metavar="NAME",
        help="a name of `miv backbones list`, timm:NAME, hf:FOLDER_OR_ID, FILE.onnx or an address "
        f"(default: {DEFAULT_BACKBONE})",
    )
    _add_weights(parser)
    parser.add_argument(
        "--seed", type=not_negative, default=0, metavar="N", help="seed of all that is random"
    )
    parser.add_argument(
        "--threshold",
        type=not_negative,
        metavar="T",
        help="classes with at most T shots get augmented views (default: the backbone's)",
    )
    parser.add_argument(
        "--no-augmentation", action="store_true", help="no augmented views, like --threshold 0"
    )
    parser.add_argument(
        "--no-flip",
        action="store_true",
        help="do not mirror views: for digits, letters, traffic signs",
    )


def _add_weights(parser: Parser) -> None:
    parser.add_argument(
        "--weights",
        metavar="FILE",
        help="checkpoint for the backbone (.safetensors, .pth) instead of its usual weights",
    )


def add_training(parser: Parser) -> None:
    """Add what decides about the classifier on features."""
    plain = [name for name in METHODS if not name.startswith("miv-")]  # without ablations
    parser.add_argument("--method", metavar="NAME", help=f"{', '.join(plain)} (default: miv)")
    parser.add_argument(
        "--recipe",
        metavar="NAME",
        help="how the MIV-head is trained: `mivhead` (default) or `paper`",
    )
    parser.add_argument(
        "--param",
        type=parameter,
        action="append",
        default=[],
        dest="params",
        metavar="NAME=VALUE",
        help="hyperparameter of the method, as `miv methods NAME` lists them; repeat for several",
    )


def classifier_from(args: argparse.Namespace) -> FewShotClassifier:
    """Make an unfitted classifier from the options of a command that takes labelled images."""
    from mivhead.fewshot import FewShotClassifier
    from mivhead.images.augmentation import Augmentation

    given = {name: getattr(args, name, None) for name in ("method", "recipe")}
    return FewShotClassifier(
        args.backbone or DEFAULT_BACKBONE,
        weights=args.weights,
        threshold=0 if args.no_augmentation else args.threshold,
        augmentation=Augmentation(flip=0.0) if args.no_flip else None,
        random_state=args.seed,
        device=args.device,
        method_params=dict(getattr(args, "params", ())),
        verbose=not args.quiet,
        **{name: value for name, value in given.items() if value is not None},
    )


def prepare(args: argparse.Namespace) -> None:
    """Apply `--threads` and check `--device`, before anything expensive."""
    import torch

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    device: str | None = getattr(args, "device", None)
    if device is None:
        return
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0].partition(". ")[0].rstrip(".")
        raise InputError(f"The device {device!r} cannot be used: {reason}.") from error


def positive(text: str) -> int:
    """Read a whole number from 1 up."""
    return _at_least(1, text)


def not_negative(text: str) -> int:
    """Read a whole number from 0 up."""
    return _at_least(0, text)


def parameter(text: str) -> tuple[str, Any]:
    """Read a hyperparameter: a number, true, false, none, or else a text.

    >>> parameter("steps=20"), parameter("use_views=True"), parameter("prototype=mean")
    (('steps', 20), ('use_views', True), ('prototype', 'mean'))
    """
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=VALUE")
    if name in HAVE_OPTIONS:
        raise argparse.ArgumentTypeError(f"{name} is no hyperparameter: {HAVE_OPTIONS[name]}")
    if value.lower() in WORDS:
        return name, WORDS[value.lower()]
    for kind in (int, float):
        with suppress(ValueError):
            return name, kind(value)
    return name, value


def _at_least(least: int, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value < 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} up")
    return value
