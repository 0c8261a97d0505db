"""The results of a run: one JSON file, written whole after every change."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.workloads import Workload

SCHEMA = 1
GIB = 2**30
Entry = dict[str, Any]

# The candidates that are bare GEMMs, and the mode of theirs that a number of products is compared
# with: one program, since on an H200 a product of 12 ms that follows a pause runs 10% faster than
# the same product in the middle of 40 ms of work. A fourth product is the logits once more.
GEMMS = {"jax": "gemms", "torch": "torch_gemms"}
PRODUCTS = {1: "z", 3: "z, dx, dw", 4: "z, z, dx, dw"}
NUM_PRODUCTS = {mode: products for products, mode in PRODUCTS.items()} | {"dx": 1, "dw": 1}

# An entry that is not final: it was prepared, but its process ended before it was timed.
PENDING = "prepared, not timed"
DIED = "its process died"
OUT_OF_TIME = "out of time"


class Store:
    """``data["workloads"][name]["candidates"][candidate][mode]`` is an entry.

    An entry holds times, or an ``error`` and the ``run`` in which it happened.
    """

    def __init__(self, path: Path, run: str = ""):
        self.path, self.run = path, run
        self.data: dict[str, Any] = {"schema": SCHEMA, "workloads": {}}
        if path.exists():
            self.data = json.loads(path.read_text())

    def save(self) -> None:
        """Replaces the file in one step, so that a reader or a kill sees a whole one."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_name(self.path.name + ".part")
        part.write_text(json.dumps(self.data, indent=1) + "\n")
        os.replace(part, self.path)

    def candidates(self, workload: Workload) -> dict[str, dict[str, Entry]]:
        """The entries of a workload, which is added if it is not there."""
        sizes = {"T": workload.T, "H": workload.H, "V": workload.V, "candidates": {}}
        return self.data["workloads"].setdefault(workload.name, sizes)["candidates"]

    def put(self, workload: Workload, candidate: str, mode: str, entry: Entry) -> None:
        """Sets an entry; the caller saves."""
        self.candidates(workload).setdefault(candidate, {})[mode] = entry

    def fail(self, workload: Workload, candidate: str, mode: str, error: str | Exception) -> None:
        """Sets an entry that says why there are no times, and saves."""
        words = error if isinstance(error, str) else error_words(error)
        self.put(workload, candidate, mode, {"error": words, "run": self.run})
        self.save()

    def ran_out_of_time(self) -> None:
        """Says of what this run left unfinished that its time was up, and saves."""
        for workload in self.data["workloads"].values():
            for modes in workload["candidates"].values():
                for entry in modes.values():
                    if entry["run"] == self.run and entry.get("error") in (DIED, PENDING):
                        entry["error"] = OUT_OF_TIME
        self.save()

    def needs(self, workload: Workload, candidate: str, mode: str) -> bool:
        """Whether this run still has to time it: not if it has times, or failed in this run."""
        entry = self.candidates(workload).get(candidate, {}).get(mode)
        if entry is None:
            return True
        if "error" not in entry:
            return False
        return entry["error"] == PENDING or entry["run"] != self.run


def error_words(error: Exception) -> str:
    """What a table says of a candidate that failed."""
    text = " ".join(str(error).split())
    kind = type(error).__name__
    if isinstance(error, TimeoutError):
        return OUT_OF_TIME
    if isinstance(error, ImportError):
        return f"absent: {getattr(error.__cause__, 'msg', None) or text}"[:120]
    if "OutOfMemory" in kind or "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower():
        return "out of memory"
    return f"{kind}: {text[:240]}"


def gemms_ms(candidates: Mapping[str, Mapping[str, Entry]], library: str, products: int) -> float:
    """The bare GEMMs' time, in one program; NaN if it was not timed."""
    timed = candidates.get(GEMMS[library], {})
    return timed.get(PRODUCTS[products], {}).get("ms", float("nan"))


def derive(entry: Entry, flops: int, gemms: Mapping[int, float]) -> Entry:
    """The entry with its TFLOP/s and its time over that of bare GEMMs (where they are known)."""
    ratios = {str(n): round(entry["ms"] / ms, 4) for n, ms in gemms.items() if ms == ms}
    tflops = round(flops / entry["ms"] / 1e9, 2)
    return entry | {"tflops": tflops} | ({"over_gemms": ratios} if ratios else {})


def memory_gib(entry: Entry) -> float | None:
    """Memory beyond the inputs and what is returned: measured, else as compiled."""
    bytes_ = entry.get("peak_bytes", entry.get("temp_bytes"))
    return None if bytes_ is None else bytes_ / GIB


def table(data: Mapping[str, Any]) -> Iterator[str]:
    """The results as text, a line for each candidate.

    For each mode: ms by the device's clock, in brackets by the host's (which counts gaps and copies
    too), and over the bare GEMMs. Then the spread, GiB and seconds to compile of the largest mode.
    """
    for name, workload in data["workloads"].items():
        yield f"{name}  {workload['T']}x{workload['H']}x{workload['V']}"
        for candidate, modes in workload["candidates"].items():
            parts = [_mode(mode, modes[mode]) for mode in sorted(modes)]
            if len({entry.get("error") for entry in modes.values()} - {None}) == 1:
                parts = parts if any("ms" in e for e in modes.values()) else parts[:1]
            largest = max(modes.values(), key=lambda entry: entry.get("ms", 0))
            yield f" {candidate:20} " + " | ".join([*parts, *_largest(largest)])


def _mode(mode: str, entry: Entry) -> str:
    mode = {"forward": "fwd", "value_and_grad": "grad"}.get(mode, mode)
    if "error" in entry:
        return f"{mode} {entry['error'][:70]}"
    host = f" ({entry['host_ms']:.2f})" if "host_ms" in entry else ""
    over = "".join(f" x{ratio:.3f}" for ratio in entry.get("over_gemms", {}).values())
    return f"{mode} {entry['ms']:.2f}{host}{over}"


def _largest(entry: Entry) -> Iterator[str]:
    if "ms" in entry:
        yield f"{(entry['p80_ms'] - entry['p20_ms']) / entry['ms']:.1%}"
    if (gib := memory_gib(entry)) is not None:
        yield f"{gib:.2f} GiB"
    if "compile_s" in entry:
        yield f"{entry['compile_s']:.1f} s"


def update(into: dict[str, Any], later: Mapping[str, Any], depth: int) -> None:
    """Entries ``depth`` levels down replace earlier ones; a failure replaces nothing.

    One that compiled beside others does not say how long that takes: the earlier figure stays.
    """
    for name, value in later.items():
        if depth:
            update(into.setdefault(name, {}), value, depth - 1)
        elif "ms" in value or name not in into:
            earlier = into.get(name, {})
            into[name] = {k: earlier[k] for k in ("compile_s",) if k in earlier} | value
