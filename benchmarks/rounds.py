"""Rounds that visit every program, so that a drifting clock hits all alike."""

import random
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

Clock = Callable[[], float]


@dataclass(frozen=True)
class Deadline:
    """A moment of ``time.time()``."""

    at: float = float("inf")

    def left(self) -> float:
        """Seconds; negative when it has passed."""
        return self.at - time.time()


NEVER = Deadline()


def batch_clock[Result](
    call: Callable[[], Result], wait: Callable[[Result], object], batch_ms: float, most: int
) -> Clock:
    """Milliseconds a call by the host's clock, over a batch of calls that ends in one wait.

    Gaps between kernels and copies count; the launches of a batch overlap with its execution. A
    batch is ``batch_ms`` long, and ``most`` calls at most.
    """

    def batch(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            out = call()
        wait(out)
        return (time.perf_counter() - start) * 1e3 / count

    wait(call())
    count = int(min(max(batch_ms / max(batch(1), 1e-3), 1), most))
    return lambda: batch(count)


def interleave[Key: Hashable](
    clocks: Mapping[Key, Clock], repeats: int, deadline: Deadline = NEVER, at_least: int = 3
) -> tuple[dict[Key, list[float]], dict[Key, Exception]]:
    """Samples of every clock, taken in rounds; and the error of each that failed.

    Each round has an order of its own, drawn at random: what follows a program that leaves the
    device cool runs up to 10% faster. Past the deadline it stops at ``at_least`` rounds.
    """
    shuffled = random.Random(0)
    samples: dict[Key, list[float]] = {key: [] for key in clocks}
    errors: dict[Key, Exception] = {}
    for done in range(repeats):
        if done >= at_least and deadline.left() < 0:
            break
        for key in shuffled.sample([*clocks], len(clocks)):
            if key in errors:
                continue
            try:
                samples[key].append(clocks[key]())
            except Exception as error:  # one that fails must not stop the others
                errors[key] = error.with_traceback(None)  # its frames hold arrays
    return {key: taken for key, taken in samples.items() if key not in errors}, errors


def summary(samples: Sequence[float], prefix: str = "") -> dict[str, float | int]:
    """Median, 20th and 80th percentile in milliseconds, and how many samples."""
    enough = samples if len(samples) > 1 else [*samples, *samples]
    low, *_, high = statistics.quantiles(enough, n=5, method="inclusive")
    named = {"ms": statistics.median(samples), "p20_ms": low, "p80_ms": high}
    return {prefix + k: round(v, 5) for k, v in named.items()} | {prefix + "n": len(samples)}
