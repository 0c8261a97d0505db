"""Mostly masked batches on a Hopper GPU, at real shapes: the problem of the active tokens alone.

x holds NaN wherever a token does not count, and so does fresh memory where a kernel wrote nothing.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_loss import fused_linear_ce, fused_linear_logprob, pad_to_bucket

IMPLEMENTATION = "mosaic_gpu"
T, H, V = 3000, 1152, 20001
EPSILON = 2.0**-22
PLANS = {
    "recompute": {"backward": "recompute"},
    "recompute, everything": {
        "backward": "recompute",
        "label_smoothing": 0.1,
        "z_loss": 1e-3,
        "logit_soft_cap": 20.0,
    },
    "in forward": {"backward": "in_forward"},
    "in forward, smoothing": {"backward": "in_forward", "label_smoothing": 0.1},
    "in forward, chunks": {"backward": "in_forward", "workspace_bytes": 160 << 20},
}


def _on_hopper() -> bool:
    return getattr(jax.devices()[0], "compute_capability", "") == "9.0"


pytestmark = pytest.mark.skipif(not _on_hopper(), reason="needs a Hopper GPU (sm_90)")


def _mask(name: str, t: int = T) -> np.ndarray:
    where, rng = np.arange(t), np.random.default_rng(0)
    if name.endswith("%"):
        return rng.permutation(t) < t * int(name[:-1]) // 100
    return {
        "none": where < 0,
        "one": where == t // 2,
        "last span": where >= t - 300,
        "packed": where % 750 >= 500,
        "65": where < 65,
    }[name]


@pytest.fixture(autouse=True)
def _memory_full_of_nan():
    """What is allocated next was NaN before: 8 GiB of it."""
    full = [jnp.full((1 << 28,), jnp.nan) for _ in range(8)]
    jax.block_until_ready(full)
    for a in full:
        a.delete()


def _problem(layout, counted, t=T):
    keys = jax.random.split(jax.random.key(5), 3)
    x = jax.random.normal(keys[0], (t, H), jnp.bfloat16)
    w = (jax.random.normal(keys[1], (H, V)) * 2.5 / H**0.5).astype(jnp.bfloat16)
    labels = jax.random.randint(keys[2], (t,), 0, V)
    x = jnp.where(counted[:, None], x, jnp.array(jnp.nan, x.dtype))
    return x, (w.T if layout == "vh" else w), labels


def _gradients(x, w, labels, **options):
    loss = partial(fused_linear_ce, implementation=IMPLEMENTATION, **options)
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(x, w, labels)


def _assert_close(got, want, tolerance):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert np.all(np.isfinite(got))
    assert np.linalg.norm(got - want) <= tolerance * np.linalg.norm(want)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("layout", ["vh", "hv"])
@pytest.mark.parametrize("mask", ["5%", "50%", "98%", "last span", "packed", "65", "one", "none"])
def test_active_tokens_alone(mask, layout, plan):
    """Value, dx and dw are those of the compacted batch; dx of a masked token is exactly 0."""
    counted = _mask(mask)
    x, w, labels = _problem(layout, counted)
    options = {**PLANS[plan], "w_layout": layout, "reduction": "sum"}
    value, (dx, dw) = _gradients(x, w, jnp.where(counted, labels, -100), **options)
    np.testing.assert_array_equal(np.asarray(dx[~counted], np.float32), 0)
    if mask == "none":
        assert float(value) == 0
        np.testing.assert_array_equal(np.asarray(dw, np.float32), 0)
        return
    want, (want_dx, want_dw) = _gradients(x[counted], w, labels[counted], **options)
    assert abs(float(value) - float(want)) <= 16 * EPSILON * abs(float(want))
    # The same roundings, but for those of rows that lie elsewhere in a sum over tokens.
    unit = float(jnp.finfo(x.dtype).eps)
    _assert_close(dx[counted], want_dx, unit / 3)
    _assert_close(dw, want_dw, unit / 3)


@pytest.mark.parametrize("backward", ["recompute", "stored"])
@pytest.mark.parametrize("k", [None, 4])
@pytest.mark.parametrize("mask", ["10%", "packed", "none"])
def test_logprob_of_active_tokens(mask, k, backward):
    """Joint cotangents, a temperature per token, candidates."""
    counted = _mask(mask)
    x, w, labels = _problem("vh", counted)
    if k:
        labels = jax.random.randint(jax.random.key(6), (T, k), 0, V)
    g = jax.random.normal(jax.random.key(7), (3, T))
    tau = jnp.linspace(0.5, 2.0, T)

    def run(rows, where):
        def loss(x, w):
            out = fused_linear_logprob(
                x, w, labels[rows], where=where, temperature=tau[rows], entropy=True,
                w_layout="vh", implementation=IMPLEMENTATION, backward=backward,
            )  # fmt: skip
            logprob = out.logprob.sum(1) if k else out.logprob
            here = g[:, rows]
            return jnp.sum(here[0] * logprob + here[1] * out.entropy + here[2] * out.lse)

        return jax.jit(jax.grad(loss, argnums=(0, 1)))(x[rows], w)

    dx, dw = run(np.arange(T), counted)
    np.testing.assert_array_equal(np.asarray(dx[~counted], np.float32), 0)
    if mask == "none":
        np.testing.assert_array_equal(np.asarray(dw, np.float32), 0)
        return
    active = np.flatnonzero(counted)
    want_dx, want_dw = run(active, None)
    unit = float(jnp.finfo(x.dtype).eps)
    _assert_close(dx[active], want_dx, unit)
    _assert_close(dw, want_dw, unit)


@pytest.mark.parametrize("backward", ["recompute", "in_forward"])
def test_masks_share_a_program_and_repeat_to_the_bit(backward):
    """Every mask through one compiled program, twice."""
    loss = partial(fused_linear_ce, w_layout="vh", implementation=IMPLEMENTATION, backward=backward)
    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    for mask in ("5%", "one", "none", "packed", "98%"):
        counted = _mask(mask)
        x, w, labels = _problem("vh", counted)
        labels = jnp.where(counted, labels, -100)
        jax.tree.map(np.testing.assert_array_equal, step(x, w, labels), step(x, w, labels))
    assert step._cache_size() == 1


def test_a_padded_batch_is_the_batch():
    """T = 3000 and T = 3072, of which 72 are padding."""
    x, w, labels = _problem("vh", np.ones(T, bool))
    options = {"w_layout": "vh", "backward": "in_forward"}
    padded_x, padded_labels = pad_to_bucket(x, labels)
    assert padded_x.shape == (3072, H)
    value, (dx, dw) = _gradients(padded_x, w, padded_labels, **options)
    want, (want_dx, want_dw) = _gradients(x, w, labels, **options)
    assert abs(float(value) - float(want)) <= 16 * EPSILON * abs(float(want))
    unit = float(jnp.finfo(x.dtype).eps)
    _assert_close(dx[:T], want_dx, unit / 3)
    _assert_close(dw, want_dw, unit / 3)
