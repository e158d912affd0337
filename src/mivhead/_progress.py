"""Progress bars: shown after two seconds, and only if a person is watching."""

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
    """Yield a function that adds finished items to a bar on stderr.

    Parameters
    ----------
    description
        What is being done.
    total
        Number of items; None if it is not known.
    show
        False: never. None or True: if stderr is a terminal and it takes more than two seconds.
    unit
        What an item is called.

    Examples
    --------
    >>> with progress_bar("counting", 3) as advance:
    ...     for _ in range(3):
    ...         _ = advance(1)
    """
    from tqdm import tqdm

    hidden = True if show is False else None  # None: tqdm looks whether stderr is a terminal
    with tqdm(
        total=total, desc=description, unit=unit, delay=DELAY, disable=hidden, leave=False
    ) as bar:
        yield bar.update
