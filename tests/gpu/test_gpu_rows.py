"""The row kernel on a GPU, at real shapes: rows on and off the chip, ragged and padded, all losses.

Both sides round the same float32 gradient to the logits' dtype, so they differ by at most one such
rounding, of elements that lie near the middle between two numbers, and by what float32 sums lose.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_loss import (
    fused_ce,
    fused_forward_kl,
    fused_reverse_kl,
    fused_soft_ce,
    tuning,
)

IMPLEMENTATION = "mosaic_gpu"
SHAPES = {
    "on the chip, ragged": (600, 32000),
    "on the chip": (300, 32768),
    "ring beside a target": (300, 65536),
    "ring": (280, 131072),
    "ring, ragged": (400, 128256),
    "ring, mostly": (140, 524288),
    "padded": (300, 50257),
    "narrow lines": (300, 50304),
    "few columns": (1000, 5),
    "one column": (7, 1),
    "one row": (1, 32000),
}


def _on_gpu() -> bool:
    return getattr(jax.devices()[0], "compute_capability", "") in ("9.0", "10.0")


pytestmark = pytest.mark.skipif(not _on_gpu(), reason="needs a Hopper or Blackwell GPU")


def _probs(z, t, **options):
    q = jax.nn.softmax(t.astype(jnp.float32)).astype(t.dtype)
    return fused_soft_ce(z, q, **options)


LOSSES = {
    "ce": lambda z, t, y, **o: fused_ce(z, y, **o),
    "ce, all options": lambda z, t, y, **o: fused_ce(
        z, y, label_smoothing=0.1, z_loss=1e-3, logit_soft_cap=20.0, temperature=1.3, **o
    ),
    "ce, class weights": lambda z, t, y, **o: fused_ce(
        z, y, label_smoothing=0.1, class_weights=jnp.linspace(0.5, 2.0, z.shape[1]), **o
    ),
    "soft_ce": lambda z, t, y, **o: fused_soft_ce(z, target_logits=t, labels=y, **o),
    "soft_ce, probabilities": lambda z, t, y, **o: _probs(z, t, labels=y, **o),
    "reverse_kl": lambda z, t, y, **o: fused_reverse_kl(z, t, labels=y, temperature=1.3, **o),
    "forward_kl": lambda z, t, y, **o: fused_forward_kl(
        z, t, labels=y, target_temperature=jnp.float32(0.7), **o
    ),
}


def _problem(shape, dtype=jnp.bfloat16):
    t, v = shape
    keys = jax.random.split(jax.random.key(t + v), 3)
    z = (2.5 * jax.random.normal(keys[0], shape)).astype(dtype)
    target = (z.astype(jnp.float32) + 2.5 * jax.random.normal(keys[1], shape)) / 2
    target = target.astype(dtype)
    labels = jax.random.randint(keys[2], (t,), 0, v)
    return z, target, labels.at[t // 2].set(-100) if t > 1 else labels


def _run(loss, implementation, z, t, y, g=None, **options):
    f = partial(LOSSES[loss], implementation=implementation, **options)
    if g is None:
        return jax.jit(jax.value_and_grad(lambda z: f(z, t, y)))(z)
    value, vjp = jax.vjp(jax.jit(lambda z: f(z, t, y, reduction="none")), z)
    return value, vjp(g)[0]


def _agree(got, want, dtype):
    unit = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(got[0], want[0], rtol=2e-6, atol=2e-6)
    a, b = (np.asarray(v, np.float64) for v in (got[1], want[1]))
    assert a.shape == b.shape and np.all(np.isfinite(a))
    norm = np.linalg.norm(b)
    assert np.linalg.norm(a - b) <= max(unit / 8, 4e-6) * norm, np.linalg.norm(a - b) / norm
    # A near cancellation inside an element is relative to its row's largest; the least float16s lie
    # as far apart as they are large.
    largest = np.max(np.abs(b), axis=1, keepdims=True)
    least = float(jnp.finfo(dtype).smallest_subnormal)
    assert np.all(np.abs(a - b) <= unit * np.abs(b) + 4e-6 * largest + least)


@pytest.mark.parametrize("loss", ["ce", "reverse_kl", "soft_ce"])
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape, loss):
    """Value and gradient of the mean."""
    problem = _problem(SHAPES[shape])
    want = _run(loss, "xla", *problem)
    _agree(_run(loss, IMPLEMENTATION, *problem), want, jnp.bfloat16)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_and_dtypes(loss, dtype):
    """Every loss in every dtype, the mean and one cotangent a token."""
    problem = _problem((200, 20000), dtype)
    want = _run(loss, "xla", *problem)
    _agree(_run(loss, IMPLEMENTATION, *problem), want, dtype)
    g = jax.random.normal(jax.random.key(1), (200,))
    _agree(_run(loss, IMPLEMENTATION, *problem, g), _run(loss, "xla", *problem, g), dtype)


@pytest.mark.parametrize("loss", ["ce", "reverse_kl"])
@pytest.mark.parametrize(
    "config",
    [(2,), (2, 1, 3, 8), (2, 1, 4, 7, 3, 2), (2, 1, 4, 4, 2), (4, 2, 2, 4, 2), (2, 1, 1, 6, 2, 3)],
    ids=str,
)
def test_configs_agree(config, loss):
    """The same rows, many a block, by every kind of schedule."""
    problem = _problem((1500, 32000))
    want = _run(loss, "xla", *problem)
    with tuning.override(tuning.RowConfig(*config), "both"):
        got = _run(loss, IMPLEMENTATION, *problem)
    _agree(got, want, jnp.bfloat16)


@pytest.mark.parametrize("shape", ["on the chip, ragged", "ring, ragged"])
def test_twenty_runs_are_bitwise_equal(shape):
    """A race in the exchange would show as a run that differs from the others."""
    problem = _problem(SHAPES[shape])
    run = jax.jit(jax.value_and_grad(partial(fused_reverse_kl, implementation=IMPLEMENTATION)))
    first = run(*problem[:2])
    for _ in range(20):
        jax.tree.map(np.testing.assert_array_equal, first, run(*problem[:2]))


def test_rows_that_do_not_count_may_be_nan():
    """And their gradient is exactly 0."""
    z, t, y = _problem((300, 32000))
    z = z.at[150].set(jnp.nan)
    value, d = _run("ce", IMPLEMENTATION, z, t, y)
    assert np.isfinite(value)
    np.testing.assert_array_equal(np.asarray(d[150], np.float32), 0)
    assert np.all(np.isfinite(np.asarray(d, np.float32)))


def test_removed_classes():
    """-inf in the logits, and in both arrays of a divergence."""
    z, t, y = _problem((64, 32000))
    y = jnp.where(y >= 100, y, 500)
    z, t = z.at[:, :100].set(-jnp.inf), t.at[:, :100].set(-jnp.inf)
    for loss in ("ce", "reverse_kl", "forward_kl"):
        got = _run(loss, IMPLEMENTATION, z, t, y)
        _agree(got, _run(loss, "xla", z, t, y), jnp.bfloat16)
        np.testing.assert_array_equal(np.asarray(got[1][:, :100], np.float32), 0)


def test_in_place():
    """The gradient lies in the donated logits."""
    z, t, y = _problem((600, 65536))
    want = _run("ce", "xla", z, t, y)
    f = partial(fused_ce, inplace=True, implementation=IMPLEMENTATION)
    compiled = jax.jit(jax.value_and_grad(f), donate_argnums=0).lower(z, y).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= z.nbytes
    assert memory.temp_size_in_bytes < z.nbytes // 8
    _agree(compiled(z + 0, y), want, jnp.bfloat16)


def test_metrics():
    """Predictions and lse from the same sweep."""
    z, t, y = _problem((200, 32000))
    f = partial(fused_ce, return_metrics=True)
    got, want = (jax.jit(partial(f, implementation=i))(z, y)[1] for i in (IMPLEMENTATION, "xla"))
    np.testing.assert_array_equal(got.predictions, want.predictions)
    np.testing.assert_allclose(got.lse, want.lse, rtol=1e-6)
