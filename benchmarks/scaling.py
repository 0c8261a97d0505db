"""Table and plot of ``benchmarks.tensor_parallel``'s results; ``benchmarks.render`` draws them."""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from benchmarks.results import update

LABELS = {
    "ce": "cross-entropy",
    "ce_recompute": "cross-entropy, recompute",
    "logprob_entropy": "log-probability and entropy",
}


class Point(NamedTuple):
    """One loss on one mesh; ``alone_ms`` is a device's share of the work without communication.

    ``speed_up`` is over one device in the same run.
    """

    shape: str
    loss: str
    dp: int
    tp: int
    ms: float
    alone_ms: float | None
    gib: float
    speed_up: float | None


def read(files: Iterable[Path]) -> list[dict[str, Any]]:
    """The runs over several devices that the files hold, those of one machine merged."""
    held = (json.loads(file.read_text()) for file in files)
    return merged(data for data in held if data.get("suite") == "tensor_parallel")


def merged(runs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One run for each machine; of two times for one thing, the later."""
    by_machine: dict[tuple[str, int], dict[str, Any]] = {}
    for data in sorted(runs, key=lambda data: data["started"]):
        made_by = data["environment"]
        key = made_by["device"], made_by["gpus"]
        whole = by_machine.setdefault(key, data | {"workloads": {}, "commits": []})
        whole["environment"] = made_by
        whole["commits"].append(made_by["commit"])
        for name, workload in data["workloads"].items():
            into = whole["workloads"].setdefault(name, workload | {"candidates": {}})
            update(into["candidates"], workload["candidates"], 1)
    return list(by_machine.values())


def points(data: dict[str, Any]) -> Iterator[Point]:
    """What was timed with gradients, by shape, loss and number of devices."""
    for workload in data["workloads"].values():
        shape = f"{workload['T']} x {workload['H']} x {workload['V']}"
        found = []
        for candidate, modes in workload["candidates"].items():
            mesh = re.fullmatch(r"dp=(\d+),tp=(\d+) pallas_loss", candidate)
            alone = workload["candidates"].get(candidate.replace(" pallas_loss", " local"), {})
            for mode, entry in modes.items():
                loss, _, what = mode.partition(" ")
                if mesh and what == "value_and_grad" and "ms" in entry:
                    dp, tp = int(mesh[1]), int(mesh[2])
                    known = "efficiency" in entry
                    found.append(
                        Point(
                            shape, loss, dp, tp, entry["ms"], alone.get(mode, {}).get("ms"),
                            entry["temp_bytes"] / 2**30,
                            entry["efficiency"] * dp * tp if known else None,
                        )
                    )  # fmt: skip
        yield from sorted(found, key=lambda p: (p.loss, p.dp * p.tp, p.dp))


def markdown(data: dict[str, Any]) -> str:
    """A row for each point."""
    rows = [
        "| T x H x V | value and gradients of | tokens x vocabulary | ms | speed-up | "
        "a device's share alone, ms | memory a device, GiB |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for p in points(data):
        alone = "" if p.alone_ms is None or p.dp * p.tp == 1 else f"{p.alone_ms:.2f}"
        faster = "" if p.speed_up is None else f"{p.speed_up:.2f}"
        rows.append(
            f"| {p.shape} | {LABELS.get(p.loss, p.loss)} | {p.dp} x {p.tp} "
            f"| {p.ms:.2f} | {faster} | {alone} | {p.gib:.2f} |"
        )
    made_by = data["environment"]
    versions = ", ".join(f"{k} {made_by['versions'][k]}" for k in ("jax", "jax-cuda13-plugin"))
    commits = ", ".join(data["commits"])
    return "\n".join(rows) + (
        f"\n\nMedian time by the host's clock, {data['settings']['dtype']}; {made_by['gpus']} "
        f"{made_by['device']}, driver {made_by['driver']}; {versions}; commit {commits}."
    )


def shards(data: dict[str, Any]) -> str:
    """What one device says of meshes that it is not: each one's share, alone, and what it sends."""
    rows = [
        "| T x H x V | value and gradients of | vocabulary in | a device's share alone, ms | "
        "TFLOP/s | MiB to sum |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for workload in data["workloads"].values():
        shape = f"{workload['T']} x {workload['H']} x {workload['V']}"
        for candidate, modes in workload["candidates"].items():
            mesh = re.fullmatch(r"dp=1,tp=(\d+) local", candidate)
            for mode, entry in modes.items():
                loss, _, what = mode.partition(" ")
                if mesh and what == "value_and_grad" and "ms" in entry:
                    mib = entry["expected_bytes"]["dx"] / 2**20
                    rows.append(
                        f"| {shape} | {LABELS.get(loss, loss)} | {mesh[1]} | {entry['ms']:.2f} "
                        f"| {entry['tflops_per_gpu']:.0f} | {mib:.0f} |"
                    )
    made_by = data["environment"]
    return "\n".join(rows) + (
        f"\n\nMedian time by the host's clock of the shares on one {made_by['device']}, "
        f"{data['settings']['dtype']}; TFLOP/s count three products; commit "
        f"{', '.join(data['commits'])}."
    )


def plot(data: dict[str, Any], path: Path) -> None:
    """Speed-up over one device, by shape and loss, for each mesh; the line is a device's worth."""
    every = [p for p in points(data) if p.dp * p.tp > 1 and p.speed_up]
    shapes = list(dict.fromkeys(p.shape for p in every))
    meshes = sorted({(p.dp, p.tp) for p in every}, key=lambda m: (m[0] * m[1], m[0]))
    figure = Figure(figsize=(5.5 * len(shapes), 3.8), layout="constrained")
    panels = figure.subplots(1, len(shapes), sharey=True, squeeze=False)[0]
    losses = list(dict.fromkeys(p.loss for p in every))
    width = 0.8 / len(meshes)
    for axes, shape in zip(panels, shapes, strict=True):
        for i, mesh in enumerate(meshes):
            here = [p for p in every if p.shape == shape and (p.dp, p.tp) == mesh]
            at = [losses.index(p.loss) + (i - len(meshes) / 2 + 0.5) * width for p in here]
            up = [p.speed_up or 0 for p in here]
            label = f"tokens in {mesh[0]}, vocabulary in {mesh[1]}"
            bars = axes.bar(at, up, width * 0.95, label=label, color=f"C{i}")
            axes.bar_label(bars, [f"{v:.2f}" for v in up], fontsize="small")
        for n in sorted({dp * tp for dp, tp in meshes}):
            axes.axhline(n, color="black", linestyle=":", linewidth=1)
        axes.set_xticks(
            range(len(losses)),
            [LABELS.get(n, n).replace("y ", "y\n").replace(", ", ",\n") for n in losses],
        )
        axes.set_xlim(-0.5, len(losses) - 0.5)
        axes.set_title(shape)
    panels[0].set_ylabel("times as fast as one device")
    figure.legend(
        *panels[0].get_legend_handles_labels(),
        fontsize="small",
        loc="outside lower center",
        ncols=2,
    )
    made_by = data["environment"]
    figure.suptitle(f"value and gradients on {made_by['gpus']} {made_by['device']}")
    figure.savefig(path, dpi=120)
