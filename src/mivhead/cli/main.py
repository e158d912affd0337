"""Entry point of the command `miv`: parse, run one command, turn errors into one sentence."""

from __future__ import annotations

import argparse
import atexit
import ctypes
import gc
import importlib
import logging
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any, NoReturn

from mivhead._version import __version__
from mivhead.cli import (
    backbones,
    bench,
    cache,
    data,
    demo,
    evaluate,
    extract,
    fit,
    info,
    methods,
    plot,
    predict,
)
from mivhead.cli.options import Parser
from mivhead.cli.output import one_line
from mivhead.errors import MivError

COMMANDS = (
    fit,
    predict,
    evaluate,
    extract,
    info,
    methods,
    backbones,
    data,
    bench,
    plot,
    cache,
    demo,
)
FAILED = 2
BROKEN_PIPE = 141  # 128 + SIGPIPE, what a shell reports of a program that ended so
STOPPED = 130  # 128 + SIGINT


def build_parser() -> Parser:
    """Make the parser of all commands."""
    parser = Parser(
        prog="miv",
        description="Few-shot image classification: a folder with a few images per class\n"
        "becomes a classifier in seconds.",
        epilog="Start with `miv demo`, or with your own images in one folder per class:\n"
        "  miv fit shots/ -o birds.miv\n"
        "  miv predict birds.miv new/*.jpg\n\n"
        "`miv COMMAND --help` explains a command, with examples.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"mivhead {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for command in COMMANDS:
        command.add_parser(subparsers)
    return parser


def command() -> NoReturn:
    """Run `miv` as a process of its own."""
    begin()
    end(main())


def main(argv: Sequence[str] | None = None) -> int:
    """Run `miv` with these arguments and return its exit code.

    >>> main(["info", "no-such.miv"])
    2
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # names that the terminal cannot show must not fail
            stream.reconfigure(errors="backslashreplace")
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()  # here, where an error can be told
    except KeyboardInterrupt:
        return _fail("stopped", STOPPED)
    except BrokenPipeError:  # `miv ... | head`: whoever read the output has seen enough
        _drop_output()
        return BROKEN_PIPE
    # Everything ends here, because a person gets one sentence; --debug shows the rest.
    except Exception as error:
        if "--debug" in arguments:
            traceback.print_exc()
        if isinstance(error, OSError) and error.filename is None:  # of printing, as to a full disk
            _drop_output()
        return _fail(f"error: {_describe(error)}", FAILED)


def _run(arguments: list[str]) -> int:
    parser = build_parser()
    args = parser.parse_args(arguments)
    if args.command is None:
        parser.print_help()
        return FAILED
    with warnings.catch_warnings():
        if not args.debug:
            _silence_libraries()
        code: int = args.run(args)
        return code


def _drop_output() -> None:
    """Send what is left of the output nowhere, as it cannot be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _silence_libraries() -> None:
    warnings.simplefilter("ignore")
    for name in ("matplotlib", "timm", "torch"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _describe(error: Exception) -> str:
    if isinstance(error, MivError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.filename or 'Output'}: {error.strerror or error}."
    if isinstance(error, MemoryError):
        return "Not enough memory: give fewer or smaller images."
    return (
        f"{type(error).__name__}: {error} - this should not happen; please report it with the "
        "output of the same command with --debug."
    )


def _fail(message: str, code: int) -> int:
    print(f"miv: {one_line(message)}", file=sys.stderr)
    return code


# The beginning of the process: settings that make it quicker and are not a library's to choose.


OBJECTS = 100_000  # new ones before Python looks for garbage: importing makes many, and no garbage
# The C library gives memory back to the system when so many bytes are free, and asks for pieces
# above a size one by one. By default both happen for every large tensor, whose pages the system
# then clears again and again.
_TRIM, _MMAP = (-1, 2**28), (-3, 2**25)


def begin() -> None:
    """Make importing quicker, and memory that was freed quick to use again."""
    gc.set_threshold(OBJECTS)
    sys.meta_path.insert(0, _WithoutStatistics())
    with suppress(AttributeError, OSError, TypeError):  # not every system has glibc
        mallopt = ctypes.CDLL(None).mallopt
        for option in (_TRIM, _MMAP):
            mallopt(*option)


class _WithoutStatistics(MetaPathFinder):
    """Keeps scikit-learn from importing `scipy.stats`: most of a second, for one function.

    That function finds the module where SciPy itself imports it, when it is called.
    """

    def find_spec(self, fullname: str, *_: Any, **__: Any) -> None:
        """Find nothing, but be ready when scikit-learn is about to be imported."""
        if fullname == "sklearn":
            sys.meta_path.remove(self)
            sys.modules.setdefault("scipy.stats", _Once("scipy.stats"))


class _Once(ModuleType):
    """Stands for a module in the next import statement, and is gone."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        del self.__spec__  # an import statement asks for it, and can do without

    def __getattr__(self, attribute: str) -> Any:
        if attribute == "__file__":  # asked of every module there is
            raise AttributeError(attribute)
        if sys.modules.get(self.__name__) is self:
            sys.modules.pop(self.__name__, None)
        if attribute == "__spec__":
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self.__name__), attribute)


# The end of the process.


def end(code: int) -> NoReturn:
    """End the process with this exit code, without taking Python's memory apart first.

    With PyTorch and SciPy loaded that takes a second, and the system does it anyhow. What was
    registered for the end still runs. If a thread is still at work, the process ends as usual.
    """
    others = (t for t in threading.enumerate() if t is not threading.main_thread())
    if any(not thread.daemon for thread in others):
        sys.exit(code)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
