"""The notebooks run from top to bottom, and are stored with their results."""

from pathlib import Path

import pytest

from tests.helpers.extras import needs

NOTEBOOKS = sorted(Path(__file__).parents[2].joinpath("docs", "notebooks").glob("*.ipynb"))
LONG = ("compare-methods-on-your-data", "five-photos-per-class")
MOST_BYTES = 1_000_000

pytestmark = [needs("nbclient", "dev"), needs("ipykernel", "dev"), needs("matplotlib", "plot")]


def test_there_are_three():
    assert len(NOTEBOOKS) == 3


@needs("pandas")
@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.slow] * (path.stem in LONG))
        for path in NOTEBOOKS
    ],
)
def test_notebook(path: Path, tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    stored = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert sum(bool(cell.outputs) for cell in stored) >= len(stored) - 1  # as it was executed
    assert path.stat().st_size < MOST_BYTES
    kinds = [{kind for out in cell.outputs for kind in out.get("data", {})} for cell in stored]
    place = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, kernel_name="python3", timeout=300, resources=place).execute()
    for before, cell in zip(kinds, stored, strict=True):  # the same kinds of results as stored
        now = {kind for out in cell.outputs for kind in out.get("data", {})}
        assert before <= now, cell.source
