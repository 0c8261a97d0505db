"""What training runs leave to look at: a table and a plot."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from matplotlib.figure import Figure

MIB = 2**20


@dataclass(frozen=True)
class Run:
    """A finished run: its ``--loss``, one record a step, and the memory one step takes."""

    kind: str
    records: Sequence[dict[str, Any]]
    step_bytes: int

    @property
    def losses(self) -> list[float]:
        return [record["loss"] for record in self.records]

    @property
    def held_out(self) -> dict[int, float]:
        """Held-out loss by step."""
        return {r["step"]: r["held_out_loss"] for r in self.records if "held_out_loss" in r}


def curve_gap(a: Run, b: Run) -> float:
    """The largest relative difference between two training curves."""
    return max(abs(x - y) / abs(y) for x, y in zip(a.losses, b.losses, strict=True))


def table(runs: Sequence[Run], unigram_entropy: float) -> str:
    """The runs side by side."""
    rows = {
        "training loss, first step": [f"{run.losses[0]:.6f}" for run in runs],
        "training loss, last 10 steps": [f"{fmean(run.losses[-10:]):.6f}" for run in runs],
        "held-out loss": [f"{run.records[-1]['held_out_loss']:.6f}" for run in runs],
        "unigram entropy of the held-out text": [f"{unigram_entropy:.6f}"] * len(runs),
        "temporary memory of a step, MiB": [f"{run.step_bytes / MIB:.1f}" for run in runs],
        "tokens/s, median": [
            f"{median(r['tokens_per_second'] for r in run.records):.0f}" for run in runs
        ],
    }
    width = max(map(len, rows))
    lines = [" " * width + "".join(f"{run.kind:>14}" for run in runs)]
    lines += [f"{name:<{width}}" + "".join(f"{c:>14}" for c in row) for name, row in rows.items()]
    for other in runs[1:]:
        gap, ratio = curve_gap(runs[0], other), other.step_bytes / runs[0].step_bytes
        pair = f"{runs[0].kind} and {other.kind}"
        lines += [
            f"The training curves of {pair} differ by at most {gap:.1e} of the loss.",
            f"A step with {other.kind} takes {ratio:.1f} times the temporary memory.",
        ]
    return "\n".join(lines)


def plot(runs: Sequence[Run], unigram_entropy: float, path: Path) -> None:
    """Training curves, held-out losses and the unigram entropy, as an image."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for i, run in enumerate(runs):
        # A dashed line lets the curve under it show.
        line, marker = ("--", "none") if i else ("-", "full")
        steps = [record["step"] for record in run.records]
        axes.plot(steps, run.losses, line, color=f"C{i}", label=f"{run.kind}, training")
        evaluated = list(run.held_out), list(run.held_out.values())
        label = f"{run.kind}, held out"
        axes.plot(*evaluated, "o", color=f"C{i}", fillstyle=marker, label=label)
    axes.axhline(unigram_entropy, color="grey", linestyle=":", label="unigram entropy, held out")
    axes.set(xlabel="step", ylabel="loss, nats a token")
    axes.legend()
    figure.savefig(path, dpi=120)
