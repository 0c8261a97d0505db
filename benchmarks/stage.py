"""What the timing stages share: arguments, and carrying on when a candidate fails or crashes.

A stage is a process of its own. It writes an entry before each risky step, so that a candidate that
takes the process down is known to the next one, and it leaves with ``RESTART`` when the device
stopped answering.
"""

import argparse
import contextlib
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.results import DIED, PENDING, Store
from benchmarks.rounds import Deadline
from benchmarks.workloads import Workload, select

RESTART = 75


def arguments(argv: Sequence[str], **more) -> argparse.Namespace:
    """A stage's command line; ``benchmarks.run`` writes it."""
    parser = argparse.ArgumentParser()
    words = lambda text: [word for word in text.split(",") if word]  # noqa: E731
    parser.add_argument("--suite", default="linear_ce")
    parser.add_argument("--workloads", default="all")
    parser.add_argument("--candidates", type=words, default=[], help="default: the suite's")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--layout", choices=("vh", "hv"), default="vh")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", "--json", type=Path, required=True)
    parser.add_argument("--run", default="by hand", help="which run a failure belongs to")
    parser.add_argument("--deadline", type=float, default=float("inf"), help="in time.time()")
    return parser.parse_args(argv)


@contextlib.contextmanager
def attempt(
    store: Store, workload: Workload, name: str, mode: str, broken: Callable[[], bool]
) -> Iterator[None]:
    """Runs a risky step; its failure becomes an entry, and a dead device a restart."""
    store.fail(workload, name, mode, DIED)
    try:
        yield
    except Exception as error:
        store.fail(workload, name, mode, error)
        print(f"  {name} {mode}: {type(error).__name__}: {str(error)[:500]}", flush=True)
        if broken():
            sys.exit(RESTART)
    else:
        store.fail(workload, name, mode, PENDING)


def over_workloads(
    args: argparse.Namespace,
    needed: Callable[[Store, Workload], bool],
    measure: Callable[[Store, Workload, Deadline], None],
) -> None:
    """Measures each workload that still needs it, while there is time for one more."""
    store, deadline, longest = Store(args.out, args.run), Deadline(args.deadline), 0.0
    for workload in select(args.workloads):
        if not needed(store, workload):
            continue
        if deadline.left() < longest:
            print(f"no time left for {workload.name} and what follows it", flush=True)
            break
        print(f"{workload.name} {workload.shape}", flush=True)
        start = time.monotonic()
        try:
            measure(store, workload, deadline)
        except Exception:  # the next workload may be smaller
            traceback.print_exc()
        store.save()
        longest = max(longest, time.monotonic() - start)
