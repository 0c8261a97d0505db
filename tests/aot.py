"""Compile for real NVIDIA targets on a machine that has none.

XLA's CUDA plugin compiles from a description of the chip alone, and Mosaic GPU assembles its
kernels with the real ptxas on the way. So registers, spills, shared memory, machine code, peak
memory and collectives are facts that a CPU test can check. Needs `jax-cuda13-plugin`,
`jax-cuda13-pjrt`, `nvidia-cuda-nvcc`, `nvidia-nvvm`, `nvidia-cuda-crt`, `nvidia-cuda-nvdisasm` and
`cloudpickle`.

    program = aot.compile(fn, jax.ShapeDtypeStruct((8192, 4096), jnp.bfloat16), ..., target="h100")
    assert program.temp_bytes < 270 << 20

    for kernel in aot.ptxas_report(fn, ..., target="b200"):
        assert kernel.spill_bytes == 0 and kernel.smem_bytes <= aot.SMEM_LIMIT_BYTES

    program = aot.compile(fn, x, w, target="h100", mesh={"data": 2, "model": 4},
                          specs=(P("data"), P(None, "model")))
    assert program.hlo.count(" all-reduce(") == 2

Each call has a process of its own (a second or so), for Mosaic GPU's state is the process's: it
assembles for one architecture only, the first that it meets (seen with JAX 0.11.2: a second one
fails in ptxas), it does not assemble, or report, the same kernel twice (0.12), and it may abort.
`fn` and `args` travel there by cloudpickle, lambdas included.

What differs from a device: there is nothing to autotune on, so XLA makes every matrix product a
Triton fusion. With `options={"xla_gpu_enable_triton_gemm": False}` it calls cuBLAS instead, as it
mostly does on a device, with its workspace.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import math
import multiprocessing
import os
import pathlib
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import cloudpickle
import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

SMEM_LIMIT_BYTES = 232_448  # what one block may opt in to, on Hopper and on Blackwell

# A GpuTargetConfigProto. Only what differs between the chips is left open.
_DESCRIPTION = """
gpu_device_info {{
  name: "{name}"
  device_vendor: "NVIDIA Corporation"
  cuda_compute_capability {{
    major: {major} minor: {minor} feature_extension: ACCELERATED_FEATURES
  }}
  core_count: {cores}
  clock_rate_ghz: {clock_ghz}
  memory_bandwidth: {bandwidth}
  device_memory_size: {memory_bytes}
  l2_cache_size: {l2_bytes}
  shared_memory_per_core: 233472
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  threads_per_warp: 32
  threads_per_core_limit: 2048
  threads_per_block_limit: 1024
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  fpus_per_core: 128
  device_address_bits: 64
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.8.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "{name}"
"""


def _describe(
    name: str,
    *,
    major: int,
    cores: int,
    clock_ghz: float,
    l2_mib: float,
    memory_gb: int,
    gb_per_s: int,
    minor: int = 0,
) -> str:
    return _DESCRIPTION.format(
        name=name,
        major=major,
        minor=minor,
        cores=cores,
        clock_ghz=clock_ghz,
        l2_bytes=int(l2_mib * 2**20),
        memory_bytes=memory_gb * 10**9,
        bandwidth=gb_per_s * 10**9,
    )


_HOPPER = {"major": 9, "cores": 132, "clock_ghz": 1.98, "l2_mib": 50}
_BLACKWELL = {"major": 10, "cores": 148, "clock_ghz": 1.965, "l2_mib": 126.5}
_TARGETS = {
    "h100": _describe("NVIDIA H100 80GB HBM3", **_HOPPER, memory_gb=80, gb_per_s=3350),
    "h200": _describe("NVIDIA H200", **_HOPPER, memory_gb=141, gb_per_s=4800),
    "b200": _describe("NVIDIA B200", **_BLACKWELL, memory_gb=180, gb_per_s=7670),
    "b300": _describe("NVIDIA B300", **_BLACKWELL, minor=3, memory_gb=288, gb_per_s=8000),
}
TARGETS = tuple(_TARGETS)


@functools.cache
def devices(target: str, n: int = 1) -> tuple[jax.Device, ...]:
    """`n` compile-only devices of one host: one can lower and compile for them, and nothing
    else.
    """
    if target not in _TARGETS:
        raise ValueError(f"{target=} must be one of {TARGETS}")
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="", topology=f"1x1x{n}", target_config=_TARGETS[target]
    )
    return tuple(topology.devices)


@dataclasses.dataclass(frozen=True)
class Program:
    """One compiled program: its memory on each device as XLA laid it out, and its optimised
    text.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int  # outputs that live in a donated argument
    temp_bytes: int
    compile_seconds: float  # tracing and lowering included
    hlo: str = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What the assembler said of one Mosaic GPU kernel, and the code that it made."""

    name: str
    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    smem_bytes: int  # dynamic shared memory of the launch, barriers included
    log: str = dataclasses.field(
        repr=False
    )  # all that ptxas printed: a warning of serialised wgmmas too
    ptx: str = dataclasses.field(repr=False)
    sass: str = dataclasses.field(repr=False)

    @property
    def spill_bytes(self) -> int:
        return self.spill_store_bytes + self.spill_load_bytes

    @property
    def tmem_columns(self) -> int:
        """Columns of tensor memory that the kernel takes; 0 before Blackwell."""
        if (alloc := re.search(r"tcgen05\.alloc\.[^;]*, (%r\d+);", self.ptx)) is None:
            return 0
        columns = re.search(rf"mov\.b32\s+{alloc[1]}, (\d+);", self.ptx)
        if columns is None:
            raise AssertionError(f"{self.name}: no constant in {alloc[0]}")
        return int(columns[1])

    def opcodes(self) -> collections.Counter[str]:
        """How often each SASS instruction occurs, by its name up to the first dot: `HGMMA`,
        `UTMALDG`, `MUFU`, ...
        """
        return collections.Counter(
            re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*)", self.sass)
        )


def compile(
    fn: Callable,
    *args: Any,
    target: str,
    mesh: Mapping[str, int] | None = None,
    specs: Any = None,
    donate: tuple[int, ...] = (),
    options: Mapping[str, Any] | None = None,
    x64: bool = False,
) -> Program:
    """Compiles `fn` for `target`.

    `args` are pytrees of `jax.ShapeDtypeStruct`; `specs`, a prefix of their tree, says how they lie
    on a `mesh` of axis names and sizes (by default replicated, on one device). That mesh is the
    ambient one while `fn` is traced, so code that asks
    `jax.sharding.get_abstract_mesh().abstract_device` learns the target. `options` are XLA's
    compiler options; `x64` is the global `jax_enable_x64`.
    """
    how = {"mesh": mesh, "specs": specs, "donate": donate, "options": options, "x64": x64}
    return _in_worker(fn, args, target, **how)[0]


def ptxas_report(fn: Callable, *args: Any, target: str, **how: Any) -> tuple[Kernel, ...]:
    """One `Kernel` for each Mosaic GPU kernel of `fn`, in the order of their assembly; arguments as
    for `compile`.

    Equal kernels of one program are assembled, and reported, once with JAX 0.12 and each with 0.11.
    """
    return _in_worker(fn, args, target, dump=True, **how)[1]


def _in_worker(
    fn: Callable, args: tuple, target: str, **how: Any
) -> tuple[Program, tuple[Kernel, ...]]:
    if target not in _TARGETS:
        raise ValueError(f"{target=} must be one of {TARGETS}")
    job = cloudpickle.dumps((fn, args, target, how))
    with concurrent.futures.ProcessPoolExecutor(
        1, multiprocessing.get_context("spawn"), initializer=_use_cpu
    ) as pool:
        return pool.submit(_run, job).result()


def _use_cpu() -> None:
    jax.config.update("jax_platforms", "cpu")


def _run(job: bytes) -> tuple[Program, tuple[Kernel, ...]]:
    fn, args, target, how = cloudpickle.loads(job)
    if not how.pop("dump", False):
        return _compile(fn, args, target, **how), ()
    with _dump_folder() as folder:
        program = _compile(fn, args, target, **how)
        # Mosaic GPU numbers the kernels of a process: matmul_7.ptxas.
        reports = sorted(folder.glob("*.ptxas"), key=lambda path: int(path.stem.rpartition("_")[2]))
        return program, tuple(map(_read, reports))


def _compile(
    fn, args, target, *, mesh=None, specs=None, donate=(), options=None, x64=False
) -> Program:
    jax.config.update("jax_enable_x64", x64)
    axes = mesh or {"device": 1}
    grid = np.array(devices(target, math.prod(axes.values()))).reshape(*axes.values())
    mesh = Mesh(grid, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    specs = PartitionSpec() if specs is None else specs
    shardings = jax.tree.map(
        lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda s: isinstance(s, PartitionSpec)
    )
    begin = time.perf_counter()
    with jax.set_mesh(mesh):
        jitted = jax.jit(fn, in_shardings=shardings, donate_argnums=donate)
        compiled = jitted.lower(*args).compile(dict(options or {}))
    seconds = time.perf_counter() - begin
    memory = compiled.memory_analysis()
    return Program(
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        compile_seconds=seconds,
        hlo=compiled.as_text(),
    )


@contextlib.contextmanager
def _dump_folder() -> Iterator[pathlib.Path]:
    """Mosaic GPU reads these variables at each kernel that it assembles."""
    with tempfile.TemporaryDirectory(prefix="aot-") as folder:
        ours = {"MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_TO": folder}
        os.environ.update(ours)
        try:
            yield pathlib.Path(folder)
        finally:
            for name in ours:
                del os.environ[name]


def _read(report_path: pathlib.Path) -> Kernel:
    def text(suffix: str) -> str:
        return report_path.with_suffix(suffix).read_text()

    def number(pattern: str, where: str) -> int:
        if (found := re.search(pattern, where)) is None:
            raise AssertionError(
                f"no {pattern!r} in the report of {report_path.stem}:\n{where[:2000]}"
            )
        return int(found[1])

    report = report_path.read_text()
    # The file beside it that names the launch and goes by the assembler's numbering (lowering
    # counts equal kernels twice).
    with report_path.with_suffix(".mlir-passes.log").open() as passes:
        launch = next((line for line in passes if "dynamic_shared_memory_size %c" in line), "")
    return Kernel(
        name=report_path.stem.rpartition("_")[0],
        registers=number(r"Used (\d+) registers", report),
        stack_bytes=number(r"(\d+) bytes stack frame", report),
        spill_store_bytes=number(r"(\d+) bytes spill stores", report),
        spill_load_bytes=number(r"(\d+) bytes spill loads", report),
        smem_bytes=number(r"dynamic_shared_memory_size %c(\d+)_i32", launch),
        log=report,
        ptx=text(".ptx"),
        sass=text(".sass_ctrl"),
    )
