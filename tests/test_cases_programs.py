"""Faults that users of such losses have met in public projects, each as the smallest input that
shows it: transformations, memory and work.

The docstring of each test names where the fault was met. Unless a test says otherwise: float32,
tolerance 1e-5 absolute, value and gradients; weights are written `[V, H]` (row v is class v).
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from ce_solved import (
    INF,
    close,
    f32,
    i32,
    solve,
)

from pallas_loss import fused_linear_ce

# --- transformations ------------------------------------------------------------------------------


def _two_class_loss(backend):
    def loss(x):
        return fused_linear_ce(
            x[None], jnp.eye(2), jnp.zeros(1, jnp.int32), implementation=backend.name
        )

    return loss


def _higher_order(loss):
    x = jnp.array([0.5, 0.5])
    tangent = jnp.array([1.0, 0.0])
    return {
        "hessian": lambda: jax.hessian(loss)(x),
        "jacrev_of_jacrev": lambda: jax.jacrev(jax.jacrev(loss))(x),
        "jvp": lambda: jax.jvp(loss, (x,), (tangent,)),
        "jacfwd": lambda: jax.jacfwd(loss)(x),
        "grad_of_grad_dot": lambda: jax.grad(lambda x: jnp.dot(jax.grad(loss)(x), tangent))(x),
        "linearize_of_grad": lambda: jax.linearize(jax.grad(loss), x),
        "jit_of_hessian": lambda: jax.jit(jax.hessian(loss))(x),
    }


@pytest.mark.parametrize("kind", list(_higher_order(None)))
def test_forward_mode_and_second_derivatives_raise(backend, kind):
    """tensorflow/tensorflow#31700, google-research/t5x#351: zero or wrong second derivatives, no
    error."""
    with pytest.raises(TypeError, match="(?i)fused_linear_ce|forward|second|reverse"):
        _higher_order(_two_class_loss(backend))[kind]()


def test_first_derivative_beside_the_ones_that_raise(backend):
    """jax-ml/jax#16049: what must go on working; a class at -inf with no probability and no NaN."""
    close(jax.grad(_two_class_loss(backend))(jnp.array([0.5, 0.5])), [-0.5, 0.5], 1e-6)
    x, w = np.zeros((1, 4), np.float32), np.zeros((3, 4), np.float32)
    loss, grads, _ = solve(backend, x, w, i32(1), bias=f32(-INF, 0, 0))
    close(loss, 0.693147, 1e-6)
    close(grads["bias"], [0, -0.5, 0.5], 1e-6)
    assert float(grads["bias"][0]) == 0.0


SHARED_W = f32([0.5, 0], [0, 0.5], [0, 0])
SHARED_X = f32([[1, 0]], [[0, 1]], [[1, 1]])
SHARED_LABELS = i32([0], [1], [2])
SHARED_LOSSES = [0.794377, 0.794377, 1.458020]
SHARED_DW = f32([-0.164486, 0.657720], [0.657720, -0.164486], [-0.493235, -0.493235])


def test_vmap_and_scan_with_a_shared_weight(backend):
    """jax-ml/jax#5832, NVIDIA/cuEquivariance#164: no batching rule, or a wrong gradient for the
    shared weight."""
    backend.require_transforms()

    def one(x, w, y):
        return fused_linear_ce(x, w, y, w_layout="vh", implementation=backend.name)

    def by_vmap(w, x, y):
        return jax.vmap(one, in_axes=(0, None, 0))(x, w, y)

    def by_scan(w, x, y):
        return jax.lax.scan(lambda c, xy: (c, one(xy[0], w, xy[1])), 0.0, (x, y))[1]

    for form in (by_vmap, by_scan):
        losses, vjp = jax.vjp(jax.jit(form), SHARED_W, SHARED_X, SHARED_LABELS)
        dw, dx, _ = vjp(jnp.ones(3))
        close(losses, SHARED_LOSSES, 1e-6)
        close(dw, SHARED_DW, 2e-6)
        for i in range(3):
            truth = oracle.gradients(SHARED_X[i], SHARED_W, SHARED_LABELS[i], w_layout="vh")
            close(dx[i], truth.x, 1e-6)

    stacked = np.stack([SHARED_W, 2 * SHARED_W])
    nested = jax.jit(jax.vmap(by_scan, in_axes=(0, None, None)))
    losses, vjp = jax.vjp(nested, stacked, SHARED_X, SHARED_LABELS)
    close(losses[0], SHARED_LOSSES, 1e-6)
    close(vjp(jnp.ones((2, 3)))[0][0], SHARED_DW, 2e-6)

    weights = np.stack([SHARED_W, SHARED_W + 1, -SHARED_W])
    losses, vjp = jax.vjp(jax.jit(jax.vmap(one)), SHARED_X, weights, SHARED_LABELS)
    dw = vjp(jnp.ones(3))[1]
    for i in range(3):
        problem = (SHARED_X[i], weights[i], SHARED_LABELS[i])
        close(losses[i], oracle.evaluate(*problem, w_layout="vh").loss, 1e-6)
        close(dw[i], oracle.gradients(*problem, w_layout="vh").w, 1e-6)


# --- memory and work ------------------------------------------------------------------------------

BIG_T, BIG_H, BIG_V = 8192, 128, 131072


def _big_arguments():
    shape = jax.ShapeDtypeStruct
    return {
        "x": shape((BIG_T, BIG_H), jnp.bfloat16),
        "w": shape((BIG_V, BIG_H), jnp.bfloat16),
        "labels": shape((BIG_T,), jnp.int32),
        "bias": shape((BIG_V,), jnp.float32),
        "where": shape((BIG_T,), jnp.bool_),
        "weights": shape((BIG_T,), jnp.float32),
        "class_weights": shape((BIG_V,), jnp.float32),
        "temperature": shape((), jnp.float32),
    }


def _shapes(compiled):
    return {
        (kind, tuple(int(n) for n in dims.split(",") if n))
        for kind, dims in re.findall(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]", compiled.as_text())
    }


@pytest.mark.own_tiles
def test_no_full_logits_with_every_option_on(backend):
    """NVIDIA-NeMo/Automodel#3907, NovaSky-AI/SkyRL#1650: a one-hot, a copy or saved chunks were [T,
    V] again."""
    if backend.hooks.full_logits:
        pytest.skip("holds full logits by design")

    def loss(x, w, labels, **arrays):
        return fused_linear_ce(
            x,
            w,
            labels,
            **arrays,
            w_layout="vh",
            label_smoothing=0.1,
            z_loss=1e-4,
            logit_soft_cap=30.0,
            token_scaling=True,
            return_metrics=True,
            implementation=backend.name,
        )

    arguments = _big_arguments()
    operands = [arguments.pop(n) for n in ("x", "w", "labels")]
    step = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    compiled = jax.jit(step).lower(*operands, **arguments).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.3e9
    largest = max(_shapes(compiled), key=lambda s: np.prod(s[1]))
    assert np.prod(largest[1]) < BIG_T * BIG_V // 8, f"a buffer of shape {largest}"


@functools.cache
def _big_program(implementation, kind):
    """The compiled program of one kind of use at `[8192, 128, 131072]`."""

    def loss(x, w, labels):
        if kind == "stopped_w":
            w = jax.lax.stop_gradient(w)
        return fused_linear_ce(x, w, labels, w_layout="vh", implementation=implementation)

    if kind == "loss":
        step = loss
    else:
        step = jax.value_and_grad(loss, {"both": (0, 1), "x": 0, "stopped_w": 0, "w": 1}[kind])
    arguments = _big_arguments()
    return jax.jit(step).lower(*(arguments[n] for n in ("x", "w", "labels"))).compile()


@pytest.mark.own_tiles
def test_frozen_weight_or_input_costs_no_gradient(backend):
    """fla-org/flash-linear-attention#1253, linkedin/Liger-Kernel#1441: the unused gradient was
    still computed.

    A loop's body is counted once, so the flops compare programs of the same tiling, not absolute
    work.
    """

    def flops(kind):
        return _big_program(backend.name, kind).cost_analysis()["flops"]

    both = flops("both")
    assert flops("loss") < 0.35 * both
    for kind in ("x", "stopped_w", "w"):
        assert flops(kind) < 0.85 * both, kind
    for kind in ("x", "stopped_w", "loss"):
        wide = {
            s
            for s in _shapes(_big_program(backend.name, kind))
            if s[1] in ((BIG_V, BIG_H), (BIG_H, BIG_V))
        }
        assert {dtype for dtype, _ in wide} <= {"bf16"}, f"{kind}: {wide}"
