"""Progress bars: in a notebook they are shown, elsewhere only in a terminal."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from mivhead._util import progress as _progress
from mivhead._util.progress import in_notebook, progress_bar
from tests.helpers.extras import needs

CODE = """
import time
from mivhead._util import progress as _progress
_progress.DELAY = 0.01
for show in (True, None, False):
    with _progress.progress_bar(f"with {show}", 3, show=show) as advance:
        for _ in range(3):
            time.sleep(0.2)
            advance(1)
"""


@needs("nbclient", "dev")
@needs("ipykernel", "dev")
def test_a_notebook_shows_progress_unless_it_is_switched_off():
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CODE)])
    NotebookClient(notebook, kernel_name="python3", timeout=60, store_widget_state=True).execute()
    shown = str(notebook.cells[0].outputs) + str(notebook.metadata.get("widgets"))
    assert "with True" in shown
    assert "with None" in shown
    assert "with False" not in shown


def test_without_widgets_a_notebook_shows_text(monkeypatch, capsys):
    ipython = ModuleType("IPython")
    ipython.get_ipython = lambda: SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setattr(_progress, "find_spec", lambda name: None)
    monkeypatch.setattr(_progress, "DELAY", 0)
    with progress_bar("training", 3) as advance:
        advance(3)
    assert "training" in capsys.readouterr().err


@pytest.mark.parametrize("shell", [None, SimpleNamespace()])
def test_a_terminal_of_ipython_is_not_a_notebook(monkeypatch, shell):
    ipython = ModuleType("IPython")
    ipython.get_ipython = lambda: shell
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    assert not in_notebook()
