"""PyTorch peers at the masks of ``benchmarks.active``: ``python -m benchmarks.active_torch``.

CCE takes the tokens that count out of the batch first; Liger computes all.
"""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import rounds
from benchmarks.masks import FRACTIONS, MASKS, settings
from benchmarks.results import error_words
from benchmarks.torch_peers import LINEAR_CE, clock_of, make_inputs
from benchmarks.workloads import Workload, select


def _gradients(loss, x, w, labels):
    return torch.autograd.grad(loss(x, w, labels), (x, w))


def measure(workload: Workload, args: argparse.Namespace) -> dict[str, Any]:
    """Value and both gradients of every peer at every mask."""
    x, w, labels = make_inputs(workload, torch.bfloat16, 0)
    found: dict[str, Any] = {"T": workload.T, "H": workload.H, "V": workload.V, "programs": {}}
    losses = {}
    for name in args.peers:
        try:
            losses[name] = LINEAR_CE[name].load()
        except Exception as error:
            print(f"  {name}: {error_words(error)}", flush=True)
    for mask, fraction, counted in settings(workload.T, args.fractions, args.masks):
        here = torch.where(torch.from_numpy(counted).to(labels.device), labels, -100)
        calls = {n: partial(_gradients, loss, x, w, here) for n, loss in losses.items()}
        samples, errors = rounds.interleave(
            {n: clock_of(call) for n, call in calls.items()}, args.repeats
        )
        for name, taken in samples.items():
            entry = rounds.summary(taken) | {"active": int(counted.sum())}
            found["programs"].setdefault(name, {}).setdefault(mask, {})[str(fraction)] = entry
            print(f"  {name:16} {mask:18} {fraction:5.0%} {entry}", flush=True)
        for name, error in errors.items():
            print(f"  {name}: {error_words(error)}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", default="llama3-16384,32768x3584x152064")
    parser.add_argument("--peers", nargs="+", default=["liger", "cce"], choices=[*LINEAR_CE])
    parser.add_argument("--masks", nargs="+", default=[*MASKS], choices=[*MASKS])
    parser.add_argument("--fractions", nargs="+", type=float, default=[*FRACTIONS])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results/active_torch_h200.json")
    )
    args = parser.parse_args()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    made_by = {"device": device, "torch": torch.__version__}
    result: dict[str, Any] = {"suite": "active", "environment": made_by, "workloads": {}}
    for workload in select(args.workloads):
        print(f"{workload.name} {workload.shape}", flush=True)
        result["workloads"][workload.name] = measure(workload, args)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
