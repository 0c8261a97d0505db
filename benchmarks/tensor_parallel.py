"""Times the losses over the GPUs of one host: ``python -m benchmarks.tensor_parallel --help``.

For each workload and mesh, in one process and interleaved rounds: the loss on the mesh, the same
call on one GPU at the shape of one shard alone (``local``), that on all GPUs of the mesh at once,
which send nothing (``apart``), and the naive loss under jit with the same shardings, which XLA
partitions (``xla``). A mesh of more devices than are here gets ``local`` and the bytes that it
would send: the model of its scaling. The same command again does what the first had no time for,
into the same file.
"""

import argparse
import functools
import json
import math
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import rounds, timing
from benchmarks.candidates import linear_ce_loss
from benchmarks.collectives import collectives, expected_bytes
from benchmarks.inputs import make_inputs
from benchmarks.results import Entry, Store, error_words
from benchmarks.run import environment
from benchmarks.workloads import Workload, select
from pallas_loss import fused_linear_ce, fused_linear_logprob

WORKLOADS = "8192x4096x262144,8192x4096x131072,8192x8192x131072,32768x4096x128256"
MESHES = "tp=1,tp=2,dp=2,tp=4,dp=2:tp=2,tp=8,dp=2:tp=4,dp=4:tp=2"
CANDIDATES = ("pallas_loss", "local", "apart", "xla")
OF_ONE_SHARD = ("local", "apart")
MODES = ("forward", "value_and_grad")
PRODUCTS = {"forward": 1, "value_and_grad": 3}
LOSSES = {
    "ce": 3,
    "ce_recompute": 3,
    "logprob_entropy": 4,
    "logprob_entropy_stored": 4,
}  # row sums that are merged


@dataclass(frozen=True)
class Layout:
    """A mesh of ``dp`` by ``tp`` devices."""

    dp: int
    tp: int

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """``dp=2:tp=4``."""
        sizes = dict(part.split("=") for part in text.split(":"))
        if not sizes or set(sizes) - {"dp", "tp"}:
            raise argparse.ArgumentTypeError(f"a mesh is like dp=2:tp=4, got {text!r}")
        return cls(int(sizes.get("dp", 1)), int(sizes.get("tp", 1)))

    def __str__(self) -> str:
        return f"dp={self.dp},tp={self.tp}"

    @property
    def size(self) -> int:
        return self.dp * self.tp

    @property
    def here(self) -> bool:
        return self.size <= len(jax.devices())

    def mesh(self) -> Mesh:
        kinds = (AxisType.Auto,) * 2
        devices = jax.devices()[: self.size]
        return jax.make_mesh((self.dp, self.tp), ("dp", "tp"), axis_types=kinds, devices=devices)

    def local(self, workload: Workload) -> Workload:
        """One device's part."""
        name = f"{workload.name} {self}"
        return Workload(name, workload.T // self.dp, workload.H, workload.V // self.tp)


SPECS = P("dp"), P("tp"), P("dp")


def scalar_loss(name: str, implementation: str | None, placed: dict[str, Any]) -> Callable:
    """A scalar of ``(x, w [V, H], labels)`` whose cotangents differ from token to token."""
    options = {"w_layout": "vh", "implementation": implementation} | placed
    if name.startswith("ce"):
        plan = "recompute" if name == "ce_recompute" else "auto"
        return partial(fused_linear_ce, backward=plan, **options)
    backward = "stored" if name.endswith("stored") else "recompute"

    def loss(x, w, labels):
        out = fused_linear_logprob(x, w, labels, entropy=True, backward=backward, **options)
        g = jnp.cos(jnp.arange(labels.shape[0], dtype=jnp.float32))
        return jnp.sum(g * out.logprob + 0.1 * out.entropy)

    return loss


def program(candidate: str, loss: str, mode: str, args, on_mesh: bool) -> Callable:
    """The function to compile."""
    if candidate == "xla":
        f = linear_ce_loss("xla_bf16", "vh")
    else:
        placed = {"vocab_axis": "tp", "token_axes": "dp"} if on_mesh else {}
        f = scalar_loss(loss, args.implementation, placed)
    return jax.value_and_grad(f, argnums=(0, 1)) if mode == "value_and_grad" else f


def inputs_on(mesh: Mesh, workload: Workload, dtype: str) -> tuple[jax.Array, ...]:
    """``x``, ``w`` and the labels, sharded."""
    inputs = make_inputs(workload, jnp.dtype(dtype))
    return jax.device_put(tuple(inputs), tuple(NamedSharding(mesh, spec) for spec in SPECS))


def copies_on(mesh: Mesh, workload: Workload, dtype: str) -> tuple[jax.Array, ...]:
    """The inputs of a workload, one copy for each device, side by side in one array."""
    devices, spec = mesh.devices.ravel(), NamedSharding(mesh, P(mesh.axis_names))

    def copied(a: jax.Array) -> jax.Array:
        parts = [jax.device_put(a, device) for device in devices]
        shape = (len(parts) * a.shape[0], *a.shape[1:])
        return jax.make_array_from_single_device_arrays(shape, spec, parts)

    return tuple(map(copied, make_inputs(workload, jnp.dtype(dtype))))


class Lowered(NamedTuple):
    """A program on its way: the inputs are there, the compiler has it or is yet to be asked."""

    inputs: tuple[jax.Array, ...]
    lowered: jax.stages.Lowered
    lower_s: float

    def compile(self) -> tuple[jax.stages.Compiled, float]:
        start = time.perf_counter()
        return self.lowered.compile(), time.perf_counter() - start


def lower(key, workload: Workload, args, inputs_of) -> Lowered:
    """The program of a key; fails where tracing does."""
    layout, loss, candidate, mode = key
    of_one = candidate in OF_ONE_SHARD
    mesh = (Layout(1, 1) if candidate == "local" else layout).mesh()
    f = program(candidate, loss, mode, args, on_mesh=not of_one and layout.size > 1)
    shardings = tuple(NamedSharding(mesh, spec) for spec in SPECS)
    out = (NamedSharding(mesh, P()), shardings[:2]) if mode == "value_and_grad" else None
    if candidate == "apart":
        inputs = copies_on(mesh, layout.local(workload), args.dtype)
        every = P(mesh.axis_names)
        f = jax.shard_map(_one_each(f), mesh=mesh, in_specs=every, out_specs=every)
        shardings, out = NamedSharding(mesh, every), None
    else:
        inputs = inputs_of(mesh, layout.local(workload) if of_one else workload, args.dtype)
    start = time.perf_counter()
    with jax.set_mesh(mesh):
        lowered = jax.jit(f, in_shardings=shardings, out_shardings=out).lower(*inputs)
    return Lowered(inputs, lowered, time.perf_counter() - start)


def _one_each(f: Callable) -> Callable:
    """``f`` inside a shard_map, whose value has no axis to lay devices' values along."""

    def run(*args):
        value, *grads = jax.tree.leaves(f(*args))
        return value[None], *grads

    return run


def prepare(program: Lowered, compiled, compile_s: float) -> tuple[Callable[[], Any], Entry]:
    """A call, made once, and what is known of it."""
    facts: Entry = {"compile_s": round(program.lower_s + compile_s, 2)}
    if (memory := compiled.memory_analysis()) is not None:
        facts["temp_bytes"] = memory.temp_size_in_bytes
        facts["argument_bytes"] = memory.argument_size_in_bytes
    facts["collectives"] = collectives(compiled.as_text())
    result = jax.block_until_ready(compiled(*program.inputs))
    facts["value"] = float(jnp.ravel(jax.tree.leaves(result)[0])[0])
    return (lambda: compiled(*program.inputs)), facts


def prepare_all(wanted, workload: Workload, args, store: Store, deadline: rounds.Deadline):
    """Calls and facts by key. What XLA tunes on the device it compiles with nothing beside it.

    That is every product of its own: the baseline's, and those of gradients made in the forward.
    """
    calls, facts, pending = {}, {}, {}
    inputs_of = functools.cache(inputs_on)

    def failed(key, error: Exception) -> None:
        store.fail(workload, *_names(key), error)
        print(f"  {_names(key)}: {error_words(error)}", flush=True)

    with ThreadPoolExecutor(max((os.cpu_count() or 1) // 2, 1)) as pool:
        for key in sorted(wanted, key=_has_products_of_xla):
            if deadline.left() < 0:
                print("no time left to compile more", flush=True)
                break
            try:
                program = lower(key, workload, args, inputs_of)
                if _has_products_of_xla(key):
                    wait([compiling for _, compiling in pending.values()])
                pending[key] = program, pool.submit(program.compile)
            except Exception as error:  # the others are still worth their time
                failed(key, error)
    for key, (program, compiling) in pending.items():
        try:
            calls[key], facts[key] = prepare(program, *compiling.result())
        except Exception as error:
            failed(key, error)
    return calls, facts


def _has_products_of_xla(key) -> bool:
    _, loss, candidate, mode = key
    return candidate == "xla" or (loss, mode) == ("ce", "value_and_grad")


def derive(entry, workload: Workload, key, timed) -> dict[str, Any]:
    """The entry with TFLOP/s a GPU, and how it compares with one GPU and with its shard alone."""
    layout, loss, candidate, mode = key
    ms, of_one = entry["ms"], candidate in OF_ONE_SHARD
    flops = PRODUCTS[mode] * layout.local(workload).gemm_flops
    entry["tflops_per_gpu"] = round(flops / ms / 1e9, 1)
    whole = "pallas_loss" if of_one else candidate
    one = timed.get((Layout(1, 1), loss, whole, mode))
    if one:
        entry["efficiency"] = round(one["ms"] / (layout.size * ms), 4)
    if one and not of_one and one["value"]:
        entry["value_off"] = abs(entry["value"] / one["value"] - 1)
    for other in OF_ONE_SHARD if candidate == "pallas_loss" and layout.size > 1 else ():
        if alone := timed.get((layout, loss, other, mode)):
            entry[f"over_{other}"] = round(ms / alone["ms"], 4)
    return entry


def keys(args) -> Iterator[tuple[Layout, str, str, str]]:
    """What is timed, in the order in which it is prepared."""
    for layout in args.meshes:
        for loss in args.losses:
            for candidate in args.candidates:
                if candidate == "xla" and loss != "ce":
                    continue
                if candidate in OF_ONE_SHARD and layout.size == 1:
                    continue
                if candidate != "local" and not layout.here:
                    continue
                yield from ((layout, loss, candidate, mode) for mode in args.modes)


def measure(workload: Workload, args, store: Store, deadline: rounds.Deadline) -> None:
    """Fills in the entries of one workload."""
    wanted = [key for key in keys(args) if store.needs(workload, *_names(key))]
    calls, facts = prepare_all(wanted, workload, args, store, deadline)
    clocks = {key: timing.host_clock(call, batch_ms=60.0) for key, call in calls.items()}
    samples, errors = rounds.interleave(clocks, args.repeats, deadline)
    for key, error in errors.items():
        store.fail(workload, *_names(key), error)
    for key, taken in samples.items():
        layout, loss, _, mode = key
        entry = {"run": store.run, "clock": "host"} | facts[key] | rounds.summary(taken)
        entry["expected_bytes"] = expected_bytes(
            workload.T, workload.H, workload.V, layout.dp, layout.tp, LOSSES[loss],
            mode == "value_and_grad", jnp.dtype(args.dtype).itemsize,
        )  # fmt: skip
        store.put(workload, *_names(key), entry)
    held = store.candidates(workload)
    timed = {
        key: entry
        for key in keys(args)
        if (entry := held.get(_names(key)[0], {}).get(_names(key)[1])) and "ms" in entry
    }
    for key, entry in timed.items():
        entry = derive(dict(entry), workload, key, timed)
        store.put(workload, *_names(key), entry)
        if key in samples:
            print(f"  {line(key, entry)}", flush=True)
    store.save()


def _names(key) -> tuple[str, str]:
    layout, loss, candidate, mode = key
    return f"{layout} {candidate}", f"{loss} {mode}"


def _links() -> list[str]:
    """How the GPUs are connected."""
    if jax.default_backend() != "gpu":
        return []
    table = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True).stdout
    return [" ".join(row.split()) for row in table.splitlines() if row.startswith("GPU")]


def line(key, entry) -> str:
    """One entry as text."""
    name, mode = _names(key)
    parts = [f"{name:26} {mode:38} {entry['ms']:9.3f} ms {entry['tflops_per_gpu']:7.1f} TF/s/GPU"]
    parts += [
        f"{k} {entry[k]:.3f}" for k in ("efficiency", "over_local", "over_apart") if k in entry
    ]
    return "  ".join([*parts, f"{entry.get('temp_bytes', math.nan) / 2**20:.0f} MiB"])


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    words = lambda text: [word for word in text.split(",") if word]  # noqa: E731
    meshes = lambda text: [Layout.parse(word) for word in words(text)]  # noqa: E731
    add = partial(parser.add_argument)
    add("--workloads", default=WORKLOADS)
    add("--meshes", type=meshes, default=meshes(MESHES), help=f"default {MESHES}")
    add(
        "--losses",
        type=words,
        default=["ce", "ce_recompute", "logprob_entropy"],
        help=f"of {', '.join(LOSSES)}",
    )
    add("--candidates", type=words, default=list(CANDIDATES))
    add("--modes", type=words, default=list(MODES))
    add("--repeats", type=int, default=5)
    add("--dtype", default="bfloat16")
    add("--implementation", help="default: the library's choice")
    add("--seconds", type=float, default=math.inf, help="start nothing new after so many")
    add("--out", type=Path, required=True)
    add("--commit")
    args = parser.parse_args(argv)
    for name, allowed in (("losses", LOSSES), ("candidates", CANDIDATES), ("modes", MODES)):
        if unknown := set(getattr(args, name)) - set(allowed):
            parser.error(f"--{name} has {sorted(unknown)}; there are {', '.join(allowed)}")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    run = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
    deadline = rounds.Deadline(time.time() + args.seconds)
    store = Store(args.out, run)
    header = {
        "suite": "tensor_parallel",
        "settings": {"dtype": args.dtype, "implementation": args.implementation},
        "environment": environment(args.commit) | {"gpus": len(jax.devices()), "links": _links()},
    }
    for key, value in header.items():
        if (held := store.data.setdefault(key, value)) != json.loads(json.dumps(value)):
            raise SystemExit(f"{args.out} has {key} {held}, and this run {value}: another --out")
    store.data.setdefault("started", run)
    for workload in select(args.workloads):
        if deadline.left() < 0:
            print(f"no time left for {workload.shape}", flush=True)
            continue
        print(f"{workload.shape}", flush=True)
        measure(workload, args, store, deadline)


if __name__ == "__main__":
    main()
