"""Progress bars, shown after two seconds and only in a terminal."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

DELAY = 2.0  # seconds before a bar appears


@contextmanager
def progress_bar(
    description: str, total: int | None, *, show: bool | None = None, unit: str = "image"
) -> Iterator[Callable[[int], Any]]:
    """Yield a function that advances a progress bar on stderr by a number of items.

    Parameters
    ----------
    description : str
        Label of the bar.
    total : int or None
        Number of items; None if unknown.
    show : bool, default=None
        False never shows the bar. None and True show it if stderr is a terminal and the work takes
        more than two seconds.
    unit : str, default="image"
        Name of an item.

    Examples
    --------
    >>> with progress_bar("counting", 3) as advance:
    ...     for _ in range(3):
    ...         _ = advance(1)
    """
    from tqdm import tqdm

    hidden = True if show is False else None  # None: tqdm checks whether stderr is a terminal
    with tqdm(
        total=total, desc=description, unit=unit, delay=DELAY, disable=hidden, leave=False
    ) as bar:
        yield bar.update
