"""Faults that users of such losses have met in public projects, each as the smallest input that
shows it.

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
from flax import nnx

from pallas_loss import fused_linear_ce
from pallas_loss.nnx import LMHead

NAN, INF = np.nan, np.inf
DIFFERENTIATED = ("x", "w", "bias", "weights", "temperature", "logit_scale")


def close(got, expected, atol=1e-5, rtol=0.0, name=""):
    np.testing.assert_allclose(
        np.asarray(got).astype(np.float64), expected, atol=atol, rtol=rtol, err_msg=name
    )


@functools.cache
def _compiled(implementation, static):
    @jax.jit
    def run(arrays, cotangent):
        wanted = {n: a for n, a in arrays.items() if n in DIFFERENTIATED}
        fixed = {n: a for n, a in arrays.items() if n not in DIFFERENTIATED}

        def loss(wanted):
            arguments = {**wanted, **fixed}
            operands = [arguments.pop(n) for n in ("x", "w", "labels")]
            return fused_linear_ce(
                *operands,
                **arguments,
                **dict(static),
                return_metrics=True,
                implementation=implementation,
            )

        value, vjp, metrics = jax.vjp(loss, wanted, has_aux=True)
        return value, metrics, vjp(jnp.broadcast_to(cotangent, value.shape))[0]

    return run


def solve(backend, x, w, labels, cotangent=1.0, **options):
    """`(loss, gradients by name, metrics)` under jit; `w` is `[V, H]`. Arrays are traced, the rest
    is static."""
    options.setdefault("w_layout", "vh")
    arrays = {"x": jnp.asarray(x), "w": jnp.asarray(w), "labels": jnp.asarray(labels)}
    static = {}
    for name, value in options.items():
        if isinstance(value, np.ndarray | np.generic | jax.Array):
            arrays[name] = jnp.asarray(value)
        else:
            static[name] = value
    run = _compiled(backend.name, tuple(sorted(static.items())))
    loss, metrics, grads = run(arrays, jnp.asarray(cotangent, jnp.float32))
    return loss, grads, metrics


def solve_and_compare(backend, x, w, labels, cotangent=1.0, atol=1e-5, rtol=1e-5, **options):
    """`solve`, with the loss and every gradient compared with the float64 truth."""
    loss, grads, metrics = solve(backend, x, w, labels, cotangent, **options)
    options.setdefault("w_layout", "vh")
    truth = oracle.evaluate(x, w, labels, **options)
    wanted = np.broadcast_to(np.asarray(cotangent), truth.loss.shape)
    expected = oracle.gradients(x, w, labels, cotangent=wanted, **options)
    assert loss.dtype == jnp.float32
    close(loss, truth.loss, atol, rtol, "loss")
    for name, got in grads.items():
        close(got, getattr(expected, name), atol, rtol, "d" + name)
    return loss, grads, metrics


def f32(*values):
    return np.array(values, np.float32)


def i32(*values):
    return np.array(values, np.int32)


def eye(n, dtype=np.float32):
    """The weight with which the logits are `x` itself."""
    return np.eye(n).astype(dtype)


ROWS = f32([0, 0, 0, 0], [1, 0, 0, 0], [0, 2, 0, 0])
ROW_LABELS = i32(0, 1, 2)


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


def _by_tiling(backend, solve_once):
    """`solve_once()` under each of the backend's tilings, each traced afresh."""
    results = {}
    for name, tiling in backend.hooks.tilings.items():
        _compiled.cache_clear()
        with tiling():
            results[name] = solve_once()
    _compiled.cache_clear()
    return results


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
    results = _by_tiling(backend, lambda: solve_and_compare(backend, *problem, **options))
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
    _compiled.cache_clear()
    solve_and_compare(backend, x, w, labels, g, reduction="none", label_smoothing=0.1)
    _compiled.cache_clear()


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


# --- options --------------------------------------------------------------------------------------

OPTION_VALUES = [
    ({}, 3.440190),
    ({"label_smoothing": 0.1}, 3.290190),
    ({"logit_soft_cap": 2.0}, 2.076244),
    ({"z_loss": 0.01}, 3.637343),
    ({"bias": f32(2, 0, 0, 0)}, 1.626523),
    ({"logit_scale": 0.5}, 2.287339),
    ({"temperature": 2.0}, 2.287339),
    ({"class_weights": f32(3, 1, 1, 1), "reduction": "sum"}, 10.320569),
    ({"class_weights": f32(3, 1, 1, 1)}, 3.440190),
    ({"weights": f32(3), "reduction": "sum"}, 10.320569),
    ({"normalizer": 4.0}, 3.440190 / 4),
    ({"where": np.array([False])}, 0.0),
    ({"ignore_index": 0}, 0.0),
    ({"token_scaling": True}, 3.440190 * np.exp(-3.440190)),
]
OPTION_IDS = ["+".join(options) or "none" for options, _ in OPTION_VALUES]


@pytest.mark.parametrize(("options", "expected"), OPTION_VALUES, ids=OPTION_IDS)
def test_no_option_is_dropped(backend, options, expected):
    """linkedin/Liger-Kernel#243, apple/ml-cross-entropy#48: accepted, ignored, another objective
    trained."""
    loss, _, _ = solve_and_compare(backend, f32([1, 2, 3, 4]), eye(4), i32(0), atol=3e-6, **options)
    close(loss, expected, 3e-6)


def _head_with(kernel, **settings):
    vocab, hidden = kernel.shape
    head = LMHead(hidden, vocab, rngs=nnx.Rngs(0), **settings)
    state = nnx.state(head, nnx.Param)
    assert sorted(a.size for a in jax.tree.leaves(state)) == [kernel.size]
    shaped = jax.tree.map(
        lambda a: jnp.asarray(kernel if a.shape == kernel.shape else kernel.T), state
    )
    nnx.update(head, shaped)
    return head


@pytest.mark.standard_promotion
@pytest.mark.parametrize(("options", "expected"), OPTION_VALUES, ids=OPTION_IDS)
def test_no_option_is_dropped_by_the_head(backend, options, expected):
    """huggingface/trl#6629: the wrapper took the option and the fused path never saw it."""
    if "bias" in options:
        pytest.skip("the head owns its bias")
    head = _head_with(eye(4))
    loss = jax.jit(lambda x, y: head.loss(x, y, implementation=backend.name, **options))(
        f32([1, 2, 3, 4]), i32(0)
    )
    close(loss, expected, 3e-6)


@pytest.mark.standard_promotion
def test_head_settings_reach_loss_and_logits(backend):
    """huggingface/trl#7063: soft cap and bias of the head were honoured by the logits and not by
    the loss."""
    head = _head_with(eye(4), logit_soft_cap=2.0)
    x = f32([1, 2, 3, 4])
    close(head.loss(x, i32(0), implementation=backend.name), 2.076244, 3e-6)
    close(head(x), 2 * np.tanh(x / 2.0), 2e-6)
    biased = LMHead(4, 4, use_bias=True, rngs=nnx.Rngs(0))
    bias = f32(2, 0, 0, 0)
    state = nnx.state(biased, nnx.Param)
    nnx.update(
        biased, jax.tree.map(lambda a: jnp.asarray(bias if a.shape == (4,) else eye(4)), state)
    )
    close(biased.loss(x, i32(0), implementation=backend.name), 1.626523, 3e-6)
    close(biased(x), x + bias, 1e-6)


@pytest.mark.standard_promotion
def test_unknown_keyword_raises():
    """huggingface/trl#5575: a misspelt option went unnoticed."""
    with pytest.raises(TypeError, match="label_smothing"):
        fused_linear_ce(f32([1, 2, 3, 4]), eye(4), i32(0), label_smothing=0.1)
    with pytest.raises(TypeError, match="label_smothing"):
        _head_with(eye(4)).loss(f32([1, 2, 3, 4]), i32(0), label_smothing=0.1)


# --- counting tokens ------------------------------------------------------------------------------

ALL_ON = {
    "label_smoothing": 0.1,
    "z_loss": 0.01,
    "logit_soft_cap": 5.0,
    "class_weights": f32(1, 2, 3, 4, 5),
    "token_scaling": True,
}


@pytest.mark.parametrize(
    ("reduction", "options"),
    [("mean", {}), ("mean", ALL_ON), ("sum", {}), ("none", ALL_ON), ("normalizer", {})],
    ids=["mean", "mean_all_on", "sum", "none_all_on", "normalizer"],
)
@pytest.mark.parametrize("mask", ["ignored", "where", "weights"])
def test_no_counted_token_is_zero_everywhere(backend, mask, reduction, options):
    """linkedin/Liger-Kernel#177, NVIDIA-NeMo/Automodel#3796: 0/0 in the mean destroyed every
    weight."""
    rng = np.random.default_rng(3)
    x, w = rng.normal(size=(4, 3)).astype(np.float32), rng.normal(size=(5, 3)).astype(np.float32)
    x[1] = NAN
    options = dict(options, reduction="mean" if reduction == "normalizer" else reduction)
    if reduction == "normalizer":
        options["normalizer"] = np.float32(8)
    options["bias"], options["weights"] = np.zeros(5, np.float32), np.ones(4, np.float32)
    labels = np.full(4, -100, np.int32) if mask == "ignored" else i32(0, 1, 2, 3)
    if mask == "where":
        options["where"] = np.zeros(4, bool)
    if mask == "weights":
        options["weights"] = np.zeros(4, np.float32)
    loss, grads, metrics = solve(backend, x, w, labels, 1.0, **options)
    np.testing.assert_array_equal(loss, np.zeros(4 if reduction == "none" else ()))
    for name, value in (
        ("x", x),
        ("w", w),
        ("bias", options["bias"]),
        ("weights", options["weights"]),
    ):
        assert grads[name].dtype == value.dtype
        np.testing.assert_array_equal(grads[name], np.zeros_like(value), name)
    assert int(metrics.num_tokens) == 0
    assert float(metrics.accuracy) == 0.0
    np.testing.assert_array_equal(metrics.predictions, np.full(4, -1))
    np.testing.assert_array_equal(metrics.lse, np.zeros(4))


@pytest.mark.parametrize("active", [(1021, 1022, 1023), (0, 1, 2), (511, 512, 513)])
def test_most_blocks_without_a_valid_token(backend, active):
    """unslothai/unsloth#5230, InternLM/xtuner#2079: wholly ignored blocks lost the gradient or made
    0/0."""
    t, h, v = np.arange(1024)[:, None], np.arange(16), np.arange(50)[:, None]
    x, w = np.sin(t + h).astype(np.float32), np.cos(v * h).astype(np.float32)
    labels = np.full(1024, -100, np.int32)
    labels[list(active)] = [1, 2, 3]
    loss, grads, _ = solve(backend, x, w, labels)
    few = x[list(active)]
    truth = oracle.evaluate(few, w, i32(1, 2, 3), w_layout="vh")
    expected = oracle.gradients(few, w, i32(1, 2, 3), w_layout="vh")
    close(loss, truth.loss, 2e-6)
    close(grads["w"], expected.w, 2e-6)
    close(grads["x"][np.array(active)], expected.x, 2e-6)
    others = np.delete(np.asarray(grads["x"]), list(active), axis=0)
    np.testing.assert_array_equal(others, np.zeros_like(others))


@pytest.mark.parametrize("ignore", [-100, -1, 2])
def test_class_weight_of_ignored_labels_is_never_looked_up(backend, ignore):
    """pytorch/pytorch#69339, #25571: `weight[-100]` corrupted the denominator; the mean is a
    weighted one."""
    x, cw = f32([0.2, 0.3, 0.5], [0.5, 0.2, 0.3], [9, 9, 9]), f32(2, 4, 6)
    if ignore == 2:  # the ignore mark is a real class: the first two rows must not carry it
        labels, losses = i32(1, 0, 2), None
    else:
        labels, losses = i32(2, 1, ignore), [5.638986, 4.959324, 0.0]
    common = {"class_weights": cw, "ignore_index": ignore}
    none, _, _ = solve_and_compare(
        backend, x, eye(3), labels, f32(1, 1, 1), reduction="none", **common
    )
    total, _, _ = solve_and_compare(backend, x, eye(3), labels, reduction="sum", **common)
    mean, grads, _ = solve_and_compare(backend, x, eye(3), labels, **common)
    if losses:
        close(none, losses, 3e-6)
        close(total, 10.598311, 3e-6)
        close(mean, 1.059831, 1e-6)
    np.testing.assert_array_equal(grads["x"][2], np.zeros(3))


@pytest.mark.parametrize("tokens", [4096, 4097])
def test_mean_does_not_depend_on_the_number_of_blocks(backend, tokens):
    """NVIDIA-NeMo/Automodel#3803: per-chunk means were added up; unreduced losses came back
    chunk-sized."""
    x = np.sin(np.arange(tokens * 2.0)).reshape(tokens, 2).astype(np.float32)
    w, labels = np.zeros((8, 2), np.float32), (np.arange(tokens) % 8).astype(np.int32)
    mean, grads, _ = solve(backend, x, w, labels)
    close(mean, 2.079442, 1e-6)
    close(grads["w"], oracle.gradients(x, w, labels, w_layout="vh").w, 1e-6)
    none, _, _ = solve(backend, x, w, labels, reduction="none")
    assert none.shape == (tokens,)
    close(none, np.full(tokens, np.log(8)), 5e-7)


def test_gradient_accumulation_with_unequal_counts(backend):
    """huggingface/transformers#34191, unslothai/unsloth#8261: a mean of means, or normalised
    twice."""
    rows = np.zeros((4, 4), np.float32)
    rows[3, 3] = np.log(5)
    labels = i32(0, 0, 0, 0)
    whole, expected, metrics = solve_and_compare(backend, rows, eye(4), labels)
    close(whole, 1.559581, 2e-6)
    assert int(metrics.num_tokens) == 4
    for options, divisor in (({"normalizer": np.float32(4)}, 1.0), ({"reduction": "sum"}, 4.0)):
        total, counted = 0.0, 0
        dw, dx = np.zeros((4, 4)), []
        for part in (slice(0, 3), slice(3, 4)):
            loss, grads, metrics = solve(
                backend, rows[part], eye(4), labels[part], 1 / divisor, **options
            )
            total += float(loss) / divisor
            dw += np.asarray(grads["w"])
            dx.append(np.asarray(grads["x"]))
            counted += int(metrics.num_tokens)
        assert counted == 4
        close(total, 1.559581, 2e-6)
        close(dw, expected["w"], 1e-6)
        close(np.concatenate(dx), expected["x"], 1e-6)


def test_mask_acts_on_numerator_and_denominator(backend):
    """alibaba/ROLL#444, ServiceNow/Fast-LLM#344: masked tokens in one of the two sums only."""
    x, labels = f32([0, 0], [9, 0], [0, 0], [-9, 0]), i32(0, 0, 0, 0)
    mask = np.array([True, False, True, False])
    twice = i32(0, -100, 0, 0)  # token 1 is masked and ignored: excluded once
    masks = [
        (labels, {"where": mask}),
        (labels, {"where": mask.astype(np.int32)}),
        (labels, {"weights": mask.astype(np.float32)}),
        (twice, {"where": mask}),
        (twice, {"where": mask, "weights": mask.astype(np.float32)}),
    ]
    for y, options in masks:
        loss, grads, metrics = solve_and_compare(backend, x, eye(2), y, **options)
        close(loss, 0.693147, 1e-6)
        assert int(metrics.num_tokens) == 2
        np.testing.assert_array_equal(grads["x"][1::2], np.zeros((2, 2)))
    weighted, _, _ = solve_and_compare(backend, x, eye(2), labels, weights=f32(0.5, 0, 2, 0))
    close(weighted, 0.693147, 1e-6)


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("mask", ["ignored", "where", "weights"])
def test_poisoned_masked_rows_do_not_spread(backend, mask, poison):
    """NVIDIA-NeMo/Megatron-Bridge#3117, jax-ml/jax#26328: 0 * NaN reached the loss or the weight
    gradient."""
    tokens = 300  # the first 299 are masked: whole blocks of them
    x = np.full((tokens, 2), poison, np.float32)
    x[-1] = [1, 0]
    labels, keep = np.zeros(tokens, np.int32), np.arange(tokens) == tokens - 1
    options = {"weights": np.ones(tokens, np.float32), "bias": np.zeros(2, np.float32)}
    if mask == "ignored":
        labels = np.where(keep, 0, -100).astype(np.int32)
    elif mask == "where":
        options["where"] = keep
    else:
        options["weights"] = keep.astype(np.float32)
    for reduction in ("mean", "none"):
        loss, grads, _ = solve(
            backend,
            x,
            eye(2),
            labels,
            1.0,
            reduction=reduction,
            z_loss=0.01,
            label_smoothing=0.1,
            **options,
        )
        row = f32([1, 0])
        alone = {"z_loss": 0.01, "label_smoothing": 0.1, "w_layout": "vh"}
        close(np.sum(loss), oracle.evaluate(row, eye(2), i32(0), **alone).loss, 1e-6)
        expected = oracle.gradients(row, eye(2), i32(0), **alone)
        close(grads["w"], expected.w, 1e-6)
        close(grads["x"][-1:], expected.x, 1e-6)
        close(grads["bias"], expected.bias, 1e-6)
        np.testing.assert_array_equal(grads["x"][:-1], np.zeros((tokens - 1, 2)))
        np.testing.assert_array_equal(grads["weights"][:-1], np.zeros(tokens - 1))


def test_poisoned_active_row_shows(backend):
    """The other side of NVIDIA-NeMo/Megatron-Bridge#3117: a NaN in a counted row must not be
    hidden."""
    x = f32([1, 0], [NAN, NAN])
    loss, grads, _ = solve(backend, x, eye(2), i32(0, 0), reduction="none")
    close(loss[0], 0.313262, 1e-6)
    assert np.isnan(loss[1])
    assert np.all(np.isnan(grads["x"][1]))
    assert np.all(np.isnan(grads["w"]))
    assert np.isnan(solve(backend, x, eye(2), i32(0, 0))[0])


# --- precision ------------------------------------------------------------------------------------


def test_bfloat16_loss_is_not_quantised(backend):
    """google-deepmind/optax#1020: bfloat16 logits or losses moved in steps of 1/32."""
    backend.require("bfloat16")
    z = (np.arange(100) / 100).astype(jnp.bfloat16)
    loss, _, _ = solve(backend, z[None], eye(100, jnp.bfloat16), i32(0))
    assert loss.dtype == jnp.float32
    close(loss, 5.141493, 1e-5)


def test_forward_and_backward_use_the_same_logits(backend):
    """marin-community/marin#8217: logits were rounded in the forward and not in the
    recomputation."""
    backend.require("bfloat16")
    x, w = f32([1, 1]).astype(jnp.bfloat16), f32([160, 0.25], [160, -0.25]).astype(jnp.bfloat16)
    loss, grads, _ = solve(backend, x, w, i32(0), bias=np.zeros(2, np.float32))
    close(loss, 0.474077, 2e-6)
    close(grads["bias"], [-0.377541, 0.377541], 5e-6)
    close(np.sum(np.asarray(grads["bias"], np.float64)), 0.0, 1e-6)


@pytest.mark.parametrize("offset", [1.0, 1e4, 1e6, 1e8, -1e8])
def test_large_common_offset_keeps_loss_and_gradient(backend, offset):
    """ml-explore/mlx#4188, google-deepmind/optax#1792: `lse - z_y` at full magnitude rounded to
    0."""
    x, w = f32([1]), np.full((2, 1), offset, np.float32)
    loss, grads, _ = solve(backend, x, w, i32(0))
    close(loss, 0.693147, 1e-6)
    close(grads["w"][:, 0], [-0.5, 0.5], 1e-6)


@pytest.mark.parametrize("offset", [0.0, 1e4, 1e6, -1e6])
def test_offset_logits_with_different_classes(backend, offset):
    """pytorch/pytorch#11752: the same cancellation with unequal logits; a log-probability is never
    positive."""
    bias = f32(offset + 2, offset - 1)
    x, w = np.zeros((2, 16), np.float32), np.zeros((2, 16), np.float32)
    loss, grads, _ = solve(backend, x, w, i32(0, 1), 1.0, bias=bias, reduction="none")
    close(loss, [0.048587, 3.048587], 1e-6)
    close(grads["bias"], [2 * 0.952574 - 1, 2 * 0.047426 - 1], 2e-6)


def test_confident_prediction_keeps_its_gradient(backend):
    """fla-org/flash-linear-attention#1231, NVIDIA/TransformerEngine#2325: p was rounded before
    subtracting 1."""
    backend.require("bfloat16")
    x, w = f32([8, 0]).astype(jnp.bfloat16), eye(2, jnp.bfloat16)
    loss, grads, _ = solve(backend, x, w, i32(0), reduction="sum", bias=np.zeros(2, np.float32))
    close(loss, 3.35406e-4, 0, 1e-3)
    close(grads["bias"], [-3.35350e-4, 3.35350e-4], 0, 1e-3)
    close(grads["x"], [[-3.35350e-4, 3.35350e-4]], 0, 5e-3)
    close(grads["w"], [[8 * -3.35350e-4, 0], [8 * 3.35350e-4, 0]], 0, 5e-3)


@pytest.mark.parametrize("gap", [4.0, 8.0, 16.0, 20.0, 60.0])
@pytest.mark.parametrize("label", [0, 70])
def test_confident_prediction_is_exact_in_float32(backend, label, gap):
    """fla-org/flash-linear-attention#1231, the kind: 1 + s rounds s away, as p - 1 does."""
    bias = np.zeros(80, np.float32)
    bias[label] = gap
    x, w = np.zeros((1, 3), np.float32), np.zeros((80, 3), np.float32)
    loss, grads, _ = solve(backend, x, w, i32(label), bias=bias)
    others = 79 * np.exp(-gap)
    close(loss, np.log1p(others), 0, 1e-5)
    close(grads["bias"][label], -others / (1 + others), 0, 1e-5)
    close(grads["bias"][40], np.exp(-gap) / (1 + others), 0, 1e-5)


def test_confident_prediction_in_a_large_vocabulary(backend):
    """linkedin/Liger-Kernel#1419: the label's gradient vanished and rows no longer summed to 0."""
    backend.require("bfloat16")
    x, w = np.zeros((1, 16)), np.zeros((1024, 16))
    x[0, 0], w[5, 0] = 12, 1
    x, w = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
    loss, grads, _ = solve(backend, x, w, i32(5), bias=np.zeros(1024, np.float32), reduction="sum")
    miss = 1023 * np.exp(-12.0) / (1 + 1023 * np.exp(-12.0))
    close(loss, -np.log1p(-miss), 0, 1e-5)
    close(grads["bias"][5], -miss, 0, 1e-4)
    close(np.sum(np.asarray(grads["bias"], np.float64)), 0.0, 1e-6)
    close(grads["w"][5, 0], -12 * miss, 0, 5e-3)


def test_weight_gradient_is_accumulated_in_float32(backend):
    """axolotl-ai-cloud/axolotl#1601, allenai/OLMo-core#370: a running bfloat16 sum over token
    blocks."""
    backend.require("bfloat16")
    x = np.full((16384, 1), 0.333984375).astype(jnp.bfloat16)
    w, labels = np.zeros((2, 1)).astype(jnp.bfloat16), np.zeros(16384, np.int32)
    results = _by_tiling(backend, lambda: solve(backend, x, w, labels, reduction="sum"))
    for name, (_, grads, _) in results.items():
        assert grads["w"].dtype == jnp.bfloat16
        got = np.asarray(grads["w"]).astype(np.float32)
        np.testing.assert_array_equal(got, [[-2736], [2736]], name)


def test_half_precision_gradient_does_not_underflow(backend):
    """NVIDIA/Megatron-LM#1750, the kind: a factor small beside the half range must not zero the
    gradient."""
    backend.require("float16")
    tokens, scale = 64, 2.0**-30
    rng = np.random.default_rng(5)
    x, w = (
        rng.normal(size=(tokens, 8)).astype(np.float32),
        rng.normal(size=(11, 8)).astype(np.float32),
    )
    labels = rng.integers(0, 11, tokens).astype(np.int32)
    options = {"compute_dtype": "float16", "reduction": "sum"}
    _, small, _ = solve(backend, x, w, labels, scale, **options)
    _, unit, _ = solve(backend, x, w, labels, 1.0, **options)
    for name in ("x", "w"):
        largest = float(np.max(np.abs(unit[name])))
        close(np.asarray(small[name], np.float64) / scale, unit[name], 2e-3 * largest, name=name)


# --- labels ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("label", "ignore"),
    [(128, -100), (200, -100), (-1, -100), (-100, -1), (-129, -100), (2**31 - 1, -100)],
)
def test_label_outside_the_vocabulary_is_loud(backend, label, ignore):
    """google-deepmind/optax#1185, tensorflow/tensorflow#8484: a wrapped or clipped class, a
    plausible loss."""
    x = np.broadcast_to(np.arange(128) / 16, (3, 128)).astype(np.float32)
    labels = i32(7, label, 100)
    options = {"reduction": "none", "ignore_index": ignore}
    loss, grads, _ = solve(backend, x, eye(128), labels, f32(1, 1, 1), **options)
    good = [0, 2]
    truth = oracle.evaluate(x[good], eye(128), labels[good], reduction="none")
    close(np.asarray(loss)[good], truth.loss, 2e-6)
    assert np.isnan(loss[1])
    assert np.all(np.isnan(grads["x"][1]))
    assert np.all(np.isfinite(np.asarray(grads["x"])[good]))
    _, grads, _ = solve(backend, x, eye(128), labels, f32(1, 0, 1), **options)
    expected = oracle.gradients(
        x[good], eye(128), labels[good], f32(1, 1), reduction="none", w_layout="vh"
    )
    close(grads["w"], expected.w, 2e-6)
    for reduction in ("mean", "sum"):
        for extra in ({}, {"class_weights": np.ones(128, np.float32)}, {"token_scaling": True}):
            total, _, _ = solve(
                backend, x, eye(128), labels, reduction=reduction, ignore_index=ignore, **extra
            )
            assert np.isnan(total)


# --- degenerate shapes ----------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [(0,), (0, 3), (2, 0)])
def test_no_tokens(backend, batch):
    """linkedin/Liger-Kernel#1289, jax-ml/jax#19350: a division by zero in block-size arithmetic."""
    x, w = np.zeros((*batch, 8), np.float32), np.ones((5, 8), np.float32)
    labels = np.zeros(batch, np.int32)
    for reduction, shape in (("none", batch), ("sum", ()), ("mean", ())):
        loss, grads, metrics = solve(
            backend, x, w, labels, reduction=reduction, bias=np.zeros(5, np.float32)
        )
        np.testing.assert_array_equal(loss, np.zeros(shape))
        np.testing.assert_array_equal(grads["x"], np.zeros_like(x))
        np.testing.assert_array_equal(grads["w"], np.zeros_like(w))
        np.testing.assert_array_equal(grads["bias"], np.zeros(5))
        assert int(metrics.num_tokens) == 0


@pytest.mark.parametrize("layout", ["hv", "vh"])
def test_empty_vocabulary_names_the_weight(backend, layout):
    """linkedin/Liger-Kernel#767: an empty (not yet gathered) weight failed deep inside."""
    w = np.zeros((8, 0) if layout == "hv" else (0, 8), np.float32)
    with pytest.raises(ValueError, match=r"\bw\b"):
        fused_linear_ce(
            np.zeros((3, 8), np.float32),
            w,
            i32(0, 0, 0),
            w_layout=layout,
            implementation=backend.name,
        )


def test_next_to_nothing(backend):
    """triton-lang/triton#3709: dimensions below the smallest tile did not compile."""
    loss, grads, _ = solve_and_compare(
        backend, f32([1, -1]), f32([1, 0], [0, 1], [1, 1]), i32(2), bias=np.zeros(3, np.float32)
    )
    close(loss, 1.407606, 1e-6)
    close(grads["bias"], [0.665241, 0.090031, -0.755272], 1e-6)
    loss, grads, _ = solve(backend, f32([3, -1], [2, 2]), f32([1, 0.5]), i32(0, 0))
    assert float(loss) == 0.0
    np.testing.assert_array_equal(grads["x"], np.zeros((2, 2)))
    np.testing.assert_array_equal(grads["w"], np.zeros((1, 2)))


def test_several_grids_in_one_process(backend):
    """jax-ml/jax#40847: a kernel traced for one grid was reused for another, and "last tile" fired
    early."""
    rng = np.random.default_rng(11)
    for tokens, vocab in [
        (32, 64),
        (80, 64),
        (48, 64),
        (32, 160),
        (32, 96),
        (32, 64),
        (300, 500),
    ]:
        x = rng.normal(size=(tokens, 16)).astype(np.float32)
        w = rng.normal(size=(vocab, 16)).astype(np.float32)
        labels = rng.integers(0, vocab, tokens).astype(np.int32)
        solve_and_compare(
            backend, x, w, labels, rng.normal(size=tokens).astype(np.float32), reduction="none"
        )


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
