"""How a command is declared, the options that commands share, and how what they name is opened.

An option reads and checks its value where it is declared. Options that belong together (`backbone`,
`decision`, ...) reach the command as one dictionary, which is passed on as keyword arguments.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from mivhead._util.files import METADATA_KEY, is_exported
from mivhead._util.imports import need
from mivhead._util.schema import parse_json
from mivhead.errors import ImageError, InputError, MivError, NotAvailableError, reading, reason_of

if TYPE_CHECKING:
    from mivhead.cli.output import Output
    from mivhead.features import FeatureTable
    from mivhead.fewshot import FewShotClassifier
    from mivhead.images.imageset import ImageSet
    from mivhead.model.exported import ExportedClassifier

Function = TypeVar("Function", bound=Callable[..., Any])
POSITIVE = click.IntRange(1)
NOT_NEGATIVE = click.IntRange(0)
LABELLED = (
    "A folder with one folder per class, a zip archive of one, a CSV file of paths and labels, "
    "a features file of `miv extract`, or a database table (lancedb://FOLDER/TABLE, "
    "postgresql://HOST/DATABASE?table=NAME)."
)
UNLABELLED = "Images, folders, zip archives or patterns."
PICTURES = (".png", ".svg", ".pdf")
# In the first or last bytes of what mivhead wrote: pages and pictures, CSV, JSON
OUR_MARKS, MARKED = (b"mivhead", b"file,decision,closest", b'"predictions": ['), 4096
FEATURES = (".safetensors", ".npz", ".npy", ".parquet")  # suffixes of files of features


class Command(click.Command):
    """A command whose help ends with examples."""

    examples = ""

    def format_epilog(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples as they are, one per line."""
        lines = "".join(f"  {line}\n" for line in self.examples.strip().splitlines())
        formatter.write(
            f"\nExamples:\n{lines}\nAll commands take --json, --quiet, --threads N and --debug: "
            "see `miv --help`.\n"
        )

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an image that cannot be read may be left out, if there is an option."""
        try:
            return super().invoke(ctx)
        except ImageError as error:
            if ctx.params.get("skip_bad") is not False:
                raise
            raise ImageError(f"{error} --skip-bad leaves out such images.") from error


def command(examples: str) -> Callable[[Callable[..., Any]], Command]:
    """Declare a command: its docstring is its help, its first argument the `Output`."""

    def declare(function: Callable[..., Any]) -> Command:
        declared = click.command(cls=Command)(click.pass_obj(function))
        declared.examples = examples
        return declared

    return declare


class Checked(click.ParamType[Any]):
    """A value that a function reads and checks."""

    def __init__(self, read: Callable[[str], Any], name: str) -> None:
        self.read, self.name = read, name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read a value."""
        try:
            return self.read(value)
        except MivError as error:
            self.fail(str(error), param, ctx)


def percentage(text: str) -> float:
    """Read a percentage, or a number between 0 and 1.

    >>> percentage("5%"), percentage("0.05")
    (0.05, 0.05)
    """
    number, sign, _ = text.partition("%")
    try:
        share = float(number) / (100 if sign else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise InputError(f"{text!r} is not a percentage, like 5% or 0.05.")
    return share


def class_prior(text: str) -> Any:
    """Read how frequent classes are: a name, or frequencies.

    >>> class_prior("robin=3,wren=0.5"), class_prior("shots")
    ({'robin': 3.0, 'wren': 0.5}, 'shots')
    """
    from mivhead.decision import read_prior  # here: it imports NumPy

    return read_prior(text)


def device(text: str) -> str:
    """Check that this computer has a device of PyTorch."""
    if text != "cpu":
        try:
            need("torch").empty(0, device=text)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            reason = str(error).partition("\n")[0].partition(". ")[0].rstrip(".")
            raise InputError(f"The device {text!r} cannot be used: {reason}.") from error
    return text


def output_file(*suffixes: str, replaces: str | None = None) -> Checked:
    """Return the type of a file to write; whether it can be written is checked at once."""

    def check(text: str) -> str:
        if suffixes and Path(text).suffix.lower() not in suffixes:
            raise InputError(f"{text} must be a {' or '.join(suffixes)} file.")
        check_output(text, replaces=replaces)
        return text

    return Checked(check, "FILE")


def check_output(path: str | Path, *, replaces: str | None = None) -> None:
    """Raise an error if a file cannot be written; called before any expensive work.

    Only a file of the kind `replaces` may be overwritten; None stands for tables, pages and
    pictures.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise InputError(f"The output {path} is not a file.")
    if path.exists() and not (kind_of(path) == replaces if replaces else _is_ours(path)):
        raise InputError(
            f"The output {path} exists and is not a {replaces or 'result'} file of mivhead, so it "
            "is not overwritten: choose another name or remove it."
        )
    if path.exists() and not os.access(path, os.W_OK):
        raise NotAvailableError(f"The output {path} is write-protected.")
    check_folder(path.parent)


def _is_ours(path: Path) -> bool:
    """Return whether mivhead wrote a table, a page or a picture, or the file is empty."""
    with reading(f"The output {path}"), path.open("rb") as file:
        start = file.read(MARKED)
        file.seek(max(0, path.stat().st_size - MARKED))
        ends = start + file.read()  # a PDF names its program at the end
    return not start or any(mark in ends for mark in OUR_MARKS)


def check_folder(folder: Path) -> None:
    """Raise an error if no file can be created in a folder."""
    if not folder.is_dir():
        raise InputError(f"The output folder {folder} does not exist; create it first.")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise NotAvailableError(f"Cannot write to {folder}: {reason_of(error)}.") from error


def new_folder(text: str) -> str:
    """Check that a folder can be written to, or created."""
    path = Path(text)
    if path.exists() and not path.is_dir():
        raise InputError(f"{text} is a file; give the name of a folder.")
    check_folder(path if path.exists() else path.absolute().parent)
    return text


PERCENTAGE = Checked(percentage, "PERCENT")
NEW_FOLDER = Checked(new_folder, "DIR")


def together(*options: Callable[[Function], Function]) -> Callable[[Function], Function]:
    """Declare several options at once."""

    def declare(function: Function) -> Function:
        for option in reversed(options):
            function = option(function)
        return function

    return declare


def _collect(group: str, ctx: click.Context, param: click.Parameter, value: Any) -> None:
    """Put the value of an option, if it has one, into the dictionary of its group."""
    values = ctx.params.setdefault(group, {})
    if value is not None:
        values[param.name] = value


def in_group(group: str) -> Callable[..., Callable[[Function], Function]]:
    """Declare options whose values reach the command in one dictionary."""
    return partial(click.option, callback=partial(_collect, group), expose_value=False)


def output(
    text: str, *suffixes: str, replaces: str | None = None
) -> Callable[[Function], Function]:
    """Declare `-o`, the file to write."""
    return click.option("-o", "--output", type=output_file(*suffixes, replaces=replaces), help=text)


def html(text: str) -> Callable[[Function], Function]:
    """Declare `--html`."""
    return click.option("--html", type=output_file(".html", ".htm"), metavar="PAGE", help=text)


host = click.option(
    "--host",
    default="127.0.0.1",
    metavar="ADDRESS",
    help="Address to listen on; 0.0.0.0 admits other devices in the network.",
)
skip_bad = click.option(
    "--skip-bad",
    is_flag=True,
    help="Leave out unreadable images and list them, instead of stopping at the first.",
)
label = click.option(
    "--label",
    metavar="COLUMN",
    help="Column of the labels in a CSV file or a database table (default: label or class).",
)
boxes = click.option(
    "--boxes",
    metavar="FILE",
    help="Boxes of the photos in a folder, whose crops are the images: MegaDetector's or COCO's "
    ".json, or a .csv with the columns file, x, y, w, h (and label).",
)
unlabelled = click.option(
    "--unlabelled",
    metavar="IMAGES",
    help="Images without labels to learn from as well: a folder, a zip archive or a features "
    "file. They should look like the images to predict; the model does not keep them.",
)
no_check = click.option(
    "--no-check",
    "check",
    is_flag=True,
    flag_value=False,
    default=True,
    show_default=False,
    help="Do not estimate the accuracy by cross-validation.",
)


def _backbone(group: str, named: str) -> Callable[[Function], Function]:
    """Declare which backbone to use, and where."""
    option = in_group(group)
    return together(
        option("--backbone", metavar="NAME", help=named),
        option(
            "--weights",
            metavar="FILE",
            help="Checkpoint of the backbone, .safetensors or .pth (default: as published).",
        ),
        option(
            "--device",
            type=Checked(device, "NAME"),
            help="Where a backbone of PyTorch runs: cpu, cuda, ... (default: a GPU, if any).",
        ),
    )


backbone = _backbone(  # the arguments of `load`
    "backbone", "File or URL of the model's backbone (default: the one that the model names)."
)
classifier = _backbone(  # the arguments of `new_classifier`
    "classifier",
    "A name from `miv backbones list`, timm:NAME, open_clip:NAME, hf-onnx:NAME, FILE.onnx or a URL "
    "(default: efficientnet_lite0).",
)
image_size = in_group("classifier")(
    "--image-size",
    type=POSITIVE,
    metavar="R",
    help="Input of R x R pixels, for models of timm and OpenCLIP (default: near 224).",
)
no_flip = in_group("classifier")(
    "--no-flip",
    is_flag=True,
    default=None,
    help="Do not mirror augmented views: for digits, letters or traffic signs.",
)

_decision = in_group("decision")
decision = together(
    _decision(
        "--reject",
        type=PERCENTAGE,
        help='How many images of known classes may become "none of these" (default: 10%).',
    ),
    _decision(
        "--max-errors",
        type=PERCENTAGE,
        help='How many of the names given may be wrong; other images are "unsure" (default: 10%).',
    ),
    _decision(
        "--prior",
        "class_prior",
        type=Checked(class_prior, "PRIOR"),
        help='How frequent the classes are among new images: "uniform", "shots" (in proportion to '
        'their shots), or frequencies such as "robin=3,wren=1" (default: uniform).',
    ),
)


# Files that arguments name.


def kind_of(path: str | Path) -> str | None:
    """Return `"model"`, `"features"` or `"exported"` for a file that mivhead wrote, else None.

    Only the header is read; the file is checked completely when it is loaded.
    """
    if not Path(path).is_file():
        return None
    if is_exported(path):
        from mivhead.model.exported import ExportedClassifier

        try:
            ExportedClassifier(path)
        except InputError:
            return None
        return "exported"
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy") as file:
            document = parse_json(file.metadata()[METADATA_KEY])
        return "features" if document.get("kind") == "features" else "model"
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # another kind of file


def is_features(path: str | Path) -> bool:
    """Return whether a path names a features file, corrupted or not, or a database table."""
    if "://" in str(path):
        from mivhead.images.decoding import check_local

        check_local(path)
        return True
    path = Path(path)
    return path.suffix.lower() in FEATURES or kind_of(path) == "features"


def read_features(path: str, label: str | None = None) -> FeatureTable:
    """Read a features file or a database table."""
    from mivhead import stores

    return stores.open(path, label=label).read()


def open_images(
    path: str, label: str | None, boxes: str | None = None, *, min_classes: int = 1
) -> ImageSet:
    """List labelled images, or the crops of boxes."""
    from mivhead.images.sources import open_labelled

    if boxes is None:
        return open_labelled(path, label=label, min_classes=min_classes)
    from mivhead.images.boxes import open_boxes

    return open_boxes(boxes, path).images(path, labelled=True, min_classes=min_classes)


def new_classifier(
    out: Output, *, no_flip: bool = False, backbone: str | None = None, **settings: Any
) -> FewShotClassifier:
    """Make a classifier to fit; its backbone is by default that of its features, or the usual."""
    from mivhead.fewshot import FewShotClassifier
    from mivhead.images.augmentation import Augmentation

    augmentation = Augmentation(flip=0.0) if no_flip else None
    return FewShotClassifier(backbone, augmentation=augmentation, verbose=out.verbose, **settings)


def check_model(path: str | Path) -> None:
    """Raise an error if somebody named the folder of the photos."""
    if Path(path).is_dir():
        raise InputError(f"{path} is a folder. The model comes first: `miv fit {path}` makes one.")


def load_any_model(
    path: str, out: Output, **backbone: Any
) -> FewShotClassifier | ExportedClassifier:
    """Read a model file, or an exported model; a backbone is loaded with the first image."""
    from mivhead.fewshot import load

    check_model(path)
    loaded = load(path, **backbone)
    loaded.verbose = out.verbose
    return loaded


def load_model(path: str, out: Output, **backbone: Any) -> FewShotClassifier:
    """Read a model file, for what an exported model cannot do."""
    from mivhead.fewshot import FewShotClassifier

    loaded = load_any_model(path, out, **backbone)
    if not isinstance(loaded, FewShotClassifier):
        raise InputError(f"{path} is an exported model: name a model of `miv fit`.")
    return loaded
