"""Which kernels of one call run when, over several GPUs: ``python -m benchmarks.timeline --help``.

Records value and both gradients on a mesh with JAX's profiler, and says how much of the
communication other kernels hide.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from matplotlib.figure import Figure

from benchmarks import tensor_parallel
from benchmarks.run import environment
from benchmarks.tensor_parallel import LOSSES, Layout, inputs_on
from benchmarks.workloads import select


class Kernel(NamedTuple):
    """Times in milliseconds from the first kernel's begin."""

    stream: str
    name: str
    begin: float
    end: float

    @property
    def communicates(self) -> bool:
        return "nccl" in self.name.lower()


def record(call: Callable[[], Any]) -> list[Kernel]:
    """The kernels of one call on the first GPU, in the order of their begins."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(call())
        (path,) = Path(folder).rglob("*.xplane.pb")
        planes = {p.name: p for p in jax.profiler.ProfileData.from_file(str(path)).planes}
        return read(planes["/device:GPU:0"].lines)


def read(lines) -> list[Kernel]:
    """The kernels of a device's streams; ``lines`` have a name and events, these ns."""
    found = [
        (line.name, event.name, event.start_ns, event.start_ns + event.duration_ns)
        for line in lines
        if line.name.startswith("Stream")
        for event in line.events
    ]
    first = min((begin for *_, begin, _ in found), default=0)
    kernels = [Kernel(s, n, (b - first) / 1e6, (e - first) / 1e6) for s, n, b, e in found]
    return sorted(kernels, key=lambda kernel: kernel.begin)


def exposed(kernels: Sequence[Kernel]) -> float:
    """Milliseconds in which nothing but communication runs."""
    marks = sorted({edge for k in kernels for edge in (k.begin, k.end)})
    alone = 0.0
    for begin, end in zip(marks, marks[1:], strict=False):
        running = [k.communicates for k in kernels if k.begin <= begin and k.end >= end]
        alone += end - begin if running and all(running) else 0.0
    return alone


def held(files: Iterable[Path]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The recordings among the files."""
    for file in files:
        data = json.loads(file.read_text())
        if data.get("suite") == "timeline":
            yield file, data


def plot(data: dict[str, Any], path: Path) -> None:
    """A lane for each stream that is more than a moment busy."""
    kernels = [Kernel(*kernel) for kernel in data["kernels"]]
    streams = list(dict.fromkeys(k.stream for k in kernels if k.end - k.begin > 0.05))
    kernels = [k for k in kernels if k.stream in streams]
    figure = Figure(figsize=(11, 1.2 + 0.6 * len(streams)), layout="constrained")
    axes = figure.subplots()
    for k in kernels:
        color = "C3" if k.communicates else "C0"
        lane = streams.index(k.stream)
        axes.barh(lane, k.end - k.begin, left=k.begin, height=0.6, color=color, edgecolor="white")
    axes.set_yticks(range(len(streams)), [stream.partition("(")[0] for stream in streams])
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    settings = data["settings"]
    axes.set_title(
        f"{settings['workload']}, {settings['loss']}, {settings['mesh']}: communication (red) "
        f"{data['communication_ms']:.2f} ms, {data['exposed_ms']:.2f} ms of it alone"
    )
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", default="8192x4096x262144")
    parser.add_argument("--mesh", type=Layout.parse, default=Layout(1, 2), help="default tp=2")
    parser.add_argument("--loss", default="ce", choices=[*LOSSES])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", help="what is measured; default: ask git")
    args = parser.parse_args(argv)
    args.dtype, args.implementation = "bfloat16", None
    (workload,) = select(args.workload)
    key = (args.mesh, args.loss, "pallas_loss", "value_and_grad")
    program = tensor_parallel.lower(key, workload, args, inputs_on)
    compiled, _ = program.compile()
    for _ in range(3):
        jax.block_until_ready(compiled(*program.inputs))
    kernels = record(lambda: compiled(*program.inputs))
    result = {
        "suite": "timeline",
        "environment": environment(args.commit) | {"gpus": len(jax.devices())},
        "settings": {"workload": workload.shape, "mesh": str(args.mesh), "loss": args.loss},
        "communication_ms": sum(k.end - k.begin for k in kernels if k.communicates),
        "exposed_ms": exposed(kernels),
        "kernels": kernels,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    for kernel in kernels:
        if kernel.end - kernel.begin > 0.05 or kernel.communicates:
            print(f"{kernel.begin:9.3f} {kernel.end:9.3f} {kernel.stream:24} {kernel.name[:60]}")
    print(f"communication {result['communication_ms']:.3f} ms, {result['exposed_ms']:.3f} alone")


if __name__ == "__main__":
    main()
