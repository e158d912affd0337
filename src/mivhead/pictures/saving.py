"""Write a figure to a file: whole, or not at all."""

from __future__ import annotations

import os
import tempfile
import warnings
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from mivhead.errors import InputError, NotAvailableError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")
DOTS_PER_INCH = 150


def check_format(path: str | Path) -> None:
    """Raise an error if a picture cannot be written under such a name.

    >>> check_format("confusion.gif")
    Traceback (most recent call last):
        ...
    mivhead.errors.InputError: A picture's name ends in .png, .svg or .pdf, got confusion.gif.
    """
    if Path(path).suffix.lower() not in FORMATS:
        raise InputError(
            f"A picture's name ends in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}, got {path}."
        )


def save_figure(figure: Figure, path: str | Path) -> None:
    """Write a figure; the suffix of the path decides the format."""
    path = Path(path)
    check_format(path)
    buffer = BytesIO()
    with warnings.catch_warnings():  # letters that matplotlib's font lacks are drawn as boxes
        warnings.filterwarnings("ignore", message="Glyph", category=UserWarning)
        figure.savefig(buffer, format=path.suffix[1:].lower(), dpi=DOTS_PER_INCH)
    handle = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            handle = Path(file.name)
            file.write(buffer.getvalue())
        handle.chmod(0o644)
        os.replace(handle, path)  # noqa: PTH105  # the word says what happens
    except OSError as error:
        raise NotAvailableError(
            f"Cannot write the picture {path}: {error.strerror or error}."
        ) from error
    finally:
        if handle is not None:
            handle.unlink(missing_ok=True)
