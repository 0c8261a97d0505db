"""`fused_linear_logprob`: numbers known exactly, and the cases of entropy and temperature."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from logprob_truth import (
    INF,
    OUTPUTS,
    close,
    eye,
    f32,
    i32,
    solve,
    solve_and_compare,
)

from pallas_loss import fused_linear_logprob


@pytest.mark.parametrize("backward", ["recompute", "stored"])
def test_entropy_has_a_gradient(backend, backward):
    """huggingface/trl#6625: the cotangent of the entropy was accepted and never used."""
    p = np.exp(np.array([2.0, 0.0, -1.0]))
    p /= p.sum()
    d_entropy = np.array([-0.299058, 0.187917, 0.111141])
    d_logprob = np.array([1.0, 0.0, 0.0]) - p
    atol = 1e-6 if backward == "recompute" else 2e-3
    for factors, right in (
        ((0, 1, 0), d_entropy),
        ((1, 0.3, 0), d_logprob + 0.3 * d_entropy),
        ((1, 0, 0), d_logprob),
        ((0, 0, 1), p),
    ):
        given = dict(zip(OUTPUTS, factors, strict=True))
        out, grads = solve(backend.name, f32([2, 0, -1]), eye(3), i32(0), given, backward=backward)
        close(out.entropy, [0.524267], 1e-6)
        close(out.logprob, np.log(p[:1]), 1e-6)
        close(grads["x"], [right], atol)


@pytest.mark.parametrize("several", [False, True], ids=["one", "candidates"])
def test_entropy_with_a_removed_vocabulary(backend, several):
    """NovaSky-AI/SkyRL#2259, huggingface/trl#7221: 0 * -inf made the entropy NaN."""
    zeros = np.zeros((2, 4), np.float32), np.zeros((3, 4), np.float32)
    labels = i32([0, 0], [2, 0]) if several else i32(0, 2)
    out, grads = solve_and_compare(backend, *zeros, labels, {"entropy": 1.0}, bias=f32(0, -INF, 1))
    close(out.entropy, [0.582203, 0.582203], 1e-6)
    close(out.logprob[0], -1.313262, 1e-6)
    close(grads["bias"], [2 * 0.196612, 0, -2 * 0.196612], 1e-6)
    assert float(grads["bias"][1]) == 0.0


def test_a_removed_label(backend):
    """Its log-probability is -inf; entropy and lse of its token keep value and gradient."""
    x, w = f32([1, 2], [3, -1]), f32([0.5, 1], [1, 0], [0, 1])
    options = {"bias": f32(0, -INF, 1), "temperature": np.float32(0.7)}
    given = {"logprob": f32(0, 1), "entropy": f32(1, -1), "lse": f32(2, 1)}
    out, grads = solve_and_compare(backend, x, w, i32(1, 2), given, atol=3e-6, **options)
    assert out.logprob[0] == -INF
    assert all(np.all(np.isfinite(g)) for g in grads.values())


@pytest.mark.parametrize("kind", ["static", "traced", "per token"])
def test_temperature_divides_logits_and_gradient(backend, kind):
    """ServiceNow/Fast-LLM#228, huggingface/trl#4159: divided after the softmax, or only once."""
    t = {"static": 0.5, "traced": np.float32(0.5), "per token": f32(0.5, 0.5)}[kind]
    rows = f32([1, 2, 4], [1, 2, 4])
    out, grads = solve_and_compare(
        backend, rows, eye(3), i32(0, 0), {"logprob": -1.0}, temperature=t
    )
    close(out.logprob, [-6.020581] * 2)
    close(grads["x"], [[-1.995143, 0.035885, 1.959258]] * 2)


def test_tiny_temperature_with_half_precision_input(backend):
    """vllm-project/vllm#22180: the half precision quotient overflowed to inf, then NaN."""
    backend.require("float16")
    x = f32([1, 2, 4], [4, 2, 1]).astype(np.float16)
    t = f32(1e-5, 1.0)
    out, grads = solve(backend.name, x, eye(3, np.float16), i32(0, 0), temperature=t)
    close(out.logprob, [-3e5, -np.log(1 + np.exp(-2) + np.exp(-3))], 1e-6, 1e-6)
    close(out.entropy[0], 0)
    assert np.all(np.isfinite(grads["temperature"]))


def test_soft_cap_formula_and_saturation(backend):
    """unslothai/unsloth-zoo#593: `z*tanh(z/c)`; another tanh gave NaN for large logits."""
    x = f32([124, 0, -124], [1e5, 0, -1e5])
    out, grads = solve(backend.name, x, eye(3), i32(2, 2), {"logprob": -1.0}, logit_soft_cap=30.0)
    close(out.logprob, [-59.969175, -60.0], 1e-5)
    close(grads["x"][0], [1.0267e-3, 0, -1.0267e-3], 1e-10, 1e-3)
    close(grads["x"][1], np.zeros(3), 1e-12)


@pytest.mark.parametrize(("vocab", "cap"), [(129, None), (1000, 30.0), (32001, 1.0)])
def test_no_phantom_columns_past_the_vocabulary(backend, vocab, cap):
    """verl-project/verl#2656, unslothai/unsloth#10616: rows past V added to the sum."""
    x, w = np.ones((3, 16), np.float32), np.full((vocab, 16), -2.5, np.float32)
    labels = i32(0, vocab - 1, vocab // 2)
    bias, options = np.zeros(vocab, np.float32), {"logit_soft_cap": cap, "w_layout": "vh"}
    out, grads = solve(
        backend.name, x, w, labels, {"logprob": 1, "entropy": 1}, bias=bias, **options
    )
    close(out.logprob, np.full(3, -np.log(vocab)), 4e-6)
    close(out.entropy, np.full(3, np.log(vocab)), 4e-6)
    slope = 1.0 if cap is None else 1 - np.tanh(40.0 / cap) ** 2
    expected = np.full(vocab, -3.0 / vocab)
    np.add.at(expected, labels, 1.0)
    close(grads["bias"], slope * expected, 1e-6)


@pytest.mark.parametrize("label", [0, 1023])
def test_bias_enters_the_label_logit_once(backend, label):
    """apple/ml-cross-entropy#52: the bias was added once per tile; log-probabilities above 0."""
    bias = np.zeros(1024, np.float32)
    bias[label] = 3
    x, w = np.zeros((1, 16), np.float32), np.zeros((1024, 16), np.float32)
    for labels in (i32(label), i32([label, 5])):
        out, _ = solve_and_compare(backend, x, w, labels, bias=bias)
        close(out.logprob.reshape(-1)[0], -3.949938, 2e-6)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, -3.440190),
        ({"logit_soft_cap": 2.0}, -2.076244),
        ({"bias": f32(2, 0, 0, 0)}, -1.626523),
        ({"logit_scale": 0.5}, -2.287339),
        ({"temperature": 2.0}, -2.287339),
        ({"where": np.array([False])}, 0.0),
        ({"ignore_index": 0}, 0.0),
    ],
    ids=lambda v: "+".join(v) or "none" if isinstance(v, dict) else "",
)
def test_no_option_is_dropped(backend, options, expected):
    """linkedin/Liger-Kernel#243: accepted, ignored, another objective trained."""
    out, _ = solve_and_compare(backend, f32([1, 2, 3, 4]), eye(4), i32(0), atol=3e-6, **options)
    close(out.logprob, [expected], 3e-6)


@pytest.mark.parametrize("offset", [1.0, 1e4, 1e8, -1e8])
def test_large_common_offset_keeps_everything(backend, offset):
    """ml-explore/mlx#4188: the difference at full magnitude rounded to 0."""
    x, w = f32([1]), np.full((2, 1), offset, np.float32)
    out, grads = solve(backend.name, x, w, i32(0), {"logprob": 1, "entropy": 1}, w_layout="vh")
    close(out.logprob, [-0.693147], 1e-6)
    close(out.entropy, [0.693147], 1e-6)
    close(grads["w"][:, 0], [0.5, -0.5], 1e-6)


def test_a_confident_token_keeps_its_entropy(backend):
    """fla-org/flash-linear-attention#1231, the kind: 1 + s rounds a small s away."""
    bias = f32(*([20.0] + [0.0] * 79))
    x, w = np.zeros((1, 3), np.float32), np.zeros((80, 3), np.float32)
    out, grads = solve(backend.name, x, w, i32(0), {"entropy": 1.0}, bias=bias, w_layout="vh")
    p = np.exp(-20.0) / (1 + 79 * np.exp(-20.0))
    entropy = 79 * p * 20 + np.log1p(79 * np.exp(-20.0))
    close(out.entropy, [entropy], 0, 1e-5)
    close(out.logprob, [-np.log1p(79 * np.exp(-20.0))], 0, 1e-5)
    close(grads["bias"][1:], np.full(79, p * (20 - entropy)), 0, 1e-5)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_candidates_give_a_divergence_and_its_gradient(backend, temperature):
    """huggingface/trl#4935, modelscope/twinkle#112: KL(student || teacher) over all classes as
    candidates; the other direction is 0.433781 and 0.120115."""
    teacher = np.log(0.5)

    def divergence(x):
        out = fused_linear_logprob(
            x,
            jnp.eye(2),
            jnp.array([[0, 1]] * 3),
            temperature=jnp.float32(temperature),
            implementation=backend.name,
        )
        return jnp.mean(jnp.sum(jnp.exp(out.logprob) * (out.logprob - teacher), axis=1))

    value, dx = jax.jit(jax.value_and_grad(divergence))(jnp.array([[2.0, 0.0]] * 3))
    close(value, {1.0: 0.327813, 2.0: 0.110944}[temperature], 1e-6)
    right = {1.0: 0.209987, 2.0: 0.098306}[temperature]
    close(dx, np.array([[right, -right]] * 3) / 3, 1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_log_probability_is_positive(backend, dtype):
    """Nor is a candidate's, whose logit is a product of its own."""
    backend.require(dtype)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 96)).astype(jnp.dtype(dtype))
    w = (3 * rng.normal(size=(96, 300))).astype(jnp.dtype(dtype))
    best = np.argmax(x.astype(np.float32) @ w.astype(np.float32), axis=1).astype(np.int32)
    call = functools.partial(fused_linear_logprob, entropy=True, implementation=backend.name)
    for labels in (best, best[:, None]):
        out = jax.jit(call)(x, w, labels)
        assert np.max(out.logprob) <= 0
        assert np.min(out.entropy) >= 0
