"""Times the JAX candidates of a suite, all in one process; started by ``benchmarks.run``.

For each workload: compile everything, check each candidate's result against a reference, then
time all of them in interleaved rounds, by the host's clock and by the device's.
"""

import concurrent.futures
import logging
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import rounds, stage, timing
from benchmarks.candidates import GEMMS, Program, Setting, Suite, suite
from benchmarks.results import NUM_PRODUCTS, Entry, Store, derive, gemms_ms
from benchmarks.workloads import Workload

Key = tuple[str, str]  # candidate, mode


@dataclass(frozen=True)
class Ready:
    """A compiled program, its arguments, and what compiling it told."""

    compiled: jax.stages.Compiled
    args: tuple[Any, ...]
    facts: Entry

    def __call__(self) -> Any:
        return self.compiled(*self.args)


@cache
def _cache_hits() -> list[str]:
    """Grows by one for each program that JAX's persistent cache served."""
    hits: list[str] = []
    jax.monitoring.register_event_listener(
        lambda event, **_: hits.append(event) if event.endswith("/cache_hits") else None
    )
    return hits


def compile_program(program: Program, alone: bool = True) -> Ready:
    """Lowers and compiles from nothing.

    A compile that a cache served, or that others ran beside, has no ``compile_s``.
    """
    hits = len(_cache_hits())
    start = time.perf_counter()
    lowered = jax.jit(program.function).lower(*program.args)
    lowered_at = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - start
    facts: Entry = {}
    if alone and len(_cache_hits()) == hits:
        facts = {"compile_s": round(seconds, 3), "lower_s": round(lowered_at - start, 3)}
    if (memory := compiled.memory_analysis()) is not None:
        facts["temp_bytes"] = memory.temp_size_in_bytes
        facts["output_bytes"] = memory.output_size_in_bytes
    return Ready(compiled, program.args, facts)


@jax.jit
def _distances(outputs, references):
    """``|a - b| / |b|`` of each array, in float32."""

    def distance(a, b):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.linalg.norm(jnp.ravel(a - b)) / jnp.linalg.norm(jnp.ravel(b))

    return jax.tree.map(distance, outputs, references)


def measure_workload(
    wanted: Suite, workload: Workload, names: list[str], args, store: Store, deadline
) -> None:
    """Fills in the entries of one workload."""
    inputs = wanted.make_inputs(workload, jnp.dtype(args.dtype), args.layout, args.seed)
    jax.block_until_ready(inputs)
    setting = Setting(workload, inputs, args.layout, args.seed)
    programs: dict[Key, Program] = {}
    for name in names:
        programs |= _programs(wanted, name, setting, store)
    ready = _compiled(programs, args.jobs, workload, store, deadline)
    if not any(name != GEMMS for name, _ in ready):
        return
    facts = _run_once(wanted, ready, workload, store)
    keys = [key for key in ready if key in facts]
    times = _time(ready, keys, args.repeats, store, workload, deadline)
    for key, entry in times.items():
        store.put(workload, *key, {"run": store.run} | facts[key] | entry)
    candidates = store.candidates(workload)
    for name, mode in times:
        products, compared_with = wanted.modes.get(mode) or (NUM_PRODUCTS[mode], ())
        gemms = {n: gemms_ms(candidates, "jax", n) for n in compared_with}
        flops = products * workload.gemm_flops
        store.put(workload, name, mode, derive(candidates[name][mode], flops, gemms))
    store.save()


def _programs(wanted, name, setting: Setting, store: Store) -> dict[Key, Program]:
    """The candidate's programs that are needed; what fails is written down."""
    workload = setting.workload
    try:
        programs: Mapping[str, Program] = wanted.build(name, setting)
    except Exception as error:  # an absent library, mostly
        for mode in wanted.modes:
            store.fail(workload, name, mode, error)
        return {}
    return {
        (name, mode): program
        for mode, program in programs.items()
        if name == GEMMS or store.needs(workload, name, mode)
    }


def _compiled(
    programs: Mapping[Key, Program], jobs: int, workload: Workload, store: Store, deadline
) -> dict[Key, Ready]:
    """All that compile, ``jobs`` at a time; past the deadline the bare GEMMs alone are begun."""
    ready: dict[Key, Ready] = {}

    def compiled(name: str, program: Program) -> Ready:
        if name != GEMMS and deadline.left() < 0:
            raise TimeoutError
        return compile_program(program, alone=jobs == 1)

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        made = {key: pool.submit(compiled, key[0], p) for key, p in programs.items()}
        for (name, mode), program in made.items():
            with stage.attempt(store, workload, name, mode, broken):
                ready[name, mode] = program.result()
                print(f"  {name} {mode}: {ready[name, mode].facts}", flush=True)
    return ready


def _run_once(wanted, ready: dict[Key, Ready], workload, store: Store) -> dict[Key, Entry]:
    """Each program's facts, with its distance from the reference; none for one that failed."""
    facts: dict[Key, Entry] = {}
    reference = reference_name = None
    gradients = next(iter(wanted.modes))
    first = [(name, gradients) for name in wanted.references if (name, gradients) in ready]
    for key in [*first, *(key for key in ready if key not in first)]:
        name, mode = key
        with stage.attempt(store, workload, name, mode, broken):
            out = jax.block_until_ready(ready[key]())
            fact = dict(ready[key].facts)
            if mode == gradients and name != GEMMS:
                if reference is None and key in first:
                    reference, reference_name = out, name
                if reference is not None:
                    distances = jax.tree.leaves(_distances(out, reference))
                    fact["value"] = float(jax.tree.leaves(out)[0])
                    fact["distance"] = [round(float(d), 8) for d in distances]
                    fact["distance_from"] = reference_name
            facts[key] = fact
    return facts


def _time(ready, keys, repeats: int, store: Store, workload, deadline) -> dict[Key, Entry]:
    """Interleaved rounds by the host's clock, then by the device's where there is one."""
    clocks: dict[Key, rounds.Clock] = {}
    for key in keys:
        with stage.attempt(store, workload, *key, broken):
            clocks[key] = timing.host_clock(ready[key])
    by_host, errors = rounds.interleave(clocks, repeats, deadline)
    by_device: dict[Key, list[float]] = {}
    if timing.no_kernel_clock() is None:
        kernels = {k: timing.kernel_clock(ready[k].compiled, ready[k].args) for k in by_host}
        by_device, kernel_errors = rounds.interleave(kernels, repeats, deadline)
        for key, error in kernel_errors.items():
            print(f"  {key}: no device time, {error}", flush=True)
    for key, error in errors.items():
        store.fail(workload, *key, error)
    times: dict[Key, Entry] = {}
    for key, samples in by_host.items():
        if key in by_device:
            entry = {"clock": "cupti"} | rounds.summary(by_device[key])
        else:
            entry = {"clock": "host"} | rounds.summary(samples)
        times[key] = entry | rounds.summary(samples, prefix="host_")
    return times


def in_order(names: list[str]) -> list[str]:
    """Ours first, so that their compile is cold; then the GEMMs, which none can do without."""
    return sorted(names, key=lambda n: 0 if n.startswith("pallas_loss") else 1 + (n != GEMMS))


def broken() -> bool:
    """Whether the device no longer answers, as after an illegal access."""
    try:
        jax.block_until_ready(jnp.ones(8) + 1)
    except Exception:
        return True
    return False


def main() -> None:
    args = stage.arguments(sys.argv[1:])
    logging.basicConfig(format="  %(name)s: %(message)s", stream=sys.stdout)
    logging.getLogger("pallas_loss").setLevel(logging.INFO)  # it says what None picked
    wanted = suite(args.suite)
    names = in_order([*(args.candidates or wanted.candidates), GEMMS])
    jax.block_until_ready(jax.jit(lambda x: x + 1)(jnp.ones(8)))  # the compiler's own start
    print(f"jax on {jax.devices()[0].device_kind}; CUPTI: {timing.no_kernel_clock() or 'yes'}")

    def needed(store: Store, workload: Workload) -> bool:
        pairs = ((name, mode) for name in names if name != GEMMS for mode in wanted.modes)
        return any(store.needs(workload, *pair) for pair in pairs)

    def measure(store: Store, workload: Workload, deadline: rounds.Deadline) -> None:
        measure_workload(wanted, workload, names, args, store, deadline)

    stage.over_workloads(args, needed, measure)


if __name__ == "__main__":
    main()
