"""Progress bars: in a notebook they are shown, elsewhere only in a terminal."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from mivhead._util import text
from mivhead._util.text import progress_bar
from tests.helpers.extras import needs

CODE = """
from mivhead._util import text
text.DELAY = 0
for show in (True, None, False):
    with text.progress_bar(f"with {show}", 3, show=show) as advance:
        advance(3)
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
    monkeypatch.setattr(text, "find_spec", lambda name: None)
    monkeypatch.setattr(text, "DELAY", 0)
    with progress_bar("training", 3) as advance:
        advance(3)
    assert "training" in capsys.readouterr().err


@pytest.mark.parametrize("shell", [None, SimpleNamespace()])
def test_a_terminal_of_ipython_is_not_a_notebook(monkeypatch, capsys, shell):
    ipython = ModuleType("IPython")
    ipython.get_ipython = lambda: shell
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setattr(text, "DELAY", 0)
    with progress_bar("training", 3) as advance:
        advance(3)
    assert capsys.readouterr().err == ""
