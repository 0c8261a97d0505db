"""What should limit each kernel on a B200, from its tiles and its machine code.

    python -m benchmarks.schedule_model            # compiles (two minutes, no GPU), writes, renders
    python -m benchmarks.schedule_model --render   # the table in BLACKWELL.md from what was written

Nothing here is a measurement: tiles, bytes and instructions are counted, and divided by the rates
of ``B200``, to say which of them comes first and by how much.
"""

import argparse
import collections
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine_code import tile_path
from benchmarks.workloads import LINEAR, Workload
from pallas_loss.tuning import BlackwellConfig, blackwell, heuristics

HERE = Path(__file__).resolve().parent
RESULTS, PAGE = HERE / "results" / "schedule" / "b200.json", HERE / "BLACKWELL.md"
# The mathematical pipe's cycles for one instruction of a warp, beyond the one that issues it.
MUFU, ALU, PACKED = 8, 2, 2
ALU_OPS = ("FMNMX", "FMNMX3", "FSEL", "FSETP", "ISETP", "SEL", "LOP3", "SHF", "F2FP", "PRMT")


@dataclass(frozen=True)
class Chip:
    """Rates a clock; those of one multiprocessor where it says so."""

    multiprocessors: int = 148
    ghz: float = 1.965
    # 2.25 PFLOP/s of dense bfloat16: 128 x 256 x 16 products in 128 clocks.
    products: int = 4096
    # Twice the 5120 bytes of A100 and H100, for two dies. NVIDIA publishes no figure.
    l2_bytes: int = 10240
    hbm_bytes: float = 7.67e12 / 1.965e9
    # What one die's half of L2 holds.
    l2_holds: int = 63 << 20
    schedulers: int = 4  # of one multiprocessor


B200 = Chip()


@dataclass(frozen=True)
class Launch:
    """``times`` launches that multiply ``[m, k]`` by ``[k, n]`` and move ``out_bytes``."""

    kernel: str
    m: int
    n: int
    k: int
    times: float
    out_bytes: int
    config: BlackwellConfig


def launches(w: Workload) -> Iterator[Launch]:
    """The kernels of value and gradients, layout ``vh``, plain options.

    The recompute plan's four, and the one of ``in_forward``, whose two products are XLA's.
    """
    masked = int(w.V % 256 != 0)
    yield Launch("row_sums", w.T, w.V, w.H, 1, 0, blackwell.row_sums(masked))
    kept = w.T * w.V * 2
    yield Launch("exponentials", w.T, w.V, w.H, 1, kept, blackwell.exponentials(0))

    def time_of(rows: int, cols: int) -> float:
        return blackwell.product_time(rows, cols, B200.multiprocessors)

    split = heuristics.vocab_split(w.T, w.H, w.V, time_of)
    times = w.V / split
    dx, dw = (blackwell.product(m, w.H, B200.multiprocessors) for m in (w.T, split))
    yield Launch("dlogits", w.T, split, w.H, times, w.T * split * 2, blackwell.dlogits(0))
    yield Launch("add_dx", w.T, w.H, split, times, 2 * w.T * w.H * 4, dx)
    yield Launch("store_dw", split, w.H, w.T, times, split * w.H * 2, dw)


def schedule(launch: Launch, epilogue: Mapping[str, int], chip: Chip = B200) -> dict[str, Any]:
    """Counts of one launch, the clocks that each resource needs, and which needs most."""
    config = launch.config
    blocks, size = config.cluster, config.cluster * config.block_m
    rows, columns = math.ceil(launch.m / size), math.ceil(launch.n / config.block_n)
    together = chip.multiprocessors // blocks
    items = rows * math.ceil(columns / config.group)
    rounds = math.ceil(items / together) * min(config.group, columns)
    tiles = rows * columns
    steps = math.ceil(launch.k / config.tile_k)
    depth = steps * config.tile_k

    product = config.block_m * config.block_n * depth / chip.products
    issued, pipes = epilogue_clocks(epilogue, chip)
    slowest = max(issued, *pipes.values())
    tile_loads = (config.block_m + config.load_n) * depth * 2
    hbm = hbm_bytes(launch, rows, together, chip) + launch.out_bytes
    clocks = {
        "tensor cores": rounds * product,
        "epilogue": rounds * slowest,
        "L2": rounds * tile_loads * chip.multiprocessors / chip.l2_bytes,
        "memory": hbm / chip.hbm_bytes,
    }
    limiter = max(clocks, key=clocks.__getitem__)
    # The last tile's epilogue has no products beside it.
    total = clocks[limiter] + (product if limiter == "epilogue" else slowest)
    return {
        "tiles": tiles,
        "rounds": rounds,
        "tail_efficiency": tiles / (rounds * together),
        "edge_efficiency": launch.m * launch.n / (tiles * size * config.block_n),
        "product_clocks_per_tile": product,
        "epilogue_instructions": sum(epilogue.values()),
        "epilogue_issue_clocks_per_tile": issued,
        "epilogue_pipe_clocks_per_tile": pipes,
        "l2_to_smem_bytes": tile_loads * blocks * tiles,
        "tmem_bytes": blocks * tiles * config.block_m * config.block_n * 4,
        "hbm_bytes": hbm,
        "clocks": clocks,
        "limiter": limiter,
        "ms": launch.times * total / (chip.ghz * 1e6),
    }


def epilogue_clocks(epilogue: Mapping[str, int], chip: Chip) -> tuple[float, dict[str, float]]:
    """Clocks a tile of a scheduler: to issue, and of each pipe. Two warpgroups halve a tile."""
    names: collections.Counter[str] = collections.Counter()
    for op, count in epilogue.items():
        names[op.split(".")[0]] += count
    warps = 2 * 4 / chip.schedulers
    packed = names["FADD2"] + names["FMUL2"] + names["FFMA2"]
    single = names["FADD"] + names["FMUL"] + names["FFMA"]
    pipes = {
        "exp": warps * MUFU * names["MUFU"],
        "fma": warps * (PACKED * packed + single),
        "alu": warps * ALU * sum(names[op] for op in ALU_OPS),
    }
    return warps * sum(names.values()), pipes


def hbm_bytes(launch: Launch, rows: int, together: int, chip: Chip) -> float:
    """Operands read from memory: tiles walk strips of ``snake_width`` rows along the columns.

    A strip's rows stay in L2 if they fit there, else each round reads them again; the columns'
    operand passes once a strip, or once if it fits beside.
    """
    config = launch.config
    a, b = launch.m * launch.k * 2, launch.n * launch.k * 2
    width = min(config.snake_width, rows)
    strips = math.ceil(rows / width)
    strip = a / rows * width
    columns_together = together / width * config.group
    again = 1.0 if strip <= chip.l2_holds else launch.n / config.block_n / columns_together
    return a * max(again, 1.0) + b * (1 if strip + b <= chip.l2_holds else strips)


def compiled(w: Workload, columns: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """What a warp issues for a tile of each kernel, from an assembly for the chip.

    ``columns`` are those of its tile.
    """
    import jax
    import jax.numpy as jnp

    from pallas_loss import fused_linear_ce
    from tests import aot

    # In one chunk; the recompute plan's kernels are there too, for rows out of range.
    plan = {"backward": "in_forward", "workspace_bytes": 2 * w.T * w.V}

    def loss(x, w, labels):
        return fused_linear_ce(x, w, labels, w_layout="vh", implementation="mosaic_gpu", **plan)

    of = jax.ShapeDtypeStruct
    operands = of((w.T, w.H), jnp.bfloat16), of((w.V, w.H), jnp.bfloat16), of((w.T,), jnp.int32)
    kernels = aot.ptxas_report(jax.value_and_grad(loss, (0, 1)), *operands, target="b200")
    # Of two launches the later is over the rest of the vocabulary, and may have no loop.
    first = {kernel.name: kernel for kernel in reversed(kernels)}
    return {name: dict(tile_path(kernel.sass, columns[name])) for name, kernel in first.items()}


def model(w: Workload) -> dict[str, Any]:
    """The kernels of one workload."""
    planned = list(launches(w))
    epilogues = compiled(w, {launch.kernel: launch.config.tile_n for launch in planned})
    return {
        launch.kernel: asdict(launch) | schedule(launch, epilogues[launch.kernel])
        for launch in planned
    }


def forms() -> dict[str, dict[str, float]]:
    """Clocks a column of a tile and step of 64: products, and what L2 has to bring."""
    found = {}
    for name, options in {
        "two blocks, 256 columns": {},
        "two blocks, 192 columns": {"block_n": 192, "epilogue_n": 32},
        "two blocks, 128 columns": {"block_n": 128},
        "one block, 256 columns": {"collective": False, "stages": 3},
        "one block, 128 columns": {"collective": False, "block_n": 128},
    }.items():
        config = BlackwellConfig(**options)
        launch = Launch("any", 256 * 74, config.block_n, 64, 1, 0, config)
        clocks = schedule(launch, {})["clocks"]
        found[name] = {"L2 / products": clocks["L2"] / clocks["tensor cores"]}
        found[name]["smem_kib_a_step"] = (config.block_m + config.load_n) * 64 * 2 / 1024
        found[name]["steps_held"] = config.stages
    return found


def tables(data: Mapping[str, Any]) -> Iterator[str]:
    """The page's tables: forms of a tile, workloads."""
    yield "| form | L2 to products | shared memory a step, KiB | steps held |"
    yield "| --- | --- | --- | --- |"
    for name, form in data["forms"].items():
        ratio, kib, steps = form.values()
        yield f"| {name} | {ratio:.2f} | {kib:.0f} | {steps} |"
    yield ""
    head = (
        *("T x H x V", "kernel", "launches", "tiles", "rounds", "full", "products", "epilogue"),
        *("L2 to SM, GB", "memory, GB", "expected limiter", "next", "ms at least"),
    )
    yield "| " + " | ".join(head) + " |"
    yield "|" + " --- |" * len(head)
    for name, kernels in data["workloads"].items():
        for kernel, s in kernels.items():
            pipes = s["epilogue_pipe_clocks_per_tile"].values()
            slow = max(s["epilogue_issue_clocks_per_tile"], *pipes)
            first, second = sorted(s["clocks"], key=s["clocks"].__getitem__)[:-3:-1]
            cells = (
                *(name, kernel, f"{s['times']:.4g}", s["tiles"], s["rounds"]),
                f"{100 * s['tail_efficiency'] * s['edge_efficiency']:.0f}%",
                *(f"{s['product_clocks_per_tile']:.0f}", f"{slow:.0f}"),
                *(f"{s['times'] * s[k] / 1e9:.1f}" for k in ("l2_to_smem_bytes", "hbm_bytes")),
                *(first, f"{second}, {s['clocks'][second] / s['clocks'][first]:.2f}"),
                f"{s['ms']:.2f}",
            )
            yield "| " + " | ".join(map(str, cells)) + " |"


def render(text: str, data: Mapping[str, Any]) -> str:
    """``text`` with the table between its marks."""
    marks = r"(<!-- schedule -->\n).*?(<!-- /schedule -->)"
    content = "\n".join(tables(data))
    return re.sub(marks, lambda m: f"{m[1]}{content}\n{m[2]}", text, flags=re.DOTALL)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.schedule_model")
    parser.add_argument("--render", action="store_true", help="only write the table again")
    if not parser.parse_args(argv).render:
        data = {
            "status": "compiled and simulated, not yet run",
            "chip": asdict(B200),
            "forms": forms(),
            "workloads": {w.shape: model(w) for w in LINEAR},
        }
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(json.dumps(data, indent=1) + "\n")
    data = json.loads(RESULTS.read_text())
    PAGE.write_text(render(PAGE.read_text(), data))
    print(*tables(data), sep="\n")


if __name__ == "__main__":
    main()
