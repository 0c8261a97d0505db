"""Table and plot of what ``benchmarks.active`` and ``active_torch`` measured."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from benchmarks.masks import MASKS

LABELS = {
    "in_forward": "pallas_loss",
    "recompute": "pallas_loss, recompute",
    "logprob": "pallas_loss, logprob",
    "forward": "pallas_loss, forward alone",
    "xla_bf16": "XLA, bf16 logits",
    "liger": "Liger",
    "cce": "CCE",
}
STATIC = ", static"


class Line(NamedTuple):
    """One program over the fractions: the ms of each mask, and those with no means to skip."""

    shape: str
    program: str
    ms: dict[float, list[float]]
    dense_ms: float

    @property
    def label(self) -> str:
        return LABELS.get(self.program, self.program)

    @property
    def place(self) -> int:
        """Its place in a table or legend; programs without a label come last."""
        return [*LABELS, self.program].index(self.program)

    def worst(self, fraction: float) -> float:
        """Of all masks, the time over that of a batch with nothing masked."""
        return max(self.ms[fraction]) / self.dense_ms

    def cell(self, fraction: float) -> str:
        if fraction not in self.ms:
            return ""
        return f"{max(self.ms[fraction]):.2f}, {self.worst(fraction):.3f}"


def read(files: Iterable[Path]) -> list[dict[str, Any]]:
    """The runs over masks that the files hold."""
    held = (json.loads(file.read_text()) for file in files)
    return [data for data in held if data.get("suite") == "active"]


def lines(runs: Iterable[dict[str, Any]]) -> list[Line]:
    """Every program of every shape, ours first."""
    found = []
    for workload in (w for run in runs for w in run["workloads"].values()):
        shape = f"{workload['T']} x {workload['H']} x {workload['V']}"
        programs = workload["programs"]
        for name, masks in programs.items():
            if not name.endswith(STATIC):
                ms: dict[float, list[float]] = {}
                for entries in masks.values():
                    for fraction, entry in entries.items():
                        ms.setdefault(float(fraction), []).append(entry["ms"])
                dense = programs.get(name + STATIC, masks)
                whole = next((e["1.0"]["ms"] for e in dense.values() if "1.0" in e), math.nan)
                # One fraction beside its twin is a check of what the means to skip cost: no curve.
                if len(ms) > 1 or name + STATIC not in programs:
                    found.append(Line(shape, name, dict(sorted(ms.items(), reverse=True)), whole))
    return sorted(found, key=lambda line: (line.shape, line.place))


def markdown(runs: list[dict[str, Any]]) -> str:
    """A row for each program: the slowest mask at each fraction, ms and over all tokens' time."""
    every = lines(runs)
    fractions = sorted({f for line in every for f in line.ms}, reverse=True)
    heads = ["T x H x V", "", *(f"{f:.0%}" for f in fractions)]
    rows = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for line in every:
        cells = [line.cell(f) for f in fractions]
        rows.append(f"| {' | '.join([line.shape, line.label, *cells])} |")
    made_by = [run["environment"] for run in runs]
    commit = ", ".join(dict.fromkeys(e["commit"][:10] for e in made_by if "commit" in e))
    return "\n".join(rows) + (
        f"\n\nms, and that over the time with nothing masked and nothing to skip by; of "
        f"{len(MASKS)} masks ({', '.join(MASKS)}) the slowest. Value and both gradients, host's "
        f"clock, bfloat16; {made_by[0]['device']}, commit {commit}.\n\n"
        f"{padding(runs)}"
    )


def padding(runs: Iterable[dict[str, Any]]) -> str:
    """What it costs to pad a batch to its bucket, as a sentence for each."""

    def cost(program: str, ms: dict[str, dict[str, float]]) -> str:
        padded, bare = ms["padded"]["ms"], ms["as it is"]["ms"]
        name = LABELS.get(program, program)
        return f"{name} {padded:.2f} ms, {bare:.2f} without ({padded / bare:.3f})"

    sentences = []
    for name, entry in (item for run in runs for item in run.get("padding", {}).items()):
        _, h, v = name.split("x")
        costs = "; ".join(cost(program, ms) for program, ms in entry["programs"].items())
        sentences.append(
            f"{entry['T']} tokens padded to their bucket of {entry['padded_T']}, H = {h}, V = {v}: "
            f"{costs}."
        )
    return " ".join(sentences)


def plot(runs: list[dict[str, Any]], path: Path) -> None:
    """Time against the fraction of tokens that count; the dotted line is that fraction's share."""
    every = [line for line in lines(runs) if line.program != "forward"]
    shapes = list(dict.fromkeys(line.shape for line in every))
    figure = Figure(figsize=(5.5 * len(shapes), 4), layout="constrained")
    panels = figure.subplots(1, len(shapes), squeeze=False)[0]
    for axes, shape in zip(panels, shapes, strict=True):
        for line in (line for line in every if line.shape == shape):
            at = [100 * f for f in line.ms]
            color = f"C{line.place}"
            worst = [max(ms) for ms in line.ms.values()]
            axes.plot(at, worst, "o-", color=color, label=line.label)
            if line.program in ("in_forward", "recompute"):
                axes.plot([0, 100], [0, line.dense_ms], ":", color=color, linewidth=1)
        axes.set_title(shape)
        axes.set_xlabel("tokens that count, %")
        axes.set_ylim(bottom=0)
    panels[0].set_ylabel("value and both gradients, ms")
    panels[0].legend(fontsize="small")
    figure.savefig(path, dpi=120)
