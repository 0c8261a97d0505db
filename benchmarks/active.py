"""Time against the fraction of tokens that count: ``python -m benchmarks.active --help``.

One compiled program for every mask. ``static`` are the same kernels without the means to skip:
what a batch with nothing masked pays for them is the ratio of the two at 100%, and ``over_dense``
of every entry is its time over that of ``static``. Times are the host's, gaps between kernels and
waits for the count included, in interleaved rounds.
"""

import argparse
import concurrent.futures
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import rounds, timing
from benchmarks.candidates import linear_ce_loss
from benchmarks.inputs import LinearInputs, make_inputs
from benchmarks.jax_stage import Ready
from benchmarks.masks import FRACTIONS, MASKS, settings
from benchmarks.run import environment
from benchmarks.workloads import Workload, select
from pallas_loss import fused_linear_ce, fused_linear_logprob, pad_to_bucket
from pallas_loss import select as backends
from pallas_loss.backends.active import ActiveRows


def _ce(backward: str) -> Callable[..., Any]:
    loss = partial(fused_linear_ce, w_layout="vh", backward=backward)
    return jax.value_and_grad(loss, argnums=(0, 1))


def _logprob(x, w, labels):
    def loss(x, w):
        return jnp.sum(fused_linear_logprob(x, w, labels, w_layout="vh").logprob)

    return jax.value_and_grad(loss, (0, 1))(x, w)


PROGRAMS: dict[str, Callable[..., Any]] = {
    "in_forward": _ce("in_forward"),
    "recompute": _ce("recompute"),
    "logprob": _logprob,
    "forward": partial(fused_linear_ce, w_layout="vh"),
}
XLA = "xla_bf16"


def _without_skipping() -> Any:
    every = tuple(b.inner if isinstance(b, ActiveRows) else b for b in backends.LINEAR_BACKENDS)
    return mock.patch.object(backends, "LINEAR_BACKENDS", every)


def _compiled(names: list[str], inputs: LinearInputs, xla: bool) -> dict[str, Any]:
    """Every program and its ``static`` twin: traced one by one, compiled side by side."""
    lowered = {name: jax.jit(PROGRAMS[name]).lower(*inputs) for name in names}
    with _without_skipping():
        jax.clear_caches()
        for name in names:
            lowered[f"{name}, static"] = jax.jit(PROGRAMS[name]).lower(*inputs)
    if xla:
        dense = jax.value_and_grad(linear_ce_loss(XLA, "vh"), argnums=(0, 1))
        lowered[XLA] = jax.jit(dense).lower(*inputs)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        compiled = pool.map(lambda program: program.compile(), lowered.values())
        return dict(zip(lowered, compiled, strict=True))


def _agreement(skipping: Any, static: Any, counted: np.ndarray) -> dict[str, Any]:
    """How far the two twins' results lie apart, and whether masked tokens have no gradient."""
    value, grads = skipping
    want, want_grads = static

    @jax.jit
    def distance(a, b):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.linalg.norm(a - b) / jnp.linalg.norm(b)

    masked = jnp.abs(grads[0].astype(jnp.float32)).max(axis=1)[~counted].max(initial=0.0)
    return {
        "value": float(distance(value, want)),
        "dx": float(distance(grads[0], want_grads[0])),
        "dw": float(distance(grads[1], want_grads[1])),
        "dx_of_masked": float(masked),
    }


def measure(workload: Workload, args: argparse.Namespace) -> dict[str, Any]:
    """The times of every program at every mask; ``static`` ones and XLA's at 100% alone."""
    inputs = make_inputs(workload)
    programs = _compiled(args.programs, inputs, args.xla)
    found: dict[str, Any] = {"T": workload.T, "H": workload.H, "V": workload.V, "programs": {}}
    dense: dict[str, float] = {}
    for mask, fraction, counted in settings(workload.T, args.fractions, args.masks):
        labels = jnp.where(counted, inputs.labels, -100)
        here = LinearInputs(inputs.x, inputs.w, labels)
        names = [n for n in programs if fraction == 1 or n in args.programs]
        ready = {n: Ready(programs[n], here, {}) for n in names}
        clocks = {n: timing.host_clock(call, most=4) for n, call in ready.items()}
        samples, errors = rounds.interleave(clocks, args.repeats)
        for name, taken in samples.items():
            entry = rounds.summary(taken) | {"active": int(counted.sum())}
            if fraction == 1:
                dense[name] = entry["ms"]
            if name in args.programs and f"{name}, static" in dense:
                entry["over_dense"] = round(entry["ms"] / dense[f"{name}, static"], 4)
            found["programs"].setdefault(name, {}).setdefault(mask, {})[str(fraction)] = entry
            print(f"  {name:24} {mask:18} {fraction:5.0%} {entry}", flush=True)
        for name, error in errors.items():
            print(f"  {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        if fraction == args.check:
            for name in args.programs:
                if name != "forward":
                    static = Ready(programs[f"{name}, static"], here, {})
                    agreement = _agreement(ready[name](), static(), counted)
                    found.setdefault("agreement", {}).setdefault(name, {})[mask] = agreement
                    print(f"  {name:24} {mask:18} agrees: {agreement}", flush=True)
    return found


def measure_padding(workload: Workload, args: argparse.Namespace) -> dict[str, Any]:
    """The times of a batch as it is and padded to its bucket: what the padding costs."""
    inputs = make_inputs(workload)
    x, labels = pad_to_bucket(inputs.x, inputs.labels)
    lengths = {"as it is": inputs, "padded": LinearInputs(x, inputs.w, labels)}
    programs = {
        (name, length): jax.jit(PROGRAMS[name]).lower(*here)
        for name in args.programs
        for length, here in lengths.items()
    }
    with concurrent.futures.ThreadPoolExecutor() as pool:
        compiled = pool.map(lambda program: program.compile(), programs.values())
        ready = {
            key: Ready(program, lengths[key[1]], {})
            for key, program in zip(programs, compiled, strict=True)
        }
    clocks = {key: timing.host_clock(call, most=4) for key, call in ready.items()}
    samples, errors = rounds.interleave(clocks, args.repeats)
    found: dict[str, Any] = {"T": workload.T, "padded_T": x.shape[0], "programs": {}}
    for (name, length), taken in samples.items():
        found["programs"].setdefault(name, {})[length] = rounds.summary(taken)
        print(f"  {name:24} {length:12} {rounds.summary(taken)}", flush=True)
    for key, error in errors.items():
        print(f"  {key}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    return found


def write(result: dict[str, Any], out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", default="llama3-16384,32768x3584x152064")
    parser.add_argument("--programs", nargs="+", default=[*PROGRAMS], choices=[*PROGRAMS])
    parser.add_argument("--masks", nargs="+", default=[*MASKS], choices=[*MASKS])
    parser.add_argument("--fractions", nargs="+", type=float, default=[*FRACTIONS])
    parser.add_argument("--padding", default="", help="workloads timed padded to their buckets")
    parser.add_argument("--check", type=float, default=0.25, help="where twins are compared")
    parser.add_argument("--xla", action="store_true", help="also time XLA's dense loss")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--commit", help="what is measured; default: ask git")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/active_h200.json"))
    args = parser.parse_args()
    made_by = environment(args.commit)
    result: dict[str, Any] = {"suite": "active", "environment": made_by, "workloads": {}}
    for workload in select(args.workloads):
        print(f"{workload.name} {workload.shape}", flush=True)
        result["workloads"][workload.name] = measure(workload, args)
        write(result, args.out)
    for workload in select(args.padding) if args.padding else ():
        print(f"{workload.name} {workload.shape}, padded to its bucket", flush=True)
        result.setdefault("padding", {})[workload.name] = measure_padding(workload, args)
        write(result, args.out)


if __name__ == "__main__":
    main()
