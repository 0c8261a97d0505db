"""Runs notebooks from their ``.py`` files and keeps code and outputs in the ``.ipynb`` beside them.

``python tools/notebooks.py [NUMBER ...]``; without a number, all. The ``.py`` file (jupytext's
percent format) is what one edits. The same command runs them on a GPU: they use what is there.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jupytext
import nbclient
import nbformat

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "notebooks"
CELL_LIMIT_S = 300


def read(source: Path) -> nbformat.NotebookNode:
    """The notebook of a ``.py`` file, with cells of stable names and no outputs."""
    notebook = jupytext.read(source)
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
    notebook.metadata["kernelspec"] = {
        "name": "python3", "display_name": "Python 3", "language": "python",
    }  # fmt: skip
    return notebook


def execute(source: Path) -> nbformat.NotebookNode:
    """The same with the outputs of this machine; raises where a cell does."""
    notebook = read(source)
    client = nbclient.NotebookClient(
        notebook,
        timeout=CELL_LIMIT_S,
        coalesce_streams=True,
        resources={"metadata": {"path": str(ROOT)}},
    )
    client.execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times of day
        if cell.cell_type == "code":  # stderr tells of this machine's drivers, not of the library
            cell.outputs = [o for o in cell.outputs if o.get("name") != "stderr"]
    return notebook


def sources(numbers: Sequence[str] = ()) -> list[Path]:
    """The ``.py`` files whose name begins with one of the numbers; without any, all."""
    found = sorted(NOTEBOOKS.glob("[0-9]*.py"))
    chosen = [path for path in found if not numbers or path.name.startswith(tuple(numbers))]
    if not chosen:
        raise SystemExit(f"no notebook begins with {' or '.join(numbers)}")
    return chosen


def main(numbers: Sequence[str]) -> None:
    for source in sources(numbers):
        begin = time.perf_counter()
        nbformat.write(execute(source), source.with_suffix(".ipynb"))
        print(f"{source.name}: {time.perf_counter() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
