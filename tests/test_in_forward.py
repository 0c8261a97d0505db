"""Gradients made in the forward: the guard, the chunks, the choice of plan, the backward's factor.

Accuracy by option, dtype and shape is `test_conformance.py`'s.
"""

import collections
import functools
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from pallas_loss import UnsupportedError, fused_linear_ce

T, H, V = 40, 16, 67


def make(t=T, h=H, v=V, scale=1.0, seed=0):
    """Float32 `(x, w [h, v], labels)`."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(t, h)).astype(np.float32)
    w = (scale * rng.normal(size=(h, v)) / np.sqrt(h)).astype(np.float32)
    return x, w, rng.integers(0, v, t).astype(np.int32)


def gradients(backend, x, w, labels, wrt=(0, 1), backward="in_forward", **options):
    """Value and gradients of the mean loss."""
    loss = functools.partial(
        fused_linear_ce, labels=labels, implementation=backend.name, backward=backward, **options
    )
    return jax.jit(jax.value_and_grad(lambda x, w: loss(x, w), wrt))(x, w)


def assert_close(got, want, rtol=2e-6):
    """Norms of the differences within `rtol` of those of the wanted arrays."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.all(np.isfinite(a))
        assert np.linalg.norm(a - b) <= rtol * np.linalg.norm(b) + 1e-12


# --- the guard -----------------------------------------------------------------------------------


def _adversarial(name):
    x, w, labels = make(scale=2.0)
    bias = None
    if name == "one hot row":
        x[7] = 40 * w[:, 5] / np.linalg.norm(w[:, 5]) ** 2
        x[7] *= 8
    elif name == "label 200 nats below the maximum":
        x[:, 0], w[0] = 1.0, 0.0
        w[0, labels] = -200.0
    elif name == "offset of 1e4":
        x[:, 0], w[0] = 1.0, 1e4
    elif name == "removed class as label":
        bias = np.zeros(V, np.float32)
        bias[[1, 2, 3]] = -np.inf
        labels = np.where(np.isin(labels, [1, 2, 3]), 4, labels)
    elif name == "class 0 removed, masked rows":
        bias = np.zeros(V, np.float32)
        bias[0] = -np.inf
        labels = np.where(labels == 0, -100, labels)
        labels[:5] = -100
    return x, w, labels, bias


@pytest.mark.parametrize(
    "name",
    [
        "one hot row",
        "label 200 nats below the maximum",
        "offset of 1e4",
        "removed class as label",
        "class 0 removed, masked rows",
    ],
)
def test_adversarial_logits_are_exact(backend, name):
    """As near to float64 as the recompute plan; nothing infinite on the way to any gradient."""
    backend.require("float32")
    x, w, labels, bias = _adversarial(name)
    options = {} if bias is None else {"bias": bias}
    truth = oracle.evaluate(x=x, w=w, labels=labels, reduction="mean", **options)
    right = oracle.gradients(
        x=x, w=w, labels=labels, reduction="mean", cotangent=np.asarray(1.0), **options
    )
    for backward in ("in_forward", "recompute"):
        value, grads = gradients(backend, x, w, labels, backward=backward, **options)
        assert abs(float(value) - truth.loss) <= 2**-20 * truth.scale * (1 + truth.condition)
        for got, name_ in zip(grads, ("x", "w"), strict=True):
            scale = np.max(right.scale[name_])
            error = np.max(np.abs(np.asarray(got, np.float64) - getattr(right, name_)))
            assert error <= 2**-20 * scale * (1 + truth.condition), (backward, name_)


def test_a_row_out_of_range_gives_the_recomputed_result(backend):
    """Bit for bit: the guard replaces the whole call, value and gradients."""
    backend.require("float32")
    x, w, labels, _ = _adversarial("label 200 nats below the maximum")
    got = gradients(backend, x, w, labels)
    want = gradients(backend, x, w, labels, backward="recompute")
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_a_row_in_range_does_not(backend):
    """The measure itself: ordinary rows are computed by the plan, whose sums round otherwise."""
    backend.require("float32")
    x, w, labels = make(t=64, v=200)
    got = gradients(backend, x, w, labels)[1]
    want = gradients(backend, x, w, labels, backward="recompute")[1]
    assert any(np.any(np.asarray(a) != b) for a, b in zip(got, want, strict=True))
    assert_close(got, want)


@pytest.mark.parametrize("gap", [10.0, 20.0, 40.0])
def test_confident_tokens_keep_their_digits(backend, gap):
    """Losses of e^-gap, relative to themselves, and their gradients."""
    backend.require("float32")
    labels = np.arange(8, dtype=np.int32)
    x = np.eye(8, 16, dtype=np.float32)
    w = np.zeros((16, 8), np.float32)
    w[np.arange(8), labels] = gap
    value, (dx, _) = gradients(backend, x, w, labels)
    s = 7 * np.exp(-float(gap))
    np.testing.assert_allclose(value, np.log1p(s), rtol=1e-5)
    np.testing.assert_allclose(dx[0, 0], -gap * s / (1 + s) / 8, rtol=1e-5)


# --- chunks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("t", [512, 700])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chunks_change_nothing(backend, t, dtype):
    """Equal ones, and a ragged last one; dw from one float32 sum whatever its dtype."""
    backend.require(dtype)
    if not backend.hooks.transforms:
        pytest.skip("too many tiles for the interpreter")
    x, w, labels = make(t=t, v=130)
    x, w = jnp.asarray(x, dtype), jnp.asarray(w, dtype)
    itemsize = 4 if dtype == "float32" else 2
    sums = 0 if dtype == "float32" else 4 * H * 130
    one = gradients(backend, x, w, labels)
    several = gradients(backend, x, w, labels, workspace_bytes=sums + 256 * 130 * itemsize)
    assert one[1][1].dtype == several[1][1].dtype == w.dtype
    np.testing.assert_allclose(several[0], one[0], rtol=1e-6)
    assert_close(several[1], one[1], 2e-6 if dtype == "float32" else 2**-8)


def test_a_workspace_too_small_says_what_is_needed(backend):
    """Before any work, with both numbers."""
    x, w, labels = make(t=512, v=100)
    backend.require("float32")
    with pytest.raises(ValueError, match=r"workspace_bytes=1000 .* needs 102400"):
        gradients(backend, x, w, labels, workspace_bytes=1000)


@pytest.mark.parametrize(
    ("value", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)]
)
def test_a_bad_workspace_is_refused(value, error):
    """It is a positive integer."""
    x, w, labels = make()
    with pytest.raises(error, match="workspace_bytes"):
        fused_linear_ce(x, w, labels, workspace_bytes=value)


# --- the choice ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"reduction": "none"}, "reduction='none'"),
        ({"compute_dtype": jnp.float16}, "float16"),
        ({"label_smoothing": 0.1, "logit_soft_cap": 5.0}, "soft cap"),
        ({"logit_soft_cap": 5.0, "logit_scale": jnp.float32(2)}, "logit_scale"),
    ],
)
def test_what_it_cannot_serve_is_refused_by_name(options, why):
    """Under the explicit name; `auto` recomputes and agrees with the plan named."""
    x, w, labels = make()
    with pytest.raises(UnsupportedError, match="in_forward.*" + why):
        fused_linear_ce(x, w, labels, backward="in_forward", implementation="xla", **options)
    auto, named = (
        fused_linear_ce(x, w, labels, backward=b, implementation="xla", **options)
        for b in ("auto", "recompute")
    )
    np.testing.assert_array_equal(auto, named)


def test_an_unknown_plan_is_refused():
    """It is named with those there are."""
    with pytest.raises(ValueError, match="'in_forward'; got 'stored'"):
        fused_linear_ce(*make(), backward="stored")


def test_the_choice_and_its_price_are_logged(caplog):
    """Once each: which plan, why, how many chunks, what it keeps."""
    x, w, labels = make(t=48, v=71)
    with caplog.at_level(logging.INFO, "pallas_loss"):
        for backward in ("auto", "in_forward", "in_forward"):
            fused_linear_ce(x, w, labels, backward=backward, implementation="xla")
    lines = [r.getMessage() for r in caplog.records if "gradients:" in r.getMessage()]
    assert [line.split()[1] for line in lines] == ["recompute", "in_forward"]
    assert "no [T, V] array" in lines[0] and "1 chunk of 48 tokens" in lines[1]


def test_without_differentiation_nothing_changes(backend):
    """The forward alone is the same program for every plan."""
    backend.require("float32")
    x, w, labels = make()
    programs = {
        jax.jit(functools.partial(fused_linear_ce, implementation=backend.name, backward=backward))
        .lower(x, w, labels)
        .as_text()
        for backward in ("recompute", "in_forward")
    }
    assert len(programs) == 1


# --- the backward --------------------------------------------------------------------------------


def test_three_products_and_two_where_one_operand_is_frozen():
    """The logits', and behind the guard one for each gradient. In the other branch XLA sees that
    the same logits are formed twice."""
    x, w, labels = make(t=64, h=512, v=512)
    loss = functools.partial(
        fused_linear_ce, labels=labels, implementation="reference", backward="in_forward"
    )
    for argnums in ((0, 1), (0,), (1,)):
        text = jax.jit(jax.grad(loss, argnums)).lower(x, w).compile().as_text()
        dots = re.findall(r' dot\(.*op_name=".*?/(?:cond/(branch_\d)_fun/)?dot_general"', text)
        n = len(argnums)
        assert collections.Counter(dots) == {"": 1, "branch_1": n, "branch_0": 1 + n}


@pytest.mark.parametrize("factor", [1.0, 0.25, 3.0, 0.0])
def test_the_upstream_factor_multiplies_once(backend, factor):
    """A constant 1 or not: the gradients of `factor * loss`."""
    backend.require("float32")
    x, w, labels = make()

    def loss(x, w, factor):
        return factor * fused_linear_ce(
            x, w, labels, implementation=backend.name, backward="in_forward"
        )

    grads = jax.jit(jax.grad(loss, (0, 1)))
    base = grads(x, w, jnp.float32(1.0))
    got = grads(x, w, jnp.float32(factor))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, factor * b), got, base)


def test_a_factor_of_one_leaves_no_loop_behind():
    """`jax.grad` of the loss itself passes a constant 1: no pass over the gradients is compiled."""
    x, w, labels = make()
    loss = functools.partial(
        fused_linear_ce, labels=labels, implementation="reference", backward="in_forward"
    )
    text = jax.jit(jax.grad(loss, (0, 1))).lower(x, w).compile().as_text()
    assert " while(" not in text


def test_cotangents_of_the_metrics_are_added(backend):
    """`metrics.lse` and `metrics.nll` stay differentiable beside the loss."""
    backend.require("float32")
    x, w, labels = make()

    def loss(x, w, backward):
        value, metrics = fused_linear_ce(
            x, w, labels, z_loss=0.1, return_metrics=True, implementation=backend.name,
            backward=backward,
        )  # fmt: skip
        return 2 * value + jnp.sum(metrics.lse**2) + metrics.nll

    grads = jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)
    assert_close(grads(x, w, "in_forward"), grads(x, w, "recompute"))


def test_weights_and_normalizer_are_differentiable(backend):
    """Gradient accumulation divides by an array; so may a loss that learns its weights."""
    backend.require("float32")
    x, w, labels = make()
    weights = np.linspace(0.5, 2, T).astype(np.float32)

    def loss(weights, normalizer, backward):
        return fused_linear_ce(
            x, w, labels, weights=weights, normalizer=normalizer, implementation=backend.name,
            backward=backward,
        )  # fmt: skip

    grads = jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)
    arguments = weights, jnp.float32(7.0)
    assert_close(grads(*arguments, "in_forward"), grads(*arguments, "recompute"))


def test_under_checkpoint_scan_and_donation(backend):
    """A rematerialised model, micro-batches in a scan, donated operands: the same gradients."""
    backend.require("float32")
    backend.require_transforms()
    x, w, labels = make(t=48)

    def step(backward, x, w):
        @jax.checkpoint
        def model(w, x, labels):
            hidden = jnp.tanh(x)
            return fused_linear_ce(
                hidden, w, labels, normalizer=48.0, implementation=backend.name, backward=backward
            )

        def micro(total, batch):
            value, dw = jax.value_and_grad(model)(w, *batch)
            return jax.tree.map(jnp.add, total, (value, dw)), None

        start = jnp.zeros(()), jnp.zeros_like(w)
        return jax.lax.scan(micro, start, (x.reshape(3, 16, -1), labels.reshape(3, 16)))[0]

    run = jax.jit(step, static_argnums=0, donate_argnums=(1, 2))
    got = run("in_forward", jnp.array(x), jnp.array(w))
    want = run("recompute", jnp.array(x), jnp.array(w))
    assert_close(got, want)


def test_no_tokens(backend):
    """A mean over nothing is 0, and so are its gradients."""
    backend.require("float32")
    x, w, labels = make()
    value, (dx, dw) = gradients(backend, x[:0], w, labels[:0])
    assert float(value) == 0 and dx.shape == (0, H)
    np.testing.assert_array_equal(dw, np.zeros_like(w))


def test_a_bad_label_is_loud(backend):
    """NaN, as in the other plan, and not a wrong number."""
    backend.require("float32")
    x, w, labels = make()
    labels[3] = V + 5
    value, (dx, _) = gradients(backend, x, w, labels)
    assert np.isnan(value) and np.all(np.isnan(dx[3])) and np.all(np.isfinite(dx[4]))
