"""Runs a benchmark suite: ``python -m benchmarks.run --help``.

This process only starts others: each stage has the device to itself, and one that crashes is
started again without the candidate that took it down. Results are on disk after every workload;
the same command, run again, does what is missing.
"""

import argparse
import datetime
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.results import Store, table
from benchmarks.stage import RESTART
from benchmarks.workloads import select

ROOT = Path(__file__).resolve().parent.parent
STAGES = {
    "torch": "benchmarks.torch_peers",
    "jax": "benchmarks.jax_stage",
    "peak": "benchmarks.peak_stage",
}
RESTARTS = 4
GRACE = 15  # seconds from a stage's deadline to its end: the rounds that it does not go without
PEAK_SECONDS = 20  # to start a process and to load one workload's programs
PACKAGES = (
    *("jax", "jaxlib", "jax-cuda13-plugin", "tokamax", "torch", "triton", "liger-kernel"),
    *("cut-cross-entropy", "quack-kernels", "nvidia-cutlass-dsl", "verl"),
)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run",
        description="Time a suite's candidates and peers on this machine.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--suite", default="linear_ce")
    parser.add_argument("--workloads", default="all", help="names, tags or TxHxV, with commas")
    parser.add_argument("--candidates", default="", help="JAX candidates; empty: the suite's")
    parser.add_argument("--peers", default="", help="PyTorch peers; empty: all")
    parser.add_argument("--stages", default="torch,jax,peak", help="which, in this order")
    parser.add_argument("--repeats", type=int, default=7, help="rounds for each clock")
    parser.add_argument("--layout", choices=("vh", "hv"), default="vh", help="of w")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="programs that compile side by side")
    parser.add_argument("--minutes", type=float, default=9.5, help="for the whole run")
    parser.add_argument("--torch-minutes", type=float, default=3.5, help="of these, for the peers")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/run.json"))
    parser.add_argument("--commit", help="what is measured; default: ask git")
    parser.add_argument("--fresh", action="store_true", help="drop what --out already holds")
    return parser.parse_args(argv)


def environment(commit: str | None) -> dict[str, Any]:
    """The machine, the versions and the commit that results belong to."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return _device() | {
        "python": platform.python_version(),
        "versions": versions,
        "commit": commit or _git_commit(),
    }


def _device() -> dict[str, str]:
    query = ("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
    if os.environ.get("JAX_PLATFORMS") != "cpu" and (answer := _output(*query)):
        name, driver, memory = (part.strip() for part in answer.splitlines()[0].split(","))
        return {"device": name, "driver": driver, "memory": memory}
    return {"device": f"CPU, {platform.machine()}, {os.cpu_count()} cores"}


def _git_commit() -> str:
    commit = _output("git", "rev-parse", "HEAD")
    if not commit:
        return "unknown"
    return commit + ("-dirty" if _output("git", "status", "--porcelain") else "")


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def open_store(args: argparse.Namespace, run: str) -> Store:
    """The results to add to; refuses those of another machine, commit or setting."""
    if args.fresh:
        args.out.unlink(missing_ok=True)
    store = Store(args.out, run)
    settings = {"dtype": args.dtype, "layout": args.layout, "seed": args.seed}
    made_by = environment(args.commit)
    # A package that one of the runs lacked, such as a peer, is no contradiction.
    versions = store.data.get("environment", made_by)["versions"]
    made_by["versions"] = {**versions, **made_by["versions"]}
    header = {"suite": args.suite, "settings": settings, "environment": made_by}
    for key, value in header.items():
        held = store.data.setdefault(key, value)
        if key == "environment":
            held = held | {"versions": {**made_by["versions"], **held["versions"]}}
        if held != value:
            raise SystemExit(
                f"{args.out} has {key} {held}, and this run {value}: "
                "give another --out, or --fresh to replace it"
            )
    store.data |= header
    store.data.setdefault("started", run)
    store.save()
    return store


def run_stage(
    name: str, args: argparse.Namespace, run: str, workloads: str, until: float, cache: str
) -> None:
    """One stage, started again while it crashes; killed if it outlives ``until``."""
    candidates = args.peers if name == "torch" else args.candidates
    options = {
        **{
            key: getattr(args, key)
            for key in ("suite", "repeats", "layout", "dtype", "seed", "jobs")
        },
        **{"workloads": workloads, "candidates": candidates, "out": args.out.resolve()},
        **{"run": run, "deadline": until - GRACE},
    }
    command = [sys.executable, "-m", STAGES[name]]
    command += [f"--{key}={value}" for key, value in options.items()]
    for _ in range(1 + RESTARTS):
        if time.time() > until - GRACE:
            print(f"[{name}] no time left", flush=True)
            return
        print(f"[{name}]", flush=True)
        child = subprocess.Popen(command, cwd=ROOT, env=stage_environment(cache))
        out_of_time = False
        try:
            code = child.wait(timeout=max(until - time.time(), 1))
        except subprocess.TimeoutExpired:
            print(f"[{name}] stopped: out of time", flush=True)
            out_of_time = True
        finally:
            child.kill()
            child.wait()
        if out_of_time:
            Store(args.out, run).ran_out_of_time()
            return
        if code == 0:
            return
        print(f"[{name}] left with {code}", flush=True)
        if code > 0 and code != RESTART:  # it never got as far as a candidate
            return


def timed_in(data: Mapping[str, Any], run: str) -> list[str]:
    """The workloads of which a run timed something, and so left programs in the cache."""
    return [
        name
        for name, workload in data["workloads"].items()
        if any(
            "temp_bytes" in entry and entry["run"] == run
            for modes in workload["candidates"].values()
            for entry in modes.values()
        )
    ]


def stage_environment(cache: str) -> Mapping[str, str]:
    """A compilation cache that starts empty, so that every first compile is a cold one."""
    return os.environ | {
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        # Programs share the device with nothing, but a pool that grows shows what they use.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "PYTHONUNBUFFERED": "1",
    }


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    stages = [name for name in args.stages.split(",") if name]
    if unknown := set(stages) - set(STAGES):
        raise SystemExit(f"no stage {', '.join(unknown)}; there are {', '.join(STAGES)}")
    workloads = select(args.workloads)
    begin = time.time()
    end = begin + 60 * args.minutes
    run = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    open_store(args, run)
    cache = tempfile.mkdtemp(prefix="pallas_loss_benchmarks_")
    try:
        if "torch" in stages:
            limit = begin + 60 * args.torch_minutes if len(stages) > 1 else end
            run_stage("torch", args, run, args.workloads, min(limit, end), cache)
        if "jax" in stages:
            for_peaks = PEAK_SECONDS * len(workloads) if "peak" in stages else 0
            limit = max(end - for_peaks, (time.time() + end) / 2)
            run_stage("jax", args, run, args.workloads, limit, cache)
        if "peak" in stages:
            for workload in timed_in(Store(args.out).data, run):
                run_stage("peak", args, run, workload, end + GRACE, cache)
    finally:
        shutil.rmtree(cache, ignore_errors=True)
        print("\n".join(table(Store(args.out).data)), flush=True)


if __name__ == "__main__":
    main()
