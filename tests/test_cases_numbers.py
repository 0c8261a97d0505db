"""Faults that users of such losses have met in public projects, each as the smallest input that
shows it: precision, labels, degenerate shapes.

The docstring of each test names where the fault was met. Unless a test says otherwise: float32,
tolerance 1e-5 absolute, value and gradients; weights are written `[V, H]` (row v is class v).
"""

import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from ce_solved import by_tiling, close, eye, f32, i32, solve, solve_and_compare

from pallas_loss import fused_linear_ce

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
    results = by_tiling(backend, lambda: solve(backend, x, w, labels, reduction="sum"))
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
