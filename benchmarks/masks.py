"""Which tokens of a batch train: masks of the shapes that training makes, by NumPy."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

FRACTIONS = (1.0, 0.75, 0.5, 0.25, 0.1, 0.05)
SAMPLE = 2048  # tokens of one sample


def scattered(t: int, fraction: float, rng: np.random.Generator) -> np.ndarray:
    """Any tokens."""
    return rng.permutation(t) < round(t * fraction)


def one_span(t: int, fraction: float, rng: np.random.Generator) -> np.ndarray:
    """One span of each sample, at a random place."""
    sample = min(SAMPLE, t)
    length = round(sample * fraction)
    starts = rng.integers(0, sample - length + 1, -(-t // sample))
    place = np.arange(t) % sample - starts[np.arange(t) // sample]
    return (place >= 0) & (place < length)


def packed(t: int, fraction: float, rng: np.random.Generator) -> np.ndarray:
    """Documents of 100 to 2000 tokens, one after the other: a prompt, then the response."""
    counted = np.zeros(t, bool)
    start = 0
    while start < t:
        end = start + int(rng.integers(100, 2001))
        counted[end - round((end - start) * fraction) : end] = True
        start = end
    return counted


MASKS: dict[str, Callable[..., np.ndarray]] = {
    "scattered": scattered,
    "one span a sample": one_span,
    "packed responses": packed,
}


def settings(
    t: int, fractions: Sequence[float], masks: Sequence[str]
) -> Iterator[tuple[str, float, np.ndarray]]:
    """``(name, fraction, mask)``; with nothing masked all masks are the same."""
    for fraction in fractions:
        for name in masks if fraction < 1 else masks[:1]:
            rng = np.random.default_rng(int(fraction * 1000))
            yield name, fraction, MASKS[name](t, fraction, rng)
