"""Faults that users of such losses have met in public projects, each as the smallest input that
shows it: cotangents, layouts, transforms of the logits, the edge of the vocabulary.

The docstring of each test names where the fault was met. Unless a test says otherwise: float32,
tolerance 1e-5 absolute, value and gradients; weights are written `[V, H]` (row v is class v).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from ce_solved import (
    INF,
    NAN,
    ROW_LABELS,
    ROWS,
    by_tiling,
    close,
    compiled,
    eye,
    f32,
    i32,
    solve,
    solve_and_compare,
)

from pallas_loss import fused_linear_ce

# --- the cotangent --------------------------------------------------------------------------------


def test_per_token_cotangent_weighs_its_own_token(backend):
    """linkedin/Liger-Kernel#968: every token's gradient was multiplied by the first token's
    cotangent."""
    g = f32(0, 2, -1)
    loss, grads, _ = solve_and_compare(backend, ROWS, eye(4), ROW_LABELS, g, reduction="none")
    assert loss.shape == (3,)
    close(loss, [1.386294, 1.743668, 2.340753], 2e-6)
    np.testing.assert_array_equal(grads["x"][0], np.zeros(4))
    close(grads["x"][1], [0.950734, -1.650245, 0.349755, 0.349755], 2e-6)
    close(grads["x"][2], [-0.096255, -0.711235, 0.903745, -0.096255], 2e-6)
    close(grads["w"][1, :2], [-1.650245, -1.422469], 2e-6)


def test_per_token_loss_keeps_the_batch_shape(backend):
    """linkedin/Liger-Kernel#678: an unreduced loss came back as a scalar or flattened."""
    x, labels = ROWS.reshape(3, 1, 4), ROW_LABELS.reshape(3, 1)
    loss, grads, metrics = solve_and_compare(
        backend, x, eye(4), labels, f32([0], [2], [-1]), reduction="none"
    )
    assert loss.shape == metrics.lse.shape == metrics.predictions.shape == (3, 1)
    assert grads["x"].shape == (3, 1, 4)


@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
def test_cotangent_scales_every_gradient_alike(backend, reduction):
    """AI-Hypercomputer/maxtext#4699, NVIDIA/TransformerEngine#2139: scaled for the head, not for
    the body; or only right when the cotangent is 1."""
    bias = f32(0.5, 0, -0.5, 0.25)

    def at(c):
        return solve(backend, ROWS, eye(4), ROW_LABELS, c, bias=bias, reduction=reduction)[1]

    solve_and_compare(backend, ROWS, eye(4), ROW_LABELS, bias=bias, reduction=reduction)
    unit = at(1.0)
    for c in (1.0, 3.0, -2.0, 0.0, 1 / 65528):
        scaled = at(c)
        for name, one in unit.items():
            close(
                scaled[name],
                np.float64(np.float32(c)) * np.asarray(one, np.float64),
                1e-12,
                1e-6,
                name,
            )


# --- memory layout --------------------------------------------------------------------------------


def _layout_problem():
    x_sb = np.sin(np.arange(64.0)).reshape(4, 2, 8).astype(np.float32)  # [S, B, H]
    w = np.cos(np.arange(48.0)).reshape(6, 8).astype(np.float32)
    labels = (np.arange(16) * 5 % 6).astype(np.int32)
    g = np.sin(np.arange(16.0) + 1).astype(np.float32)
    return x_sb, w, labels, g


def test_transposed_sliced_and_broadcast_operands(backend):
    """ROCm/TransformerEngine#623, NVIDIA/TransformerEngine#2402: strided producers were read as
    dense memory."""
    x_sb, w, labels, g = _layout_problem()

    def vjp(x, w, labels, cotangent, layout):
        def loss(x, w):
            return fused_linear_ce(
                x, w, labels, reduction="none", w_layout=layout, implementation=backend.name
            )

        value, pull = jax.vjp(loss, x, w)
        return value, *pull(cotangent)

    @jax.jit
    def dense(x, w_vh, labels, cotangent):
        return vjp(x, w_vh, labels, cotangent, "vh")

    @jax.jit
    def strided(x_sb, w_vh, labels, cotangent):
        x = jnp.swapaxes(x_sb, 0, 1)
        return vjp(x, w_vh, labels[::2].reshape(2, 4), cotangent[::2].reshape(2, 4), "vh")

    @jax.jit
    def broadcast(x_sb, w_vh, labels):
        x = jnp.swapaxes(x_sb, 0, 1)
        return vjp(
            x, w_vh, labels[::2].reshape(2, 4), jnp.broadcast_to(jnp.float32(2), (2, 4)), "vh"
        )

    @jax.jit
    def transposed_w(x, w_vh, labels, cotangent):
        value, dx, dw = vjp(x, w_vh.T, labels, cotangent, "hv")
        return value, dx, dw.T

    x = np.ascontiguousarray(x_sb.swapaxes(0, 1))
    y, cotangent = labels[::2].reshape(2, 4).copy(), g[::2].reshape(2, 4).copy()
    expected = dense(x, w, y, cotangent)
    truth = oracle.gradients(x, w, y, cotangent, reduction="none", w_layout="vh")
    close(expected[1], truth.x, 2e-6)
    close(expected[2], truth.w, 2e-6)
    jax.tree.map(np.testing.assert_array_equal, strided(x_sb, w, labels, g), expected)
    jax.tree.map(
        np.testing.assert_array_equal,
        broadcast(x_sb, w, labels),
        dense(x, w, y, np.full((2, 4), 2, np.float32)),
    )
    for got, right in zip(transposed_w(x, w, y, cotangent), expected, strict=True):
        close(got, right, 1e-6)


@pytest.mark.parametrize(
    "options", [{}, {"z_loss": 0.01, "label_smoothing": 0.1}], ids=["plain", "terms"]
)
def test_optional_outputs_and_repeated_calls_change_nothing(backend, options):
    """linkedin/Liger-Kernel#507, triton-lang/triton#6547: an unused output shared a buffer with the
    loss; the first call differed from the second; the caller's arrays were overwritten."""
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(20, 9)).astype(np.float32), rng.normal(size=(65, 9)).astype(np.float32)
    labels, bias = rng.integers(0, 65, 20).astype(np.int32), np.zeros(65, np.float32)
    arguments = [jnp.asarray(a) for a in (x, w, labels)]

    @functools.partial(jax.jit, static_argnames=("metrics", "with_bias"))
    def call(x, w, labels, metrics, with_bias):
        extra = {"bias": jnp.asarray(bias)} if with_bias else {}
        result = fused_linear_ce(
            x,
            w,
            labels,
            w_layout="vh",
            **extra,
            **options,
            return_metrics=metrics,
            implementation=backend.name,
        )
        return result[0] if metrics else result

    first = call(*arguments, metrics=False, with_bias=False)
    close(first, oracle.evaluate(x, w, labels, w_layout="vh", **options).loss, 0, 2e-6)
    for metrics in (False, True):
        for with_bias in (False, True):
            again = call(*arguments, metrics=metrics, with_bias=with_bias)
            np.testing.assert_array_equal(again, first)
    for now, before in zip(arguments, (x, w, labels), strict=True):
        np.testing.assert_array_equal(now, before)


# --- logit transforms -----------------------------------------------------------------------------


@pytest.mark.parametrize("traced", [False, True], ids=["static", "traced"])
def test_temperature_divides_logits_and_gradient(backend, traced):
    """ServiceNow/Fast-LLM#228, huggingface/trl#4159: divided after the softmax, or only in one of
    two passes."""
    temperature = np.float32(0.5) if traced else 0.5
    loss, grads, _ = solve_and_compare(
        backend, f32([1, 2, 4]), eye(3), i32(0), temperature=temperature
    )
    close(loss, 6.020581, 2e-6)
    close(grads["x"][0], [-1.995143, 0.035885, 1.959258], 2e-6)


def test_tiny_temperature_with_half_precision_input(backend):
    """vllm-project/vllm#22180: the half precision quotient overflowed to inf, then NaN."""
    backend.require("float16")
    x = f32([1, 2, 4]).astype(np.float16)
    for temperature in (1e-5, np.float32(1e-5)):
        loss, grads, _ = solve(
            backend,
            x,
            eye(3, np.float16),
            i32(0),
            temperature=temperature,
            bias=np.zeros(3, np.float32),
        )
        close(loss, 3e5, rtol=1e-6)
        close(grads["bias"], [-1e5, 0, 1e5], rtol=1e-6)


@pytest.mark.parametrize("temperature", [0, 0.0, -1.0, float("nan")])
def test_temperature_must_be_positive(backend, temperature):
    """vllm-project/vllm#890: a placeholder temperature below 0 silently gave inf and NaN."""
    with pytest.raises(ValueError, match="temperature"):
        fused_linear_ce(
            f32([1, 2, 4]), eye(3), i32(0), temperature=temperature, implementation=backend.name
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_soft_cap_formula_and_saturation(backend, dtype):
    """unslothai/unsloth-zoo#593, lightseekorg/tokenspeed#183: `z*tanh(z/c)`; a tanh from exp gave
    NaN."""
    backend.require(dtype)
    big = 6e4 if dtype == "float16" else 1e5
    x = f32([124, 0, -124], [big, 0, -big]).astype(jnp.dtype(dtype))
    loss, grads, _ = solve(
        backend, x, eye(3, jnp.dtype(dtype)), i32(2, 2), 1.0, reduction="none", logit_soft_cap=30.0
    )
    close(loss, [59.969175, 60.0], 1e-5)
    rtol = {"float32": 1e-3, "bfloat16": 5e-3, "float16": 1.5e-3}[dtype]
    close(grads["x"][0], [1.0267e-3, 0, -1.0267e-3], 1e-10, rtol)
    close(grads["x"][1], [0, 0, 0], 1e-12)


# --- vocabulary edge ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vocab", "cap"),
    [
        (129, None),
        (257, None),
        (1000, None),
        (32001, None),
        (257, 30.0),
        (257, 1.0),
        (32001, 30.0),
        (129, 1.0),
    ],
)
def test_no_phantom_columns_past_the_vocabulary(backend, vocab, cap):
    """verl-project/verl#2656, unslothai/unsloth#10616: rows past V added exp(0), or exp(-cap), to
    the sum."""
    x, w = np.ones((3, 16), np.float32), np.full((vocab, 16), -1.25, np.float32)
    bias, labels = np.full(vocab, -20, np.float32), i32(0, vocab - 1, vocab // 2)
    loss, grads, metrics = solve(
        backend, x, w, labels, f32(1, 1, 1), bias=bias, reduction="none", logit_soft_cap=cap
    )
    close(loss, np.full(3, np.log(vocab)), 2e-5)
    level = -40.0 if cap is None else cap * np.tanh(-40.0 / cap)
    close(metrics.lse, np.full(3, level + np.log(vocab)), 2e-5)
    slope = 1.0 if cap is None else 1 - np.tanh(40.0 / cap) ** 2
    expected = np.full(vocab, 3.0 / vocab)
    np.subtract.at(expected, labels, 1.0)
    close(grads["bias"], slope * expected, 1e-6)


@pytest.mark.parametrize("vocab", [129, 1000])
def test_no_phantom_columns_in_smoothing_and_z_loss(backend, vocab):
    """fla-org/flash-linear-attention#1231: the tail of the last tile entered the other sums as
    well."""
    x, w = np.ones((2, 16), np.float32), np.full((vocab, 16), -2.5, np.float32)
    solve_and_compare(
        backend,
        x,
        w,
        i32(0, vocab - 1),
        label_smoothing=0.3,
        z_loss=0.01,
        logit_soft_cap=30.0,
        class_weights=np.linspace(0.5, 1.5, vocab).astype(np.float32),
        atol=3e-6,
    )


@pytest.mark.parametrize(
    ("tokens", "hidden"),
    [(1, 1), (7, 100), (13, 19), (17, 1), (33, 100)],
)
def test_odd_token_and_hidden_remainders(backend, tokens, hidden):
    """pytorch/helion#2031, jax-ml/jax#23819: the last tile multiplied uninitialised memory."""
    jnp.full(
        (256, 256), NAN
    ).block_until_ready()  # freed at once: its memory may be handed out next
    rng = np.random.default_rng(tokens * 100 + hidden)
    x = rng.normal(size=(tokens, hidden)).astype(np.float32)
    w = rng.normal(size=(37, hidden)).astype(np.float32)
    labels = rng.integers(0, 37, tokens).astype(np.int32)
    g = rng.normal(size=tokens).astype(np.float32)
    solve_and_compare(backend, x, w, labels, g, reduction="none", bias=np.zeros(37, np.float32))


@pytest.mark.parametrize("scalar", [None, "temperature", "logit_scale"])
def test_vocabulary_removed_by_the_bias(backend, scalar):
    """NovaSky-AI/SkyRL#2259: padded classes at -inf, whole tiles of them, made 0 * -inf and NaN."""
    rng = np.random.default_rng(8)
    x = rng.normal(size=(5, 6)).astype(np.float32)
    w = rng.normal(size=(300, 6)).astype(np.float32)
    bias = rng.normal(size=300).astype(np.float32)
    removed = np.r_[0:70, 128:192, 256:300]
    bias[removed] = -INF
    labels = i32(70, 127, 192, 255, -100)
    options = {"bias": bias} | ({scalar: np.float32(0.8)} if scalar else {})
    _, grads, metrics = solve_and_compare(backend, x, w, labels, z_loss=0.01, **options)
    np.testing.assert_array_equal(grads["bias"][removed], np.zeros(removed.size))
    np.testing.assert_array_equal(grads["w"][removed], np.zeros((removed.size, 6)))
    assert not set(np.asarray(metrics.predictions).tolist()) & set(removed.tolist())


@pytest.mark.parametrize(("tokens", "vocab"), [(37, 137), (65, 1)])
def test_tile_sizes_do_not_change_the_answer(backend, tokens, vocab):
    """NVIDIA-NeMo/Automodel#3803, pytorch/helion#2104: sums per block, a backward tied to one block
    size."""
    rng = np.random.default_rng(tokens)
    x, w = rng.normal(size=(tokens, 19)), rng.normal(size=(vocab, 19))
    labels = rng.integers(0, vocab, tokens).astype(np.int32)
    labels[rng.random(tokens) < 0.3] = -100
    problem = (x.astype(np.float32), w.astype(np.float32), labels)
    options = {
        "bias": rng.normal(size=vocab).astype(np.float32),
        "label_smoothing": 0.1,
        "z_loss": 0.01,
    }
    results = by_tiling(backend, lambda: solve_and_compare(backend, *problem, **options))
    loss, grads, metrics = next(iter(results.values()))
    for other, other_grads, other_metrics in results.values():
        close(other, loss, 0, 1e-6)
        np.testing.assert_array_equal(other_metrics.predictions, metrics.predictions)
        for name, one in grads.items():
            close(other_grads[name], one, 1e-6, 1e-5, name)


@pytest.mark.own_tiles
def test_more_than_one_tile_of_the_default_size(backend):
    """unslothai/unsloth#10616, the kind: tests within one default tile never saw its edges."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=(1030, 8)).astype(np.float32)
    w = rng.normal(size=(4100, 8)).astype(np.float32)
    labels = rng.integers(0, 4100, 1030).astype(np.int32)
    labels[rng.random(1030) < 0.3] = -100
    g = rng.normal(size=1030).astype(np.float32)
    compiled.cache_clear()
    solve_and_compare(backend, x, w, labels, g, reduction="none", label_smoothing=0.1)
    compiled.cache_clear()


@pytest.mark.parametrize("label", [0, 1023])
def test_bias_enters_the_label_logit_once(backend, label):
    """apple/ml-cross-entropy#52: the bias was added to the label's logit once per tile; losses went
    negative."""
    bias = np.zeros(1024, np.float32)
    bias[label] = 3
    x, w = np.zeros((1, 16), np.float32), np.zeros((1024, 16), np.float32)
    loss, grads, _ = solve_and_compare(backend, x, w, i32(label), bias=bias, atol=2e-6)
    close(loss, 3.949938, 2e-6)
    expected = np.exp(bias.astype(np.float64))
    expected /= expected.sum()
    expected[label] -= 1
    close(grads["bias"], expected, 1e-7)
