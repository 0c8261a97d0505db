"""A small problem for tests of the contract."""

import functools

import numpy as np

from pallas_loss import fused_linear_ce

T, H, V = 6, 4, 7


def problem(seed=0, tokens=T, hidden=H, vocab=V):
    """float32 `x [T, H]`, `w [H, V]`, int32 `labels [T]`."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(tokens, hidden)).astype(np.float32)
    w = rng.normal(size=(hidden, vocab)).astype(np.float32)
    return x, w, rng.integers(0, vocab, tokens).astype(np.int32)


def close(got, expected, atol=2e-6, rtol=2e-6):
    np.testing.assert_allclose(
        np.asarray(got).astype(np.float64), np.asarray(expected).astype(np.float64), rtol, atol
    )


def on(backend, **options):
    """`fused_linear_ce` on one backend."""
    return functools.partial(fused_linear_ce, implementation=backend.name, **options)
