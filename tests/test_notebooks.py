"""The notebooks run, and what is committed of them is what their sources say."""

import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import notebooks  # noqa: E402

SOURCES = notebooks.sources()


def cells(notebook):
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def committed(source):
    return nbformat.read(source.with_suffix(".ipynb"), as_version=4)


def test_each_notebook_is_a_pair():
    """No .ipynb without the .py that makes it."""
    made = {source.with_suffix(".ipynb") for source in SOURCES}
    assert made == set((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_the_committed_notebook_is_up_to_date(source):
    """The same cells as its source; every code cell was run, in order, without an error."""
    notebook = committed(source)
    assert cells(notebook) == cells(notebooks.read(source)), f"make notebooks ONLY={source.stem}"
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", [])]
    assert not [o for o in outputs if o.output_type == "error"]
    assert any("image/png" in o.get("data", {}) for o in outputs), "it shows no plot"
    assert str(ROOT) not in source.with_suffix(".ipynb").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_it_runs(source):
    """From the first cell to the last, on this machine; assertions in the notebook hold."""
    notebook = notebooks.execute(source)
    plots = [
        o
        for cell in notebook.cells
        for o in cell.get("outputs", [])
        if "image/png" in o.get("data", {})
    ]
    assert plots


def test_a_failing_cell_fails(tmp_path):
    """The measure itself."""
    source = tmp_path / "00_wrong.py"
    source.write_text("# %%\nassert False, 'as it should'\n")
    with pytest.raises(Exception, match="as it should"):
        notebooks.execute(source)
