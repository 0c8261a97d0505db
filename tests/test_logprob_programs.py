"""`fused_linear_logprob`: transformations, memory and work."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from logprob_truth import (
    OUTPUTS,
    close,
    eye,
    f32,
    i32,
    truth,
)

from pallas_loss import fused_linear_ce, fused_linear_logprob

# --- transformations ------------------------------------------------------------------------------


def _per_token(backend, **options):
    return functools.partial(
        fused_linear_logprob, entropy=True, implementation=backend.name, **options
    )


def _transform_problem():
    rng = np.random.default_rng(3)
    x, w = f32(*rng.normal(size=(6, 4))), f32(*rng.normal(size=(4, 7)))
    t, g = f32(*rng.uniform(0.5, 2, 6)), f32(*rng.normal(size=(3, 6)))
    return x, w, rng.integers(0, 7, 6).astype(np.int32), t, g


def _objective(out, g):
    return sum(jnp.sum(v * gv) for v, gv in zip(out, g, strict=True))


@pytest.mark.parametrize("backward", ["recompute", "stored"])
def test_vmap_scan_and_checkpoint_equal_one_call(backend, backward):
    """jax-ml/jax#5832: a shared weight under `vmap` and `scan`; a temperature for every token."""
    backend.require_transforms()
    x, w, labels, t, g = _transform_problem()
    call = _per_token(backend, backward=backward)

    def whole(x, w, t):
        return _objective(call(x, w, labels, temperature=t), g)

    def by_vmap(x, w, t):
        one = lambda x, y, t: call(x, w, y, temperature=t)  # noqa: E731
        return _objective(jax.vmap(one)(x, labels, t), g)

    def by_scan(x, w, t):
        parts = jax.tree.map(lambda a: a.reshape(3, 2, *a.shape[1:]), (x, labels, t))
        one = lambda c, p: (c, call(p[0], w, p[1], temperature=p[2]))  # noqa: E731
        out = jax.lax.scan(one, 0, parts)[1]
        return _objective(jax.tree.map(lambda v: v.reshape(6), out), g)

    expected = jax.value_and_grad(whole, (0, 1, 2))(x, w, t)  # not jitted
    exact = truth(x, w, labels, dict(zip(OUTPUTS, g, strict=True)), temperature=t).gradients
    rounding = 1e-5 if backward == "recompute" else 2e-2
    for got, name in zip(expected[1], ("x", "w", "temperature"), strict=True):
        close(got, exact[name], rounding, name=name)
    for form in (jax.jit(whole), by_vmap, by_scan, jax.checkpoint(whole)):
        got = jax.jit(jax.value_and_grad(form, (0, 1, 2)))(x, w, t)
        jax.tree.map(functools.partial(close, atol=1e-5), got, expected)


def test_second_derivatives_and_forward_mode_raise(backend):
    """tensorflow/tensorflow#31700: zero second derivatives and no error."""
    x, w, labels, t, g = _transform_problem()

    def objective(t):
        return _objective(_per_token(backend)(x, w, labels, temperature=t), g)

    for derivative in (
        lambda: jax.grad(lambda t: jnp.sum(jax.grad(objective)(t)))(t),
        lambda: jax.jvp(objective, (t,), (t,)),
    ):
        with pytest.raises(TypeError, match="(?i)fused_linear|forward|second|reverse"):
            derivative()


def test_a_new_temperature_does_not_compile_anew(backend):
    """A float is static; an array, scalar or per token, is not."""
    x, w, labels, t, _ = _transform_problem()
    traces = []

    @jax.jit
    def call(t):
        traces.append(t.shape)
        return _per_token(backend)(x, w, labels, temperature=t).logprob

    for factor in (1, 2, 3):
        call(factor * t)
        call(jnp.float32(factor))
    assert traces == [(6,), ()]


# --- memory and work ------------------------------------------------------------------------------

BIG_T, BIG_H, BIG_V = 8192, 128, 131072


def _program(implementation, kind, gradients=(0, 1), k=None, **options):
    """The compiled program at `[8192, 128, 131072]`, per-token cotangents among its arguments."""
    shape = jax.ShapeDtypeStruct
    x, w = shape((BIG_T, BIG_H), jnp.bfloat16), shape((BIG_V, BIG_H), jnp.bfloat16)
    labels, g = shape((BIG_T, k) if k else (BIG_T,), jnp.int32), shape((BIG_T,), jnp.float32)

    def objective(x, w, labels, g):
        common = {"w_layout": "vh", "implementation": implementation}
        if kind == "ce":
            return jnp.sum(g * fused_linear_ce(x, w, labels, reduction="none", **common, **options))
        out = fused_linear_logprob(x, w, labels, **common, **options)
        value = jnp.sum(g * out.logprob) if k is None else jnp.sum(g[:, None] * out.logprob)
        return value if out.entropy is None else value + jnp.sum(g * out.entropy)

    step = jax.value_and_grad(objective, gradients) if gradients else objective
    return jax.jit(step).lower(x, w, labels, g).compile()


@pytest.mark.own_tiles
def test_entropy_costs_nothing_unless_asked_for(backend):
    """Without it the work is that of the cross-entropy; with it the row sums hold a moment more."""

    def flops(kind, **options):
        return _program(backend.name, kind, **options).cost_analysis()["flops"]

    for gradients in ((), (0, 1)):
        plain = flops("logprob", gradients=gradients)
        assert plain == pytest.approx(flops("ce", gradients=gradients), rel=1e-4)
        assert plain < flops("logprob", gradients=gradients, entropy=True)
    out = fused_linear_logprob(
        np.ones((2, 3), np.float32), eye(3), i32(0, 1), implementation=backend.name
    )
    assert out.entropy is None


@pytest.mark.own_tiles
@pytest.mark.parametrize("k", [None, 64])
def test_no_full_logits(backend, k):
    """NVIDIA-NeMo/Automodel#3907: a one-hot, a copy or saved chunks were [T, V] again."""
    if backend.hooks.full_logits:
        pytest.skip("holds full logits by design")
    compiled = _program(
        backend.name, "logprob", k=k, entropy=True, logit_soft_cap=30.0, temperature=0.7
    )
    gathered = 2**28 if k else 0
    assert compiled.memory_analysis().temp_size_in_bytes < 0.3e9 + gathered
    shapes = re.findall(r"\b(?:pred|[a-z]+\d+\w*)\[([\d,]+)\]", compiled.as_text())
    largest = max(np.prod([int(n) for n in dims.split(",")]) for dims in set(shapes))
    assert largest < BIG_T * BIG_V // 8


@pytest.mark.own_tiles
def test_stored_takes_the_memory_it_says_and_spares_a_product(backend):
    """T V 2 bytes more, and about a quarter fewer flops."""
    if backend.hooks.full_logits:
        pytest.skip("its logits are at hand in the backward either way")
    programs = [_program(backend.name, "logprob", backward=b) for b in ("recompute", "stored")]
    recompute, stored = (p.memory_analysis().temp_size_in_bytes for p in programs)
    assert stored - recompute == pytest.approx(BIG_T * BIG_V * 2, rel=0.1)
    recompute, stored = (p.cost_analysis()["flops"] for p in programs)
    assert 0.7 < stored / recompute < 0.85
