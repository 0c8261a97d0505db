"""Masked tokens: the loss of the others alone, whatever the mask looks like and x holds in them.

On a backend whose skipped rows are full of NaN (`skipping`); the kernels themselves run in the
interpreter (`test_mosaic_interpret.py`), and all backends in `test_cases_tokens.py`.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import skipping

from pallas_loss import fused_linear_ce, fused_linear_logprob, select
from pallas_loss.backends import sweep
from pallas_loss.backends.active import Order

T, H, V = 96, 16, 67
TOLERANCE = 2e-6

# Which tokens count, of shapes that training makes.
MASKS = {
    "scattered": lambda t, rng: rng.uniform(size=t) < 0.3,
    "one span": lambda t, rng: (np.arange(t) >= t // 2) & (np.arange(t) < t // 2 + 9),
    "packed prompts and responses": lambda t, rng: np.arange(t) % 24 >= 17,
    "last three": lambda t, rng: np.arange(t) >= t - 3,
    "one": lambda t, rng: np.arange(t) == t // 2,
    "none": lambda t, rng: np.zeros(t, bool),
    "all": lambda t, rng: np.ones(t, bool),
}
CE_PLANS = {
    "recompute": {"backward": "recompute"},
    "in forward": {"backward": "in_forward"},
    "in forward, smoothing": {"backward": "in_forward", "label_smoothing": 0.1},
    "recompute, everything": {
        "backward": "recompute",
        "label_smoothing": 0.1,
        "z_loss": 1e-2,
        "logit_soft_cap": 5.0,
    },
}


@pytest.fixture
def implementation(monkeypatch):
    """The name of the spoiling backend, which is one to choose from here."""
    monkeypatch.setattr(select, "LINEAR_BACKENDS", (*select.LINEAR_BACKENDS, skipping.BACKEND))
    return skipping.BACKEND.name


def _problem(mask, t=T, seed=0):
    """`(x, w, labels, bias, counted)`, where x holds NaN in the tokens that do not count."""
    rng = np.random.default_rng(seed)
    counted = MASKS[mask](t, rng)
    x = rng.normal(size=(t, H)).astype(np.float32)
    w = (2 * rng.normal(size=(H, V)) / np.sqrt(H)).astype(np.float32)
    labels = rng.integers(0, V, t).astype(np.int32)
    bias = rng.normal(size=V).astype(np.float32)
    x[~counted] = np.nan
    return x, w, labels, bias, counted


def _assert_close(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.all(np.isfinite(a))
        assert np.linalg.norm(a - b) <= TOLERANCE * np.linalg.norm(b) + 1e-12


def _scattered(dx, counted):
    """`dx` of the tokens that count among all of them."""
    full = np.zeros((len(counted), dx.shape[1]), np.float32)
    full[counted] = dx
    return full


@pytest.mark.parametrize(
    ("mask", "plan"),
    [(m, p) for m in MASKS for p in ("recompute", "in forward")]
    + [("scattered", p) for p in ("in forward, smoothing", "recompute, everything")],
)
def test_cross_entropy_is_that_of_the_active_tokens(implementation, mask, plan):
    """Value, dx, dw and dbias of the compacted problem; dx of a masked token is exactly 0."""
    x, w, labels, bias, counted = _problem(mask)
    options = {"reduction": "sum", **CE_PLANS[plan]}

    def run(implementation, x, labels):
        loss = partial(fused_linear_ce, implementation=implementation, **options)
        grad = jax.value_and_grad(lambda x, w, b: loss(x, w, labels, bias=b), (0, 1, 2))
        return jax.jit(grad)(x, w, bias)

    value, (dx, dw, db) = run(implementation, x, np.where(counted, labels, -100))
    want, (want_dx, *want_rest) = run("reference", x[counted], labels[counted])
    _assert_close((value, dx, dw, db), (want, _scattered(want_dx, counted), *want_rest))
    np.testing.assert_array_equal(dx[~counted], 0)


@pytest.mark.parametrize(
    ("mask", "t"),
    [("scattered", 700), ("last three", 700), ("none", 700), ("all", 700), ("scattered", 512)],
)
def test_chunks_of_active_tokens(implementation, mask, t):
    """Several chunks, of which the later ones have nothing left to do."""
    x, w, labels, _, counted = _problem(mask, t)

    def run(implementation, x, labels, **options):
        loss = partial(fused_linear_ce, implementation=implementation, **options)
        return jax.jit(jax.value_and_grad(lambda x, w: loss(x, w, labels), (0, 1)))(x, w)

    chunked = {"backward": "in_forward", "workspace_bytes": 300 * 4 * V}
    value, (dx, dw) = run(implementation, x, np.where(counted, labels, -100), **chunked)
    want, (want_dx, want_dw) = run("reference", x[counted], labels[counted])
    _assert_close((value, dx, dw), (want, _scattered(want_dx, counted), want_dw))


@pytest.mark.parametrize("backward", ["recompute", "stored"])
@pytest.mark.parametrize("k", [None, 3])
@pytest.mark.parametrize("mask", ["scattered", "one", "none"])
def test_logprob_is_that_of_the_active_tokens(implementation, mask, k, backward):
    """Per-token cotangents of all outputs, a temperature per token and its gradient, candidates."""
    x, w, labels, _, counted = _problem(mask)
    rng = np.random.default_rng(1)
    if k:
        labels = rng.integers(0, V, (T, k)).astype(np.int32)
    tau = rng.uniform(0.5, 2, T).astype(np.float32)
    g = rng.normal(size=(3, T)).astype(np.float32)

    def run(implementation, rows, labels, backward, where=None):
        def loss(x, w, tau):
            out = fused_linear_logprob(
                x, w, labels, temperature=tau, entropy=True, backward=backward,
                where=where, implementation=implementation,
            )  # fmt: skip
            logprob = out.logprob.sum(1) if k else out.logprob
            terms = g[0, rows] * logprob + g[1, rows] * out.entropy + g[2, rows] * out.lse
            return jnp.sum(terms), out

        grad = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)
        return jax.jit(grad)(x[rows], w, tau[rows])

    every = np.arange(T)
    (value, out), (dx, dw, dtau) = run(implementation, every, labels, backward, where=counted)
    active = np.flatnonzero(counted)
    (want, want_out), (want_dx, want_dw, want_dtau) = run(
        "reference", active, labels[active], "recompute"
    )
    # What is stored is rounded to bfloat16.
    if backward == "recompute":
        _assert_close((dx, dw), (_scattered(want_dx, counted), want_dw))
    else:
        for a, b in ((dx[active], want_dx), (dw, want_dw)):
            assert np.linalg.norm(a - b) <= 2.0**-7 * np.linalg.norm(b)
    _assert_close(value, want)
    _assert_close(jax.tree.map(lambda v: v[active], out), want_out)
    _assert_close(dtau[active], want_dtau)
    for masked in (dx[~counted], dtau[~counted], out.lse[~counted], out.entropy[~counted]):
        np.testing.assert_array_equal(masked, 0)


@pytest.mark.parametrize("backward", ["recompute", "in_forward"])
def test_every_way_to_mask_is_the_same(implementation, backward):
    """An ignored label, `where` and a weight of 0 agree to the last bit."""
    x, w, labels, _, counted = _problem("scattered")

    def run(labels, **mask):
        loss = partial(fused_linear_ce, backward=backward, implementation=implementation, **mask)
        return jax.jit(jax.value_and_grad(lambda x, w: loss(x, w, labels), (0, 1)))(x, w)

    ignored = run(np.where(counted, labels, -100))
    jax.tree.map(np.testing.assert_array_equal, run(labels, where=counted), ignored)
    weights = counted.astype(np.float32)
    jax.tree.map(np.testing.assert_array_equal, run(labels, weights=weights), ignored)


@pytest.mark.parametrize("backward", ["recompute", "in_forward"])
def test_masks_change_without_a_new_trace(implementation, backward):
    """All shapes of mask, from none to all, through one compiled program."""
    traces = []

    @jax.jit
    def step(x, w, labels, where):
        traces.append(None)
        loss = partial(fused_linear_ce, backward=backward, implementation=implementation)
        return jax.value_and_grad(lambda x, w: loss(x, w, labels, where=where), (0, 1))(x, w)

    for mask in MASKS:
        x, w, labels, _, counted = _problem(mask)
        _, (dx, _) = step(x, w, labels, counted)
        np.testing.assert_array_equal(np.any(np.asarray(dx) != 0, axis=1), counted)
    assert len(traces) == 1
    assert step._cache_size() == 1


def test_gradients_of_the_two_scalars(implementation):
    """Under a soft cap that of the scale is read off x and dx, where skipped rows must not show."""
    x, w, labels, _, counted = _problem("scattered")

    def run(implementation, x, labels):
        def loss(scale, temperature):
            return fused_linear_ce(
                x, w, labels, logit_scale=scale, temperature=temperature, logit_soft_cap=5.0,
                implementation=implementation,
            )  # fmt: skip

        return jax.jit(jax.grad(loss, (0, 1)))(jnp.float32(1.3), jnp.float32(0.7))

    got = run(implementation, x, np.where(counted, labels, -100))
    for a, b in zip(got, run("reference", x[counted], labels[counted]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_float16_is_scaled_by_the_active_rows(implementation):
    """The power of two that lifts d-logits clear of float16's smallest numbers."""
    x, w, labels, _, counted = _problem("scattered")
    x, w = x.astype(np.float16), w.astype(np.float16)

    def run(implementation, x, labels):
        loss = partial(fused_linear_ce, implementation=implementation)
        return jax.jit(jax.grad(lambda x, w: 1e-5 * loss(x, w, labels), (0, 1)))(x, w)

    dx, dw = run(implementation, x, np.where(counted, labels, -100))
    want_dx, want_dw = run("reference", x[counted], labels[counted])
    for a, b in ((dx[counted], want_dx), (dw, want_dw)):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(b) > 0
        assert np.linalg.norm(a - b) <= 2.0**-8 * np.linalg.norm(b)


@pytest.mark.parametrize("mask", MASKS)
def test_order_puts_active_rows_first_and_back(mask):
    """Stable; what is taken and put back is itself where a row counts, and 0 elsewhere."""
    counted = MASKS[mask](T, np.random.default_rng(2))
    order = jax.jit(Order.of)(jnp.asarray(counted))
    active = np.flatnonzero(counted)
    assert int(order.num_active) == len(active)
    np.testing.assert_array_equal(order.source[: len(active)], active)
    v = np.random.default_rng(3).normal(size=(T, 2)).astype(np.float32)
    taken = order.take(jnp.asarray(v), 7)
    np.testing.assert_array_equal(taken[: len(active)], v[active])
    np.testing.assert_array_equal(taken[len(active) :], 7)
    np.testing.assert_array_equal(order.put(taken), np.where(counted[:, None], v, 0))


@pytest.mark.parametrize("live", [0, 1, 4, 5, 9, 10, 11])
@pytest.mark.parametrize("n", [4, 11, 12])
def test_tiles_past_the_live_ones_are_skipped(n, live):
    """Of `n` by tiles of 4, those that begin before `live` are visited."""
    live = min(live, n)
    visit = lambda start, size, seen: seen.at[start // 4].add(size)  # noqa: E731
    zeros = jnp.zeros(3, jnp.int32)
    seen = jax.jit(lambda live: sweep.tiled(n, 4, visit, zeros, live))(jnp.int32(live))
    want = [min(4, max(n - start, 0)) if start < live else 0 for start in (0, 4, 8)]
    np.testing.assert_array_equal(seen, want)
