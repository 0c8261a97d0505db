"""Times the losses from logits: ``python -m benchmarks.rows --help``.

They are bound by memory, so the figure is GB/s: each input counted once and, with gradients, the
gradient once, whoever moves more. The yardstick, of the same rounds and the same logits, is the
faster of a copy from device to device and XLA's own elementwise kernel, each counted as one read
and one write. Device time is CUPTI's; a copy is no kernel, so it has the host's clock, over a batch
of calls. The arrays are several times as large as any L2 and each sample follows an untimed call,
which leaves the end of the arrays in it, where a sample does not begin.
"""

import argparse
import concurrent.futures
import contextlib
import datetime
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks import rounds, timing
from benchmarks.candidates import Program
from benchmarks.jax_stage import Ready, compile_program
from benchmarks.results import error_words
from benchmarks.run import environment
from benchmarks.workloads import LOGIT_STD, RowWorkload, select_rows
from pallas_loss import fused_ce, fused_forward_kl, fused_reverse_kl, fused_soft_ce, tuning

ROOT = Path(__file__).resolve().parent.parent
FORWARD, GRADIENT = "forward", "value_and_grad"
COPY, ELEMENTWISE = "copy", "xla_elementwise"
Entry = dict[str, Any]


class Inputs(NamedTuple):
    """``logits``, ``target`` logits ``[T, V]``; ``labels [T]``."""

    logits: jax.Array
    target: jax.Array
    labels: jax.Array


@partial(jax.jit, static_argnums=(1, 2))
def make_inputs(key, workload: RowWorkload, dtype) -> Inputs:
    """Logits with the spread of a trained head's; a target that agrees with them in part."""
    shape = workload.T, workload.V
    keys = jax.random.split(key, 3)
    draw = lambda key: LOGIT_STD * jax.random.normal(key, shape, dtype)  # noqa: E731
    logits = draw(keys[0])
    target = (logits + draw(keys[1])) / 2
    return Inputs(logits, target, jax.random.randint(keys[2], shape[:1], 0, workload.V))


def _plain_ce(x: Inputs) -> jax.Array:
    z = x.logits.astype(jnp.float32)
    at_label = jnp.take_along_axis(z, x.labels[:, None], axis=1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(z, axis=1) - at_label)


def _log_softmaxes(x: Inputs):
    return (jax.nn.log_softmax(v.astype(jnp.float32), axis=1) for v in (x.logits, x.target))


def _plain_reverse_kl(x: Inputs) -> jax.Array:
    p, q = _log_softmaxes(x)
    return jnp.mean(jnp.sum(jnp.exp(p) * (p - q), axis=1))


def _plain_forward_kl(x: Inputs) -> jax.Array:
    p, q = _log_softmaxes(x)
    return jnp.mean(jnp.sum(jnp.exp(q) * (q - p), axis=1))


def _plain_soft_ce(x: Inputs) -> jax.Array:
    p, q = _log_softmaxes(x)
    return -jnp.mean(jnp.sum(jnp.exp(q) * p, axis=1))


class Loss(NamedTuple):
    """The library's, the code that a JAX user would write, and how many arrays are read."""

    ours: Callable[..., jax.Array]
    plain: Callable[[Inputs], jax.Array]
    reads: int


LOSSES = {
    "ce": Loss(lambda x, **o: fused_ce(x.logits, x.labels, **o), _plain_ce, 1),
    "reverse_kl": Loss(
        lambda x, **o: fused_reverse_kl(x.logits, x.target, **o), _plain_reverse_kl, 2
    ),
    "soft_ce": Loss(
        lambda x, **o: fused_soft_ce(x.logits, target_logits=x.target, **o), _plain_soft_ce, 2
    ),
    "forward_kl": Loss(
        lambda x, **o: fused_forward_kl(x.logits, x.target, **o), _plain_forward_kl, 2
    ),
}


def function(loss: Loss, candidate: str) -> Callable[[Inputs], jax.Array]:
    """``pallas_loss``, ``pallas_loss:NAME`` or ``xla``, what a user would write."""
    library, _, implementation = candidate.partition(":")
    if library == "pallas_loss":
        return partial(loss.ours, implementation=implementation or None)
    if candidate != "xla":
        raise ValueError(
            f"no candidate {candidate!r}; there are pallas_loss, pallas_loss:NAME, xla"
        )
    return loss.plain


def gradient_of(f: Callable[[Inputs], jax.Array]) -> Callable[[Inputs], Any]:
    """The value and its gradient in the logits."""
    return lambda x: jax.value_and_grad(lambda z: f(x._replace(logits=z)))(x.logits)


def nbytes(workload: RowWorkload, loss: Loss, mode: str, itemsize: int) -> int:
    """What cannot but be moved."""
    return (loss.reads + (mode == GRADIENT)) * workload.T * workload.V * itemsize


@jax.jit
def _distance(got, want):
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return jnp.linalg.norm(got - want) / jnp.linalg.norm(want)


def yardsticks(logits: jax.Array) -> dict[tuple[str, str], rounds.Clock]:
    """The clocks of the two copies."""
    negate = jax.jit(jnp.negative).lower(logits).compile()
    clocks = {(COPY, COPY): timing.host_clock(lambda: jnp.copy(logits), batch_ms=60, most=64)}
    if timing.no_kernel_clock() is None:
        clocks[ELEMENTWISE, COPY] = timing.kernel_clock(negate, (logits,))
    else:
        clocks[ELEMENTWISE, COPY] = timing.host_clock(lambda: negate(logits))
    return clocks


@contextlib.contextmanager
def row_config(words: str) -> Iterator[None]:
    """The fields of the one-pass kernel's ``RowConfig``, in their order; none for its own."""
    if not words:
        yield
        return
    with tuning.override(tuning.RowConfig(*map(int, words.split(","))), "both"):
        yield


def measure(workload: RowWorkload, names: Sequence[str], args, deadline) -> dict[str, Any]:
    """``{loss: {candidate: {mode: entry}}}`` of one workload, and its yardstick."""
    dtype = jnp.dtype(args.dtype)
    x = jax.block_until_ready(make_inputs(jax.random.key(args.seed), workload, dtype))
    ready: dict[tuple[str, str, str], Ready] = {}
    found: dict[str, Any] = {name: {} for name in names}
    candidates, modes = args.candidates.split(","), args.modes.split(",")

    def compiled(name: str, candidate: str, mode: str) -> Ready:
        f = function(LOSSES[name], candidate)
        with row_config(args.config if candidate.startswith("pallas") else ""):
            program = Program(gradient_of(f) if mode == GRADIENT else f, (x,))
            return compile_program(program, alone=args.jobs == 1)

    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        keys = itertools.product(names, candidates, modes)
        made = {key: pool.submit(compiled, *key) for key in keys}
    for name in names:
        loss = LOSSES[name]
        want = None
        for candidate in candidates:
            entries = found[name].setdefault(candidate, {})
            for mode in modes:
                try:
                    ready[name, candidate, mode] = made[name, candidate, mode].result()
                    out = jax.block_until_ready(ready[name, candidate, mode]())
                    entries[mode] = dict(ready[name, candidate, mode].facts)
                    if mode == GRADIENT:
                        want = want or jax.block_until_ready(
                            jax.jit(gradient_of(function(loss, "pallas_loss:xla")))(x)
                        )
                        entries[mode] |= {
                            "value": float(out[0]),
                            "distance": [
                                round(float(abs(out[0] - want[0]) / abs(want[0])), 9),
                                round(float(_distance(out[1], want[1])), 9),
                            ],
                        }
                    print(f"  {name} {candidate} {mode}: {entries[mode]}", flush=True)
                except Exception as error:  # one that fails must not stop the others
                    ready.pop((name, candidate, mode), None)
                    entries[mode] = {"error": error_words(error)}
                    print(f"  {name} {candidate} {mode}: {entries[mode]['error']}", flush=True)
        del want
    clocks: dict[Any, rounds.Clock] = dict(yardsticks(x.logits))
    on_device = timing.no_kernel_clock() is None
    for key, program in ready.items():
        if on_device:
            clocks[key] = timing.kernel_clock(program.compiled, program.args)
        else:
            clocks[key] = timing.host_clock(program)
    samples, errors = rounds.interleave(clocks, args.repeats, deadline)
    copied = 2 * workload.T * workload.V * dtype.itemsize
    rates = {k[0]: copied / rounds.summary(samples[k])["ms"] / 1e6 for k in samples if len(k) == 2}
    best = max(rates.values())
    for key, taken in samples.items():
        if len(key) == 3:
            name, candidate, mode = key
            entry = found[name][candidate][mode]
            entry |= rounds.summary(taken) | {"clock": "cupti" if on_device else "host"}
            add_rate(entry, nbytes(workload, LOSSES[name], mode, dtype.itemsize), best)
    for key, error in errors.items():
        print(f"  {key}: {error_words(error)}", flush=True)
    return {
        "T": workload.T,
        "V": workload.V,
        "yardstick_gb_per_s": {k: round(v, 1) for k, v in rates.items()},
        "losses": found,
    }


def add_rate(entry: Entry, moved: int, best: float) -> None:
    """GB/s, and the fraction of the yardstick's."""
    rate = moved / entry["ms"] / 1e6
    entry |= {"gb_per_s": round(rate, 1), "of_yardstick": round(rate / best, 4)}


def run_peers(args, workloads: Sequence[RowWorkload], minutes: float) -> dict[str, Any]:
    """The PyTorch peers' times, in a process that ends before JAX takes the device."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "peers.json"
        command = [sys.executable, "-m", "benchmarks.row_peers", f"--out={out}"]
        command += [f"--workloads={','.join(w.name for w in workloads)}"]
        command += [f"--{k}={getattr(args, k)}" for k in ("losses", "peers", "repeats", "dtype")]
        command += [f"--deadline={time.time() + 60 * minutes}"]
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(command, cwd=ROOT, timeout=60 * minutes + 30)
        return json.loads(out.read_text()) if out.exists() else {}


def table(data: dict[str, Any]) -> Iterator[str]:
    """A line for each candidate."""
    for name, workload in data["workloads"].items():
        yield f"{name}  yardstick {workload['yardstick_gb_per_s']} GB/s"
        for loss, candidates in workload["losses"].items():
            for candidate, modes in candidates.items():
                words = [
                    f"{mode} {e['ms']:.4f} ms {e['gb_per_s']:.0f} GB/s {e['of_yardstick']:.3f}"
                    if "ms" in e
                    else f"{mode} {e.get('error', 'not timed')[:90]}"
                    for mode, e in modes.items()
                ]
                far = next((e["distance"] for e in modes.values() if "distance" in e), "")
                yield f"  {loss:11} {candidate:24} " + " | ".join(words) + f"  {far}"


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rows",
        description="Time the losses from logits on this machine.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--losses", default=",".join(LOSSES))
    parser.add_argument("--workloads", default="all", help="TxV, with commas")
    parser.add_argument("--candidates", default="pallas_loss,pallas_loss:xla,xla")
    parser.add_argument("--modes", default=f"{GRADIENT},{FORWARD}")
    parser.add_argument(
        "--config", default="", help="lines,steps,warpgroups,slots,ring,ahead,in_l2"
    )
    parser.add_argument("--peers", default="", help="PyTorch peers, in a process of their own")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="programs that compile side by side")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/rows.json"))
    parser.add_argument("--commit", help="what is measured; default: ask git")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    deadline = rounds.Deadline(time.time() + 60 * args.minutes)
    data: dict[str, Any] = {
        "schema": 1,
        "suite": "rows",
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "settings": {k: getattr(args, k) for k in ("dtype", "seed", "config")},
        "environment": environment(args.commit),
        "workloads": {},
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    workloads = select_rows(args.workloads)
    peers = run_peers(args, workloads, args.minutes / 3) if args.peers else {}
    for workload in workloads:
        if deadline.left() < 0:
            print(f"no time left for {workload.name}")
            break
        print(workload.name, flush=True)
        made = measure(workload, args.losses.split(","), args, deadline)
        best = max(made["yardstick_gb_per_s"].values())
        for loss, candidates in peers.get(workload.name, {}).items():
            for modes in candidates.values():
                for mode, entry in modes.items():
                    if "ms" in entry:
                        size = jnp.dtype(args.dtype).itemsize
                        add_rate(entry, nbytes(workload, LOSSES[loss], mode, size), best)
            made["losses"][loss] |= candidates
        data["workloads"][workload.name] = made
        args.out.write_text(json.dumps(data, indent=1) + "\n")
    print("\n".join(table(data)), flush=True)


if __name__ == "__main__":
    main()
