"""The memory that JAX candidates really take on the device; started by ``benchmarks.run``.

The allocator's peak cannot be reset and compiling raises it (XLA tries GEMM algorithms on buffers
of their real size). So this process has one workload, loads programs that ``jax_stage`` compiled
from JAX's persistent cache, fills its inputs with zeros, and runs the programs in ascending order
of their compiled size: each peak is then its own.
"""

import sys
from collections.abc import Callable, Iterable, Mapping

import jax
import jax.numpy as jnp

from benchmarks import stage
from benchmarks.candidates import GEMMS, Setting, Suite, suite
from benchmarks.jax_stage import Key, Ready, compile_program
from benchmarks.results import Store
from benchmarks.rounds import Deadline
from benchmarks.workloads import Workload

Stats = Callable[[], Mapping[str, int] | None]


def device_stats() -> Mapping[str, int] | None:
    """The allocator's counters; None where the platform keeps none."""
    return jax.devices()[0].memory_stats()


def peaks(ready: Mapping[Key, Ready], stats: Stats) -> Iterable[tuple[Key, int]]:
    """Peak bytes beyond the inputs and the outputs; none for a program that set no new peak."""
    by_size = sorted(
        ready.items(), key=lambda item: item[1].facts["temp_bytes"] + item[1].facts["output_bytes"]
    )
    for key, program in by_size:
        before = stats()
        jax.block_until_ready(program())
        peak = stats()["peak_bytes_in_use"]
        if peak > before["peak_bytes_in_use"]:
            outputs = program.facts["output_bytes"]
            yield key, max(peak - before["bytes_in_use"] - outputs, 0)


def measure_workload(wanted: Suite, workload: Workload, args, store: Store) -> None:
    """Adds ``peak_bytes`` to the workload's entries that have times."""
    shapes = jax.eval_shape(
        lambda: wanted.make_inputs(workload, jnp.dtype(args.dtype), args.layout, args.seed)
    )
    inputs = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
    setting = Setting(workload, inputs, args.layout, args.seed)
    ready: dict[Key, Ready] = {}
    for name in args.candidates or wanted.candidates:
        for mode, entry in store.candidates(workload).get(name, {}).items():
            if name == GEMMS or "temp_bytes" not in entry or entry["run"] != args.run:
                continue
            program = compile_program(wanted.build(name, setting)[mode])
            if "compile_s" in program.facts:
                print(f"  {name} {mode}: not in the cache, left out", flush=True)
            else:
                ready[name, mode] = program
    for (name, mode), peak in peaks(ready, device_stats):
        store.candidates(workload)[name][mode]["peak_bytes"] = peak
        print(f"  {name} {mode}: {peak / 2**20:.1f} MiB", flush=True)
        store.save()


def main() -> None:
    args = stage.arguments(sys.argv[1:])
    if device_stats() is None:
        print(f"  {jax.default_backend()} keeps no memory statistics")
        return
    wanted = suite(args.suite)

    def measure(store: Store, workload: Workload, deadline: Deadline) -> None:
        measure_workload(wanted, workload, args, store)

    stage.over_workloads(args, lambda store, workload: True, measure)


if __name__ == "__main__":
    main()
