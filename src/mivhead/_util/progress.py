"""Progress bars, shown after two seconds, in a terminal or a notebook."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

DELAY = 2.0  # seconds before a bar appears


@contextmanager
def progress_bar(
    description: str, total: int | None, *, show: bool | None = None, unit: str = "image"
) -> Iterator[Callable[[float], Any]]:
    """Yield a function that advances a progress bar by a number of items.

    `total` is None if it is not known. With `show=False` there is no bar. None and True show it if
    the work takes more than two seconds: in a notebook, and on stderr if that is a terminal. `unit`
    is the name of an item; bytes, `B`, are shown in MB and GB.

    >>> with progress_bar("counting", 3) as advance:
    ...     for _ in range(3):
    ...         _ = advance(1)
    """
    terminal = sys.stderr is not None and sys.stderr.isatty()
    if show is False or not (terminal or in_notebook()):
        yield lambda _: None
        return
    if in_notebook() and find_spec("ipywidgets") is not None:
        from tqdm.notebook import tqdm
    else:
        from tqdm import tqdm
    how: dict[str, Any] = {"unit": unit, "unit_scale": unit == "B", "delay": DELAY, "leave": False}
    with tqdm(total=total, desc=description, **how) as bar:
        yield bar.update


def in_notebook() -> bool:
    """Return whether the code runs in the kernel of a notebook."""
    if "IPython" not in sys.modules:
        return False
    shell = sys.modules["IPython"].get_ipython()
    return shell is not None and hasattr(shell, "kernel")
