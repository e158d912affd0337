"""`miv`: parse the arguments, run one command, turn errors into one sentence."""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

from mivhead._util.optional import explain_missing
from mivhead._util.text import one_line
from mivhead._version import __version__
from mivhead.cli import (
    app,
    backbones,
    bench,
    cache,
    card,
    change,
    data,
    demo,
    evaluate,
    explain,
    export,
    extract,
    fit,
    info,
    mcp,
    methods,
    plot,
    predict,
    push,
    serve,
    suggest,
)
from mivhead.cli.options import Parser
from mivhead.errors import ImageError, MivError

COMMANDS = (
    fit,
    predict,
    change,
    explain,
    suggest,
    evaluate,
    export,
    extract,
    info,
    card,
    push,
    app,
    serve,
    mcp,
    methods,
    backbones,
    data,
    bench,
    plot,
    cache,
    demo,
)
FAILED = 2
BROKEN_PIPE = 141  # 128 + SIGPIPE, as a shell reports it
INTERRUPTED = 130  # 128 + SIGINT


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
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()  # here, where an error can still be reported
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


def build_parser(command: str | None = None) -> Parser:
    """Make the parser of all commands, or of one alone, which takes less time."""
    parser = Parser(
        prog="miv",
        description="Few-shot image classification: train a classifier in seconds\n"
        "from a folder with a few images per class.",
        epilog="examples:\n"
        "  miv demo                            # a first look, on images that come with it\n"
        "  miv fit shots/ -o birds.miv         # shots/robin/1.jpg, shots/wren/1.jpg, ...\n"
        "  miv predict birds.miv new/*.jpg\n\n"
        "`miv COMMAND --help` explains a command, with examples.",
    )
    parser.add_argument("--version", action="version", version=f"mivhead {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    alone = [each for each in COMMANDS if command in _names(each)]
    for each in alone or COMMANDS:
        each.add_parser(subparsers)
    return parser


def _names(module: ModuleType) -> Sequence[str]:
    """Return the commands of a module: that of its own name, or those that it lists."""
    return getattr(module, "COMMANDS", None) or [module.__name__.rpartition(".")[2]]


def _run(arguments: list[str]) -> int:
    parser = build_parser(next(iter(arguments), None))
    args = parser.parse_args(arguments)
    if args.command is None:
        parser.print_help()
        return FAILED
    with warnings.catch_warnings():
        if not args.debug:
            _silence_libraries()
        try:
            code: int = args.run(args)
        except ImageError as error:
            if getattr(args, "skip_bad", None) is False:
                raise ImageError(f"{error} --skip-bad leaves out such images.") from error
            raise
        return code


def _silence_libraries() -> None:
    warnings.simplefilter("ignore")
    for name in ("matplotlib", "timm", "torch"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _discard_output() -> None:
    """Redirect the rest of the output, which cannot be written, to nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _describe(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        error = explain_missing(error) or error
    if isinstance(error, MivError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.filename or 'Output'}: {error.strerror or error}."
    if isinstance(error, MemoryError):
        return "Not enough memory: give fewer or smaller images."
    return (
        f"{type(error).__name__}: {error} - this is a bug in mivhead; please report it with the "
        "output of the same command with --debug."
    )


def _fail(message: str, code: int) -> int:
    print(f"miv: {one_line(message)}", file=sys.stderr)
    return code
