"""The README's table of the losses from logits; ``benchmarks.render`` calls it."""

from collections.abc import Iterator, Mapping
from itertools import compress
from typing import Any

OURS, FORWARD, GRADIENT = "pallas_loss", "forward", "value_and_grad"
LOSSES = {
    "ce": "cross-entropy",
    "reverse_kl": "reverse KL",
    "soft_ce": "soft cross-entropy",
    "forward_kl": "forward KL",
}
RIVALS = {
    "pallas_loss:triton": "Triton (ours)",
    "pallas_loss:xla": "XLA, tiled (ours)",
    "xla": "XLA",
    "torch_compile": "torch.compile",
    "liger": "Liger",
}
Run = dict[str, Any]


def heads_and_rows(run: Run) -> tuple[list[str], list[list[str]]]:
    """A row for each workload and loss: GB/s and their fraction of the yardstick's.

    A column that nothing is in is left out.
    """
    rivals = _rivals(run)
    heads = ["T x V", "loss", "forward", "value and gradient, ms", "value and gradient"]
    rows = [
        [
            f"{workload['T']} x {workload['V']}",
            LOSSES.get(loss, loss),
            _rate(candidates, OURS, FORWARD),
            _ms(candidates),
            f"**{_rate(candidates, OURS, GRADIENT)}**",
            *(_rate(candidates, name, GRADIENT) for name in rivals),
            _yardstick(candidates),
        ]
        for workload in _in_order(run)
        for loss, candidates in workload["losses"].items()
    ]
    heads = [*heads, *(RIVALS.get(name, name) for name in rivals), "yardstick"]
    filled = [any(column) for column in zip(*rows, strict=True)]
    return list(compress(heads, filled)), [list(compress(row, filled)) for row in rows]


def caption(run: Run) -> str:
    """How to read it."""
    return (
        f"GB/s of device time, {run['settings']['dtype']}, counting each input once and the "
        "gradient once, and in brackets their fraction of the yardstick, the faster of two copies "
        "in the same run. The last column is that of our run."
    )


def _in_order(run: Run) -> Iterator[Run]:
    yield from sorted(run["workloads"].values(), key=lambda w: (w["V"], w["T"]))


def _rivals(run: Run) -> list[str]:
    timed = {
        name
        for workload in run["workloads"].values()
        for candidates in workload["losses"].values()
        for name, modes in candidates.items()
        if name != OURS and "ms" in modes.get(GRADIENT, {})
    }
    return [name for name in RIVALS if name in timed] + sorted(timed - set(RIVALS))


def _rate(candidates: Mapping[str, Any], name: str, mode: str) -> str:
    entry = candidates.get(name, {}).get(mode, {})
    if "ms" not in entry:
        return entry.get("error", "").split(":")[0]
    return f"{entry['gb_per_s']:.0f} ({entry['of_yardstick']:.2f})"


def _yardstick(candidates: Mapping[str, Any]) -> str:
    """That of the run which our figure is of: runs differ by a few percent."""
    entry = candidates.get(OURS, {}).get(GRADIENT, {})
    return f"{entry['gb_per_s'] / entry['of_yardstick']:.0f}" if "ms" in entry else ""


def _ms(candidates: Mapping[str, Any]) -> str:
    entry = candidates.get(OURS, {}).get(GRADIENT, {})
    return f"{entry['ms']:.3f}" if "ms" in entry else ""
