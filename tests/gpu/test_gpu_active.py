"""Mostly masked batches on a Hopper GPU, at real shapes, beside the reference.

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
MASKS = ("5%", "50%", "98%", "100%", "last span", "packed", "65", "one", "none")
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


def _gradients(implementation, **options):
    loss = partial(fused_linear_ce, implementation=implementation, **options)
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))


def _assert_close(got, want, tolerance, what):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert np.all(np.isfinite(got)), what
    assert np.linalg.norm(got - want) <= tolerance * np.linalg.norm(want), what


@pytest.mark.parametrize(
    ("layout", "plan"),
    [("vh", plan) for plan in PLANS] + [("hv", "recompute"), ("hv", "in forward")],
)
def test_masks_of_every_shape_through_one_program(layout, plan):
    """Value, dx and dw of the reference; dx of a masked token is exactly 0; twice the same bits."""
    options = {**PLANS[plan], "w_layout": layout, "reduction": "sum"}
    step, reference = _gradients(IMPLEMENTATION, **options), _gradients("reference", **options)
    for mask in MASKS:
        counted = _mask(mask)
        x, w, labels = _problem(layout, counted)
        labels = jnp.where(counted, labels, -100)
        value, (dx, dw) = step(x, w, labels)
        jax.tree.map(np.testing.assert_array_equal, step(x, w, labels), (value, (dx, dw)))
        np.testing.assert_array_equal(np.asarray(dx[~counted], np.float32), 0)
        want, (want_dx, want_dw) = reference(x, w, labels)
        assert abs(float(value) - float(want)) <= 16 * EPSILON * abs(float(want)), mask
        # A rounding of d-logits apart, or of the exponentials and of the rows' scales.
        unit = float(jnp.finfo(x.dtype).eps)
        _assert_close(dx, want_dx, unit / 2, mask)
        _assert_close(dw, want_dw, unit / 2, mask)
    assert step._cache_size() == 1


@pytest.mark.parametrize(("k", "backward"), [(None, "recompute"), (4, "stored")])
def test_logprob_of_active_tokens(k, backward):
    """Joint cotangents, a temperature per token, candidates."""
    g = jax.random.normal(jax.random.key(7), (3, T))
    tau = jnp.linspace(0.5, 2.0, T)

    def gradients(implementation, backward):
        def loss(x, w, labels, where):
            out = fused_linear_logprob(
                x, w, labels, where=where, temperature=tau, entropy=True, w_layout="vh",
                implementation=implementation, backward=backward,
            )  # fmt: skip
            logprob = out.logprob.sum(1) if k else out.logprob
            return jnp.sum(g[0] * logprob + g[1] * out.entropy + g[2] * out.lse)

        return jax.jit(jax.grad(loss, argnums=(0, 1)))

    step, reference = gradients(IMPLEMENTATION, backward), gradients("reference", "recompute")
    for mask in ("5%", "packed", "none"):
        counted = _mask(mask)
        x, w, labels = _problem("vh", counted)
        if k:
            labels = jax.random.randint(jax.random.key(6), (T, k), 0, V)
        dx, dw = step(x, w, labels, counted)
        np.testing.assert_array_equal(np.asarray(dx[~counted], np.float32), 0)
        want_dx, want_dw = reference(x, w, labels, counted)
        _assert_close(dx, want_dx, float(jnp.finfo(x.dtype).eps), mask)
        _assert_close(dw, want_dw, float(jnp.finfo(x.dtype).eps), mask)


def test_a_padded_batch_is_the_batch():
    """T = 3000 and T = 3072, of which 72 are padding."""
    x, w, labels = _problem("vh", np.ones(T, bool))
    padded_x, padded_labels = pad_to_bucket(x, labels)
    assert padded_x.shape == (3072, H)
    options = {"w_layout": "vh", "backward": "in_forward"}
    value, (dx, dw) = _gradients(IMPLEMENTATION, **options)(padded_x, w, padded_labels)
    want, (want_dx, want_dw) = _gradients("reference", **options)(x, w, labels)
    assert abs(float(value) - float(want)) <= 16 * EPSILON * abs(float(want))
    unit = float(jnp.finfo(x.dtype).eps)
    _assert_close(dx[:T], want_dx, unit / 2, "dx")
    _assert_close(dw, want_dw, unit / 2, "dw")
    np.testing.assert_array_equal(np.asarray(dx[T:], np.float32), 0)
