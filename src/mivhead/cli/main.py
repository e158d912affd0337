"""`miv`: find the command, run it, and turn errors into one sentence."""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NoReturn

import click

from mivhead._util.imports import PACKAGES, missing
from mivhead._util.text import one_line
from mivhead._util.threads import set_threads
from mivhead._version import __version__
from mivhead.cli.output import Output
from mivhead.errors import MivError, reason_of

EVERYDAY = {
    "app": "make and use a classifier in the browser",
    "demo": "see it work on handwritten digits, in a few seconds",
    "fit": "train a classifier on a few images per class",
    "predict": "classify new images",
    "evaluate": "measure the accuracy of a model on labelled images",
    "explain": "explain why a model predicts what it does",
    "add": "add images to a model: new classes, or more shots",
    "info": "show the contents of a file, or of this installation",
}
OTHERS = {
    "suggest": "suggest which images to label next",
    "remove": "remove classes or single shots from a model",
    "rename": "rename a class of a model, or merge two",
    "relabel": "move a shot of a model to another class",
    "export": "write a model as one ONNX file, or as a page for the browser",
    "extract": "write features of images to a file or database",
    "serve": "serve models over HTTP",
    "backbones": "list or download frozen backbones",
}
PLUGINS = "mivhead.commands"  # entry points by which other packages add commands
BENCH = {"bench": "compare classifiers on data sets, as in the paper"}  # of mivhead_bench
HELP = """Few-shot image classification: train a classifier in seconds from a few images per class.

\b
  miv demo                      # a first look, on images that come with it
  miv fit birds/                # birds/robin/1.jpg, birds/wren/1.jpg, ...
  miv predict birds.miv new/
"""
MODULES = dict.fromkeys(("add", "remove", "rename", "relabel"), "change")  # else its own name
FAILED = 2
BROKEN_PIPE = 141  # 128 + SIGPIPE, as a shell reports it
INTERRUPTED = 130  # 128 + SIGINT


class Miv(click.Group):
    """The commands, of which only the one that runs is imported."""

    def get_command(self, _ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command."""
        if cmd_name not in self.commands:
            return None
        module = import_module(f"mivhead.cli.{MODULES.get(cmd_name, cmd_name)}")
        loaded: click.Command = getattr(module, cmd_name)
        return loaded

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands in two groups, and the options of all of them."""
        for title, commands in (("Everyday", EVERYDAY), ("The rest", OTHERS | BENCH)):
            with formatter.section(title):
                formatter.write_dl(list(commands.items()))
        records = (option.get_help_record(ctx) for option in GENERAL.params)
        with formatter.section("Options of all commands"):
            formatter.write_dl([record for record in records if record])


GENERAL = click.Command(
    "miv",
    params=[
        click.Option(["--json"], is_flag=True, help="Print one JSON object."),
        click.Option(["--quiet"], is_flag=True, help="Hide progress bars and messages."),
        click.Option(
            ["--threads"],
            type=click.IntRange(1),
            metavar="N",
            help="Number of CPU threads (default: the cores that this process may use).",
        ),
        click.Option(["--debug"], is_flag=True, help="Show the traceback of an error."),
    ],
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    add_help_option=False,
)


@click.group(
    cls=Miv,
    help=HELP,
    commands={name: click.Command(name) for name in (*EVERYDAY, *OTHERS)},
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
        "show_default": True,
    },
    epilog="`miv COMMAND --help` explains a command, with examples.",
)
@click.version_option(__version__, message="mivhead %(version)s")
def miv() -> None:
    """Run `miv`: its commands do everything."""


def command() -> NoReturn:
    """Run `miv` as a process of its own."""
    code = main()
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the work is done
    if code == 0 and getattr(handler, "received", False):  # an exception that a callback lost
        code = _fail("stopped", INTERRUPTED)
    sys.exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `miv` with these arguments and return its exit code.

    >>> main(["info", "no-such.miv"])
    2
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a name that the terminal cannot show must not fail
            stream.reconfigure(errors="backslashreplace")
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        with warnings.catch_warnings():
            if "--debug" not in arguments:
                warnings.simplefilter("ignore")
                for name in ("matplotlib", "timm", "torch"):
                    logging.getLogger(name).setLevel(logging.ERROR)
            plugin = _plugin(arguments[0]) if arguments else None
            code = plugin(arguments[1:]) if plugin else invoke(miv, "miv", arguments)
        sys.stdout.flush()  # here, where an error can still be reported
        return code
    except KeyboardInterrupt:
        return _fail("stopped", INTERRUPTED)
    except BrokenPipeError:  # as in `miv ... | head`
        _discard_output()
        return BROKEN_PIPE
    # Any error becomes one sentence; --debug shows its traceback.
    except Exception as error:
        if "--debug" in arguments:
            traceback.print_exc()
        if isinstance(error, OSError) and error.filename is None:  # of printing, to a full disk
            _discard_output()
        return _fail(f"error: {_describe(error)}", FAILED)


def invoke(group: click.Group, name: str, arguments: list[str]) -> int:
    """Run a command of a group; return the exit code.

    The options of all commands may stand anywhere before `--`.
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    general = GENERAL.make_context("miv", arguments[:end])
    rest = [*general.args, *arguments[end:]]
    if general.params["threads"] is not None:
        set_threads(general.params["threads"])
    output = Output(json=general.params["json"], quiet=general.params["quiet"])
    try:
        with group.make_context(name, rest[:] or ["--help"], obj=output) as context:
            group.invoke(context)
    except click.exceptions.Exit as end:  # of --help and --version
        return end.exit_code if rest else FAILED
    return 0


def _plugin(name: str) -> Callable[[list[str]], int] | None:
    """Return a command of another package."""
    if name in miv.commands or name.startswith("-"):
        return None
    from importlib.metadata import entry_points

    for entry in entry_points(group=PLUGINS, name=name):
        command_of_plugin: Callable[[list[str]], int] = entry.load()
        return command_of_plugin
    return None


def _discard_output() -> None:
    """Redirect the rest of the output, which cannot be written, to nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _describe(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name in PACKAGES:
        error = missing(error.name)
    if isinstance(error, click.ClickException):
        path = getattr(getattr(error, "ctx", None), "command_path", "miv")
        text = error.format_message()
        if "unexpected extra argument" in text:
            text += ". Put names with spaces into quotes."
        return f"{text} See `{path} --help`."
    if isinstance(error, MivError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.filename or 'Output'}: {reason_of(error)}."
    if isinstance(error, MemoryError):
        return "Not enough memory: give fewer or smaller images."
    return (
        f"{type(error).__name__}: {error} - this is a bug in mivhead; please report it with the "
        "output of the same command with --debug."
    )


def _fail(message: str, code: int) -> int:
    print(f"miv: {one_line(message)}", file=sys.stderr)
    return code
