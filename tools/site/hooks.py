"""What the site takes from the rest of the repository, so that nothing is written down twice.

In a page, ``<!-- include: PATH -->`` stands for a Markdown file of the repository without its
title, ``<!-- results: SUITE -->`` for the tables of a benchmark, ``<!-- plans -->`` for what each
plan of the gradients was measured at, and ``<!-- scaling -->`` for what several devices were.
``notebooks/*.ipynb`` become pages, with the outputs they were committed with; the plots of
``benchmarks/results`` become files of the site.
"""

import base64
import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import render, scaling  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
# Files of the repository that are pages of the site.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "extend.md",
    "benchmarks/README.md": "measured.md",
    "benchmarks/LOG.md": "log.md",
    "benchmarks/BLACKWELL.md": "blackwell.md",
}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Adds the notebooks to the navigation, each under its title."""
    notebooks = [{_title(path): f"notebooks/{path.stem}.md"} for path in _notebooks()]
    if notebooks:
        config.nav.append({"Notebooks": notebooks})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the notebooks and the plots."""
    for plot in sorted(RESULTS.glob("plots/*.png")):
        files.append(File.generated(config, f"plots/{plot.name}", abs_src_path=str(plot)))
    for notebook in _notebooks():
        for name, content in notebook_page(notebook).items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fills in the places."""
    fill = {
        "include": lambda path: included(path, page.file.src_uri),
        "results": results_tables,
        "plans": lambda _: plans_table(),
        "scaling": lambda _: scaling_tables(),
    }
    place = re.compile(r"^<!-- (include|results|plans|scaling)(?:: (\S+))? -->$", re.MULTILINE)
    return place.sub(lambda found: fill[found[1]](found[2]), markdown)


def _notebooks() -> list[Path]:
    return sorted((ROOT / "notebooks").glob("*.ipynb"))


def _title(notebook: Path) -> str:
    first = nbformat.read(notebook, as_version=4).cells[0].source
    return first.splitlines()[0].removeprefix("# ")


def included(path: str, page: str) -> str:
    """A file of the repository without its title, its links turned to the site's pages."""
    text = (ROOT / path).read_text()
    text = re.sub(r"\A# .*\n", "", text)
    here = posixpath.dirname(page)

    def link(found: re.Match) -> str:
        image, label, target, anchor = found.groups()
        if "://" in target:
            return found[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        if target in PAGES:
            to = posixpath.relpath(PAGES[target], here or ".")
        elif image and target.startswith("benchmarks/results/plots/"):
            to = posixpath.relpath(f"plots/{posixpath.basename(target)}", here or ".")
        elif image:
            raise FileNotFoundError(f"{path} shows {target}, which the site does not have")
        else:
            return f"`{target}`"
        return f"{image}[{label}]({to}{anchor or ''})"

    return _LINK.sub(link, text)


def runs(suite: str) -> list[render.Run]:
    """The committed runs of a suite, one for each device."""
    return [r for r in render.read(sorted(RESULTS.glob("*.json"))) if r["suite"] == suite]


def results_tables(suite: str) -> str:
    """The tables of a suite as the README has them."""
    found = runs(suite)
    if not found:
        raise FileNotFoundError(f"no results of {suite} in {RESULTS}")
    return "\n\n".join(render.markdown(run) for run in found)


def plans_table() -> str:
    """Each plan at each shape: milliseconds, over the bare products, GiB."""
    heads = ("suite", "T x H x V", "plan", "value and gradients, ms", "/ 3 GEMMs", "memory, GiB")
    rows = [row for suite in ("linear_ce", "linear_logprob", "linear_entropy")
            for run in runs(suite) for row in _plan_rows(suite, run)]  # fmt: skip
    return "\n".join(render._table(heads, rows))


def scaling_tables() -> str:
    """Plot and table of each run over several devices."""
    parts = []
    for data in scaling.read(sorted(RESULTS.glob("*.json"))):
        if data["environment"]["gpus"] == 1:
            parts.append(scaling.shards(data))
            continue
        device = re.sub(r"[^a-z0-9]+", "-", data["environment"]["device"].lower()).strip("-")
        plot = f"plots/tensor_parallel_{device}-x{data['environment']['gpus']}.png"
        parts += [f"![speed-up over one device]({plot})", scaling.markdown(data)]
    return "\n\n".join(parts)


def _plan_rows(suite: str, run: render.Run) -> Iterator[tuple[str, ...]]:
    for _, workload in render.in_order(run):
        for name, modes in workload["candidates"].items():
            ours, _, plan = name.partition(":")
            entry = modes.get(render.GRADIENTS, {})
            if ours == render.OURS and "ms" in entry:
                plan = plan or ("auto" if suite == "linear_ce" else "recompute")
                over = render.over_gemms(entry, "3")
                gib = render.memory_gib(entry)
                shape = render._shape(workload)
                memory = "" if gib is None else f"{gib:.2f}"  # not every run measured it
                yield (suite, shape, plan, f"{entry['ms']:.2f}", over, memory)


def notebook_page(path: Path) -> dict[str, str | bytes]:
    """A notebook as a page and the images of its outputs, by name."""
    notebook = nbformat.read(path, as_version=4)
    made: dict[str, str | bytes] = {}
    parts = []
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown":
            parts.append(cell.source)
        elif cell.cell_type == "code" and cell.source.strip():
            parts.append(_fenced(cell.source, "python"))
            for place, output in enumerate(cell.outputs):
                data = output.get("data", {})
                if "image/png" in data:
                    name = f"{path.stem}_{number}_{place}.png"
                    made[name] = base64.b64decode(data["image/png"])
                    parts.append(f"![output of the cell above]({name})")
                elif text := output.get("text") or data.get("text/plain"):
                    parts.append(_fenced(_ANSI.sub("", text).rstrip(), "text"))
    return {f"{path.stem}.md": "\n\n".join(parts) + "\n", **made}


def _fenced(text: str, language: str) -> str:
    return f"```{language}\n{text}\n```"
