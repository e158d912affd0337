"""Options that several commands share, each defined once, and the parser that reads them."""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from mivhead._util.files import HUB
from mivhead._util.optional import need
from mivhead._util.threads import set_threads
from mivhead.backbones import DEFAULT_BACKBONE
from mivhead.errors import InputError, MivError
from mivhead.methods import METHODS

if TYPE_CHECKING:
    from mivhead.features import FeatureTable
    from mivhead.model.exported import ExportedClassifier
    from mivhead.model.fewshot import FewShotClassifier

LINE = 79  # characters; argparse does not wrap descriptions, for the sake of the examples
CONSTANTS = {"true": True, "false": False, "none": None}
# Commands of earlier versions, and what replaces them.
REMOVED = {
    "open-set": "`miv bench open-set` is now `miv bench run --protocol '10-way 5-shot, open'`"
}
# Parameters of a method that `--param` does not set, and what does.
NOT_PARAMS = {
    "random_state": "use --seed",
    "device": "use --device",
    "recipe": "use --recipe",
    "verbose": "use --quiet",
    "preset": "it is set by the backbone",
}


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence that suggests the nearest command or option."""

    def __init__(self, **settings: Any) -> None:
        settings = {"formatter_class": _HelpFormatter} | settings
        super().__init__(allow_abbrev=False, **settings)

    @property
    def parameters(self) -> list[argparse.Action]:
        """The arguments and options that it reads."""
        return list(self._actions)

    @property
    def commands(self) -> dict[str, Parser]:
        """The parsers of its commands, by name."""
        groups = (each for each in self._actions if isinstance(each, argparse._SubParsersAction))
        return {name: parser for group in groups for name, parser in group.choices.items()}

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse unknown arguments where the options of the command are known."""
        for each in sys.argv[1:] if args is None else args:
            # Unlike `Path.is_file`, this takes a long list for what it is: not a file.
            if each.startswith("-") and os.path.isfile(each):  # noqa: PTH113
                self.error(
                    f"the file {each} looks like an option; write ./{each}, or ./* instead of *"
                )
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            names = [each.partition("=")[0] for each in unknown if each.startswith("-")]
            hint = _suggest(names[0], self._option_string_actions) if names else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return namespace, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            if value in REMOVED:
                raise argparse.ArgumentError(None, REMOVED[value])
            names = [str(choice) for choice in action.choices]
            hint = _suggest(str(value), names) or f"; choose from {', '.join(names)}"
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}{hint}")

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and where to find help, and exit with code 2."""
        end = "" if message.endswith("?") else "."
        self.exit(2, f"miv: error: {message.rstrip('.')}{end} See `{self.prog} --help`.\n")


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows the default of every option that has one and does not describe it itself."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text, default = action.help, action.default
        shown = text is None or "default" in text or not action.option_strings
        if shown or default is None or default is False or default in ([], argparse.SUPPRESS):
            return text
        return f"{text} (default: %(default)s)"


def _suggest(value: str, names: Iterable[str]) -> str:
    import difflib

    near = difflib.get_close_matches(value, names, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def new_command(
    subparsers: Any, name: str, summary: str, description: str, examples: str
) -> Parser:
    """Add a command with the help and the options that all commands have."""
    parser: Parser = subparsers.add_parser(
        name,
        help=summary,
        description=textwrap.fill(description, LINE),
        epilog="examples:\n" + "".join(f"  {line}\n" for line in examples.strip().splitlines()),
    )
    group = parser.add_argument_group("general options")
    group.add_argument(
        "--threads",
        type=positive,
        metavar="N",
        help="number of CPU threads (default: the cores that this process may use)",
    )
    group.add_argument("--quiet", action="store_true", help="hide progress bars and messages")
    group.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def new_group(subparsers: Any, name: str, summary: str, description: str, example: str) -> Any:
    """Add a group of commands, and return the subparsers of its actions."""
    parser = subparsers.add_parser(
        name,
        help=summary,
        description=textwrap.fill(description, LINE),
        epilog=f"examples:\n  {example}\n\n`miv {name} ACTION --help` explains an action.",
    )
    return parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)


def add_json(parser: argparse._ActionsContainer) -> None:
    """Add `--json`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_device(parser: Parser) -> None:
    """Add `--device`."""
    parser.add_argument(
        "--device", metavar="NAME", help="cpu, cuda, ... (default: a GPU if there is one)"
    )


def add_unlabelled(parser: argparse.ArgumentParser) -> None:
    """Add the option for images without labels."""
    parser.add_argument(
        "--unlabelled",
        metavar="FOLDER",
        help="images without labels to learn from as well: a folder, a zip archive or a features "
        "file. They should look like the images to predict; the model does not keep them",
    )


def read_unlabelled(path: str | None) -> Any:
    """Return the features in a file, or the path of images."""
    from mivhead.cli.loading import is_features

    if path is None or not is_features(path):
        return path
    from mivhead import stores

    with stores.open(path) as store:
        return store.read()


def add_skip_bad(parser: Parser) -> None:
    """Add `--skip-bad`."""
    parser.add_argument(
        "--skip-bad",
        action="store_true",
        help="leave out unreadable images and list them, instead of stopping at the first",
    )


def add_boxes(parser: Parser) -> None:
    """Add the options for boxes, whose crops are the images."""
    group = parser.add_argument_group("boxes")
    group.add_argument(
        "--boxes",
        metavar="FILE",
        help="boxes of the photos in a folder: the crops are the images. MegaDetector's or COCO's "
        ".json, a .csv with the columns file, x, y, w, h (and label), or a folder of YOLO's .txt "
        "or Pascal VOC's .xml files",
    )
    group.add_argument(
        "--box-margin",
        type=share,
        default=0.1,
        metavar="SHARE",
        help="enlarge a box on each side by this share of its longer side",
    )
    group.add_argument(
        "--box-confidence",
        type=share,
        default=0.2,
        metavar="SHARE",
        help="leave out boxes that the detector is less sure of",
    )


def open_boxes(args: argparse.Namespace, folder: str, **how: Any) -> Any:
    """Return the boxes that `--boxes` names, and their crops of the photos in a folder."""
    from mivhead.images import boxes

    if getattr(args, "label", None) or getattr(args, "encoding", None):
        raise InputError("--label and --encoding are for CSV files and databases, not for --boxes.")
    found = boxes.open_boxes(args.boxes, folder)
    settings = {"margin": args.box_margin, "confidence": args.box_confidence}
    return found, found.images(folder, **settings, **how)


def add_old_name(parser: Any, old: str, new: str, **how: Any) -> None:
    """Add the name that an option had in an earlier version: hidden, and it says the new one."""

    class Renamed(argparse.Action):
        def __call__(self, _parser: Any, namespace: Any, value: Any, _option: Any = None) -> None:
            print(f"{old} is now called {new}.", file=sys.stderr)
            setattr(namespace, self.dest, True if self.nargs == 0 else value)

    parser.add_argument(old, action=Renamed, help=argparse.SUPPRESS, **how)


class _JoinNames(argparse.Action):
    """Join the names of an option that is given several times: they are used together."""

    def __call__(self, _parser: Any, namespace: Any, value: Any, _option: Any = None) -> None:
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, value if before is None else f"{before}+{value}")


def add_model_backbone(parser: Parser) -> None:
    """Add `--backbone` and `--weights` for a model that has been trained."""
    parser.add_argument(
        "--backbone",
        action=_JoinNames,
        metavar="NAME",
        help="file or URL of the model's backbone (default: the backbone that the model names)",
    )
    _add_weights(parser)


def add_decision(parser: Parser, *, sets: bool = True) -> None:
    """Add the options that say when a prediction is "unsure" or "none of these"."""
    group = parser.add_argument_group("decisions")
    group.add_argument(
        "--reject",
        type=share,
        metavar="SHARE",
        help='share of the images of known classes that may be called "none of these"; a larger '
        "share also rejects more images of other things, 0 rejects nothing (default: 10%%)",
    )
    group.add_argument(
        "--max-errors",
        type=share,
        metavar="SHARE",
        help='share of the names given that may be wrong; the other images are "unsure" '
        "(default: 10%%)",
    )
    if sets:
        group.add_argument(
            "--coverage",
            type=share,
            metavar="SHARE",
            help="also predict a set of classes for each image; this share of the sets holds the "
            "right one",
        )
    add_prior(group)


def add_prior(parser: argparse._ActionsContainer) -> None:
    """Add `--prior`."""
    parser.add_argument(
        "--prior",
        type=prior,
        metavar="PRIOR",
        help='how frequent the classes are among new images: "uniform" (all alike), "shots" (in '
        'proportion to their shots), or frequencies such as "robin=3,wren=1" (default: uniform, '
        "or as the model was fitted)",
    )


def prior(text: str) -> Any:
    """Read a class prior: a name, or frequencies.

    >>> prior("robin=3,wren=0.5"), prior("shots")
    ({'robin': 3.0, 'wren': 0.5}, 'shots')
    """
    from mivhead.ensemble.balance import read_prior  # here: it imports NumPy

    try:
        return read_prior(text)
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error).rstrip(".")) from None


def decision(
    args: argparse.Namespace, model: FewShotClassifier | ExportedClassifier, *, warn: bool = True
) -> dict[str, Any]:
    """Return the arguments of `FewShotClassifier.classify` that these options set."""
    names = ("reject", "max_errors", "coverage")
    given = {name: v for name in names if (v := getattr(args, name, None)) is not None}
    if (reason := model.no_decision) is not None:
        if given:
            option = next(iter(given)).replace("_", "-")
            raise InputError(f"--{option} cannot be used: {reason}")
        if warn and not args.quiet:
            print(f"Every image gets a class: {reason}", file=sys.stderr)
    if args.prior is not None:
        given["class_prior"] = args.prior
    model.thresholds(**given)  # an error now, not after the images have been read
    return given


def add_table(parser: Parser) -> argparse._ArgumentGroup:
    """Add the options that select rows of a database table."""
    group = parser.add_argument_group("database tables")
    group.add_argument(
        "--where",
        metavar="FILTER",
        help="use only these rows; passed to the database unchanged: SQL, or JSON for Qdrant",
    )
    return group


def add_csv(parser: Parser) -> None:
    """Add the options that say how to read a CSV file of paths and labels."""
    group = parser.add_argument_group("CSV files and database tables")
    group.add_argument(
        "--label",
        metavar="COLUMN",
        help="column of the labels (default: label; in a CSV file also class)",
    )
    group.add_argument(
        "--encoding", metavar="NAME", help="encoding of a CSV file, such as cp1252 (default: utf-8)"
    )


def add_extraction(parser: Parser) -> None:
    """Add the options that determine the features of labelled images."""
    parser.add_argument(
        "--backbone",
        action=_JoinNames,
        metavar="NAME",
        help="a name from `miv backbones list`, timm:NAME, open_clip:NAME, hf:FOLDER_OR_ID, "
        "hf-onnx:FOLDER_OR_ID, FILE.onnx or a URL; "
        f"repeat the option to use several backbones together (default: {DEFAULT_BACKBONE})",
    )
    _add_weights(parser)
    add_image_size(parser)
    parser.add_argument("--seed", type=not_negative, default=0, metavar="N", help="random seed")
    parser.add_argument(
        "--threshold",
        type=not_negative,
        metavar="T",
        help="augment classes with at most T shots; the default recipe augments none with more "
        "than four (default: set by the backbone)",
    )
    parser.add_argument(
        "--no-augmentation", action="store_true", help="do not augment; same as --threshold 0"
    )
    parser.add_argument(
        "--no-flip",
        action="store_true",
        help="do not mirror augmented views: for digits, letters or traffic signs",
    )


def add_names(parser: Parser) -> None:
    """Add the options on class names: `--names`, `--template`, `--classes`, `--class-vectors`."""
    parser.add_argument(
        "--names",
        action=argparse.BooleanOptionalAction,
        help="use the names of the classes as knowledge, with a text-and-image backbone such as "
        "clip_vitb32, siglip2_base or bioclip2 (default: if the backbone has a text tower); names "
        "that do not help are not used",
    )
    parser.add_argument(
        "--template",
        action="append",
        dest="templates",
        metavar="TEXT",
        help='sentence in which {} stands for the name, such as "a photo of a {}, a bird"; may be '
        "repeated",
    )
    parser.add_argument(
        "--classes",
        metavar="FILE",
        help="text file with the names of further classes, one per line; they need no images",
    )
    add_class_vectors(parser)


def add_class_vectors(parser: Parser) -> None:
    """Add `--class-vectors`."""
    parser.add_argument(
        "--class-vectors",
        metavar="FILE",
        help="your own vectors of the class names: a features file or database table with one "
        "labelled vector per class, in the space of the backbone's last block",
    )


def read_classes(path: str | None) -> list[str]:
    """Read the names of a file that `--classes` names, one per line."""
    if path is None:
        return []
    from mivhead.cli.labels import check_class_names

    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"{path} does not exist.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as a text file: {error}.") from error
    found = [line.strip() for line in text.splitlines() if line.strip()]
    if not found:
        raise InputError(f"{path} holds no names: write one class per line.")
    check_class_names(found)
    return found


def read_class_vectors(address: str | None) -> FeatureTable | None:
    """Read the table that `--class-vectors` names."""
    if address is None:
        return None
    from mivhead import stores

    with stores.open(address) as store:
        return store.read()


def add_image_size(parser: argparse._ActionsContainer) -> None:
    """Add `--image-size`."""
    parser.add_argument(
        "--image-size",
        type=positive,
        metavar="R",
        help="input of R x R pixels, for models of timm, OpenCLIP and transformers (default: as in "
        "training, but near 224 for large ViTs)",
    )


def _add_weights(parser: Parser) -> None:
    parser.add_argument(
        "--weights",
        metavar="FILE",
        help="checkpoint of the backbone, .safetensors or .pth (default: its published weights)",
    )


def add_training(parser: Parser) -> None:
    """Add the options that determine the classifier."""
    plain = [name for name in METHODS if not name.startswith("miv-")]  # without ablations
    parser.add_argument("--method", metavar="NAME", help=f"{', '.join(plain)} (default: miv)")
    parser.add_argument(
        "--recipe",
        metavar="NAME",
        help="mivhead, experts (without the trained head: faster, and about as accurate) or paper "
        "(default: mivhead)",
    )
    parser.add_argument(
        "--param",
        type=parameter,
        action="append",
        default=[],
        dest="params",
        metavar="NAME=VALUE",
        help="hyperparameter of the method, listed by `miv methods NAME`; may be repeated",
    )


def classifier_from(args: argparse.Namespace) -> FewShotClassifier:
    """Make an unfitted classifier from the options of a command that takes labelled images."""
    from mivhead.images.augmentation import Augmentation
    from mivhead.model.fewshot import FewShotClassifier

    given = {name: getattr(args, name, None) for name in ("method", "recipe")}
    return FewShotClassifier(
        args.backbone,
        weights=args.weights,
        image_size=args.image_size,
        threshold=0 if args.no_augmentation else args.threshold,
        augmentation=Augmentation(flip=0.0) if args.no_flip else None,
        random_state=args.seed,
        device=args.device,
        class_prior=getattr(args, "prior", None) or "uniform",
        method_params=dict(getattr(args, "params", ())),
        names=getattr(args, "names", None),
        templates=getattr(args, "templates", None),
        verbose=not args.quiet,
        **{name: value for name, value in given.items() if value is not None},
    )


def prepare(args: argparse.Namespace) -> None:
    """Apply `--threads` and check `--device`, before any expensive work."""
    if args.threads is not None:
        set_threads(args.threads)
    device: str | None = getattr(args, "device", None)
    if device in (None, "cpu"):
        return
    torch = need("torch", "torch")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0].partition(". ")[0].rstrip(".")
        raise InputError(f"The device {device!r} cannot be used: {reason}.") from error


def model(text: str) -> str:
    """Read the name of a model file; a model of the hub (hf://OWNER/NAME) is downloaded."""
    if not text.startswith(HUB):
        return text
    from mivhead.model.load import fetch

    try:
        return str(fetch(text))
    except MivError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def positive(text: str) -> int:
    """Read an integer of at least 1."""
    return _at_least(1, text)


def not_negative(text: str) -> int:
    """Read an integer of at least 0."""
    return _at_least(0, text)


def share(text: str) -> float:
    """Read a share, as a percentage or as a number between 0 and 1.

    >>> share("5%"), share("0.05"), share("90 %")
    (0.05, 0.05, 0.9)
    """
    number, percent, _ = text.partition("%")
    try:
        value = float(number) / (100 if percent else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share, like 5% or 0.05")
    return value


def names(text: str) -> list[str]:
    """Read names that are separated by commas.

    >>> names("miv, ncc")
    ['miv', 'ncc']
    """
    return [name.strip() for name in text.split(",") if name.strip()]


def parameter(text: str) -> tuple[str, Any]:
    """Read a hyperparameter: a number, true, false, none, or else a string.

    >>> parameter("steps=20"), parameter("use_views=True"), parameter("prototype=mean")
    (('steps', 20), ('use_views', True), ('prototype', 'mean'))
    """
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=VALUE")
    if name in NOT_PARAMS:
        raise argparse.ArgumentTypeError(f"{name} is not a hyperparameter: {NOT_PARAMS[name]}")
    if value.lower() in CONSTANTS:
        return name, CONSTANTS[value.lower()]
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
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least {least}")
    return value
