"""The errors that a user can cause.

Every message is one sentence that names what is wrong and what to do about it. The command line
prints the message of a `MivError` and exits with code 2. It reports any other exception as a bug,
with the traceback if `--debug` is given.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class MivError(Exception):
    """Base of every error that mivhead raises on purpose."""


class InputError(MivError, ValueError):
    """An argument, an array or a file has an invalid value."""


class ImageError(InputError):
    """An image file cannot be read, or is not allowed."""


class ModelFileError(InputError):
    """A model or features file is corrupted, too large, too new or not written by mivhead."""


class NotAvailableError(MivError, RuntimeError):
    """Something required is missing: a package, weights, a writable disk."""


@contextmanager
def reading(
    what: object, *raised: type[Exception], kind: type[MivError] = InputError
) -> Iterator[None]:
    """Turn `OSError`, and what else reading raises, into an error of one sentence.

    >>> with reading("birds.csv"):
    ...     open("/nowhere/birds.csv")
    Traceback (most recent call last):
        ...
    mivhead.errors.InputError: birds.csv cannot be read: No such file or directory.
    """
    expected: tuple[type[Exception], ...] = (OSError, *raised)
    try:
        yield
    except MivError:
        raise
    except expected as error:
        raise kind(f"{what} cannot be read: {reason_of(error)}.") from error


def reason_of(error: Exception) -> str:
    r"""Return what the system says, or the first line of an error of a library, or its type.

    >>> reason_of(OSError("no such file.\nTraceback")), reason_of(KeyError())
    ('no such file', 'KeyError')
    """
    text = getattr(error, "strerror", None) or str(error)
    return text.strip().partition("\n")[0].rstrip(".") or type(error).__name__


def check_file(path: str | Path, kind: type[MivError] = InputError) -> None:
    """Raise an error if a path is not a file: reading a pipe could block."""
    path = Path(path)
    if not path.is_file():
        raise kind(f"{path} is not a file.") if path.exists() else no_such_path(path, kind)


def no_such_path(path: Path, kind: type[MivError] = InputError) -> MivError:
    """Return the error of a path that does not exist; a similar name may have been meant."""
    names: list[str] = []
    with suppress(OSError):
        names = [neighbour.name for neighbour in path.parent.iterdir()]
    near = difflib.get_close_matches(path.name, names, n=1)
    hint = f" Did you mean {path.with_name(near[0])}?" if near else ""
    return kind(f"{path} does not exist.{hint}")


def check_no_missing(name: str, values: Iterable[object]) -> None:
    """Raise an error if a label is missing: None, NaN, or pandas' NA or NaT.

    >>> check_no_missing("labels", ["cat", None])
    Traceback (most recent call last):
        ...
    mivhead.errors.InputError: labels[1] is missing (None): leave out the images without a label.
    """
    for row, value in enumerate(values):
        not_a_number = isinstance(value, float) and math.isnan(value)
        if value is None or not_a_number or type(value).__name__ in ("NAType", "NaTType"):
            raise InputError(
                f"{name}[{row}] is missing ({value}): leave out the images without a label."
            )


def check_one_of(name: str, value: object, allowed: Iterable[str]) -> None:
    """Raise an error that names the parameter, its value and what is allowed.

    >>> check_one_of("form", "transformer", ("cnn", "vit"))
    Traceback (most recent call last):
        ...
    mivhead.errors.InputError: form must be one of cnn, vit; got 'transformer'.
    """
    names = list(allowed)
    if value in names:
        return
    near = difflib.get_close_matches(str(value), names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise InputError(f"{name} must be one of {', '.join(names)}; got {value!r}.{hint}")
