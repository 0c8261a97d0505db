"""Faults that users of such losses have met in public projects, each as the smallest input that
shows it: options, and which tokens count.

The docstring of each test names where the fault was met. Unless a test says otherwise: float32,
tolerance 1e-5 absolute, value and gradients; weights are written `[V, H]` (row v is class v).
"""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from ce_solved import INF, NAN, close, eye, f32, i32, solve, solve_and_compare
from flax import nnx

from pallas_loss import fused_linear_ce
from pallas_loss.nnx import LMHead

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
