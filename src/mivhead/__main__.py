"""Entry point of the process: `miv`, or `python -m mivhead`.

Python turns Ctrl-C into an exception wherever the program happens to be. In the middle of an import
that exception may be swallowed, or come out as another error, and importing is most of what a short
command does. So while modules are imported, Ctrl-C ends the process at once. This module imports
next to nothing, so that its handler is in place before everything else.
"""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it
_IMPORT = "<frozen importlib._bootstrap>"


class Interrupts:
    """Handles Ctrl-C: stops the work if that is safe, otherwise ends the process at once.

    The first interrupt during normal work raises `KeyboardInterrupt`, so that files are closed and
    workers stopped. A second one, or one during an import, ends the process.
    """

    def __init__(self) -> None:
        self.received = False

    def __call__(self, _number: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        if self.received or _is_importing(frame):
            os.write(2, b"miv: stopped\n")
            os._exit(INTERRUPTED)
        self.received = True
        raise KeyboardInterrupt


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == _IMPORT:
            return True
        frame = frame.f_back
    return False


def command() -> NoReturn:
    """Run `miv` as a process of its own."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is to be ignored
        signal.signal(signal.SIGINT, Interrupts())
    from mivhead.cli.main import command as run

    run()


if __name__ == "__main__":
    command()
