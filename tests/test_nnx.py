"""The Flax head: the functional loss with a weight, bias, cap and dtype of its own; its labels."""

import importlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pallas_loss import fused_linear_ce, fused_linear_logprob
from pallas_loss.nnx import LMHead, next_token_labels

T, H, V = 6, 8, 13


@pytest.fixture
def x():
    return jax.random.normal(jax.random.key(0), (T, H))


@pytest.fixture
def labels():
    return jnp.array([0, 12, -100, 5, 5, 7])


@pytest.fixture(params=["untied", "tied"])
def head(request):
    """A head with everything it can own: bias, soft cap, and a weight or a table."""
    embed = nnx.Embed(V, H, rngs=nnx.Rngs(1)) if request.param == "tied" else None
    head = LMHead(H, V, tie_to=embed, use_bias=True, logit_soft_cap=2.0, rngs=nnx.Rngs(2))
    head.bias[...] = jnp.linspace(-1, 1, V)
    return head


def weight_hv(head):
    return head.weight if head.w_layout == "hv" else head.weight.T


def assert_close(got, expected, atol=1e-6):
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=0, atol=atol)


# --- logits ---


def test_logits_are_capped_affine(head, x):
    affine = np.asarray(x) @ np.asarray(weight_hv(head)) + np.linspace(-1, 1, V)
    assert_close(head(x), 2 * np.tanh(affine / 2), 2e-6)
    assert_close(head(x.reshape(2, 3, H)), np.asarray(head(x)).reshape(2, 3, V), 0)


def test_loss_is_the_cross_entropy_of_the_logits(head, x, labels):
    def of_logits(x):
        log_p = jax.nn.log_softmax(head(x))
        picked = jnp.take_along_axis(log_p, jnp.maximum(labels, 0)[:, None], axis=1)[:, 0]
        return -jnp.sum(picked, where=labels != -100) / 5

    value, dx = jax.value_and_grad(of_logits)(x)
    fused, fused_dx = jax.value_and_grad(lambda x: head.loss(x, labels))(x)
    assert_close(fused, value)
    assert_close(fused_dx, dx)


def test_logits_and_loss_multiply_in_the_head_dtype(x, labels):
    head = LMHead(H, V, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    rounded = [a.astype(jnp.bfloat16).astype(jnp.float32) for a in (x, head.weight)]
    logits = head(x)
    assert logits.dtype == jnp.float32
    assert_close(logits, rounded[0] @ rounded[1])

    graph, params = nnx.split(head)
    loss, dw = jax.value_and_grad(lambda p: nnx.merge(graph, p).loss(x, labels))(params)
    expected = fused_linear_ce(x, head.weight, labels, compute_dtype=jnp.bfloat16)
    assert loss == expected
    dw = dw["kernel"][...]
    assert dw.dtype == jnp.float32
    assert jnp.any(dw != dw.astype(jnp.bfloat16).astype(jnp.float32)), "dw was rounded to bfloat16"


def test_parameters_have_the_parameter_dtype():
    head = LMHead(H, V, use_bias=True, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert head.kernel.dtype == head.bias.dtype == jnp.bfloat16


# --- options of the loss ---

OPTIONS = {
    "where": {"where": jnp.array([True, False, True, True, True, False])},
    "weights": {"weights": jnp.array([1.0, 2.0, 3.0, 0.0, 0.5, 1.0])},
    "class_weights": {"class_weights": jnp.linspace(0.5, 2.0, V)},
    "ignore_index": {"ignore_index": 5},
    "label_smoothing": {"label_smoothing": 0.1},
    "z_loss": {"z_loss": 0.01},
    "logit_scale": {"logit_scale": 0.5},
    "temperature": {"temperature": 0.7},
    "token_scaling": {"token_scaling": True},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "normalizer": {"normalizer": 17.0},
    "return_metrics": {"return_metrics": True},
    "implementation": {"implementation": "reference"},
    # The head's own, overridden.
    "bias": {"bias": jnp.linspace(0, 3, V)},
    "logit_soft_cap": {"logit_soft_cap": None},
    "compute_dtype": {"compute_dtype": jnp.bfloat16},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_option_reaches_the_loss(head, x, labels, options):
    labels = jnp.maximum(labels, 0) if "ignore_index" in options else labels
    own = {"bias": head.bias[...], "logit_soft_cap": 2.0, "w_layout": head.w_layout}
    got = head.loss(x, labels, **options)
    expected = fused_linear_ce(x, head.weight, labels, **own | options)
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    if not options.keys() & {"return_metrics", "implementation"}:
        assert not np.array_equal(got, head.loss(x, labels)), "the option changes nothing"


@pytest.mark.parametrize("options", [{"w_layout": "hv"}, {"label_smoothin": 0.1}])
def test_a_keyword_that_is_not_an_option_raises(head, x, labels, options):
    with pytest.raises(TypeError, match=next(iter(options))):
        head.loss(x, labels, **options)


# --- log-probabilities ---


def test_logprob_is_that_of_the_tempered_logits(head, x, labels):
    """Value and gradient of all three outputs, each with a cotangent per token."""
    g = jax.random.normal(jax.random.key(1), (3, T))
    counted = labels != -100

    def of_logits(x):
        log_p = jax.nn.log_softmax(head(x) / 0.7)
        picked = jnp.take_along_axis(log_p, jnp.maximum(labels, 0)[:, None], axis=1)[:, 0]
        entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=1)
        return [
            jnp.where(counted, v, 0) for v in (picked, entropy, jax.nn.logsumexp(head(x) / 0.7, 1))
        ]

    def weighed(outputs):
        return sum(jnp.sum(a * v) for a, v in zip(g, outputs, strict=True)), outputs

    def of_head(x):
        return weighed(head.logprob(x, labels, temperature=0.7, entropy=True))

    (_, out), dx = jax.value_and_grad(of_head, has_aux=True)(x)
    (_, expected), expected_dx = jax.value_and_grad(lambda x: weighed(of_logits(x)), has_aux=True)(
        x
    )
    for got, right in zip(out, expected, strict=True):
        assert_close(got, right, 2e-6)
    assert_close(dx, expected_dx, 3e-6)
    assert head.logprob(x, labels).entropy is None


LOGPROB_OPTIONS = {
    **{n: OPTIONS[n] for n in ("where", "ignore_index", "logit_scale", "temperature")},
    **{n: OPTIONS[n] for n in ("implementation", "bias", "logit_soft_cap", "compute_dtype")},
    "temperatures": {"temperature": jnp.linspace(0.5, 2, T)},
    "entropy": {"entropy": True},
    "backward": {"backward": "stored"},
}


@pytest.mark.parametrize("options", LOGPROB_OPTIONS.values(), ids=LOGPROB_OPTIONS)
def test_every_option_reaches_the_log_probabilities(head, x, labels, options):
    labels = jnp.maximum(labels, 0) if "ignore_index" in options else labels
    own = {"bias": head.bias[...], "logit_soft_cap": 2.0, "w_layout": head.w_layout}
    got = head.logprob(x, labels, **options)
    expected = fused_linear_logprob(x, head.weight, labels, **own | options)
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    if not options.keys() & {"entropy", "backward", "implementation"}:
        assert not np.array_equal(got.logprob, head.logprob(x, labels).logprob), "changes nothing"


@pytest.mark.parametrize("options", [{"w_layout": "hv"}, {"label_smoothing": 0.1}])
def test_a_keyword_that_is_not_an_option_of_logprob_raises(head, x, labels, options):
    with pytest.raises(TypeError, match=next(iter(options))):
        head.logprob(x, labels, **options)


def test_logprob_of_candidates_and_gradient_of_the_parameters():
    """K ids a token; a tied table gets the gradient, in its own dtype."""
    embed = nnx.Embed(V, H, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(1))
    head = LMHead(H, V, tie_to=embed, rngs=nnx.Rngs(2))
    x = jax.random.normal(jax.random.key(0), (2, 3, H), jnp.bfloat16)
    labels = jnp.arange(12).reshape(2, 3, 2)
    out = head.logprob(x, labels)
    log_p = jax.nn.log_softmax(head(x))
    assert out.lse.shape == (2, 3)
    assert_close(out.logprob, np.take_along_axis(np.asarray(log_p), np.asarray(labels), 2), 2e-6)
    gradient = nnx.grad(lambda head: jnp.sum(head.logprob(x, labels).logprob))(head)
    (table,) = jax.tree.leaves(gradient)
    assert (table.shape, table.dtype) == ((V, H), jnp.bfloat16)
    assert jnp.any(table != 0)


# --- tying ---

TABLE = jnp.array(
    [[0.1, 0.2, 0.3], [0.4, -0.5, 0.6], [-0.7, 0.8, 0.9], [0.2, 0.0, -0.1], [0.5, 0.5, 0.5]]
)


class Tied(nnx.Module):
    """The smallest language model: a token's own row is its hidden state."""

    def __init__(self):
        self.embed = nnx.Embed(5, 3, rngs=nnx.Rngs(0))
        self.embed.embedding[...] = TABLE
        self.head = LMHead(3, 5, tie_to=self.embed, rngs=nnx.Rngs(1))

    def loss(self, tokens, labels):
        return self.head.loss(self.embed(tokens), labels)


def test_tied_head_sums_the_gradients_of_both_uses():
    graph, params = nnx.split(Tied())
    assert [p.shape for p in jax.tree.leaves(params)] == [(5, 3)]

    ids, labels = jnp.array([0, 1, 2]), jnp.array([1, 2, 3])
    loss, gradient = jax.jit(jax.value_and_grad(lambda p: nnx.merge(graph, p).loss(ids, labels)))(
        params
    )
    assert_close(loss, 2.125325)
    gradient = gradient["embed"]["embedding"][...]
    assert_close(gradient[0], [-0.108304, 0.264874, 0.049714])
    assert_close(gradient[3], [0.244002, -0.263975, -0.231693])

    def head_alone(params):
        model = nnx.merge(graph, params)
        return model.head.loss(jax.lax.stop_gradient(model.embed(ids)), labels)

    gradient = jax.grad(head_alone)(params)["embed"]["embedding"][...]
    assert_close(gradient[0], [0.001031, 0.016243, 0.090649])


def test_tie_survives_split_merge_and_flax_transforms():
    model = nnx.merge(*nnx.split(Tied()))
    model.embed.embedding[...] = 2 * TABLE
    assert_close(model.head.weight, 2 * TABLE, 0)

    loss = nnx.jit(lambda m: m.loss(jnp.array([0, 1]), jnp.array([1, 2])))
    gradient = nnx.grad(lambda m: m.loss(jnp.array([0, 1]), jnp.array([1, 2])))(model)
    assert_close(loss(model), model.loss(jnp.array([0, 1]), jnp.array([1, 2])))
    assert [g.shape for g in jax.tree.leaves(gradient)] == [(5, 3)]


def test_tied_head_follows_a_replaced_table():
    model = Tied()
    model.embed.embedding = nnx.Param(3 * TABLE)
    assert_close(model.head.weight, 3 * TABLE, 0)


def test_tied_head_makes_no_transposed_copy():
    graph, params = nnx.split(
        LMHead(64, 512, tie_to=nnx.Embed(512, 64, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0))
    )
    x, labels = jnp.zeros((4, 64)), jnp.zeros(4, jnp.int32)
    lowered = jax.jit(lambda p: nnx.merge(graph, p).loss(x, labels)).lower(params)
    assert "transpose" not in lowered.as_text()


def test_an_adapted_weight_is_the_weight_in_use(x, labels):
    class LowRankHead(LMHead):
        def __init__(self, *args, rngs, **kwargs):
            super().__init__(*args, rngs=rngs, **kwargs)
            self.down = nnx.Param(jax.random.normal(rngs.params(), (H, 2)))
            self.up = nnx.Param(jax.random.normal(rngs.params(), (2, V)))

        @property
        def weight(self):
            return self.kernel[...] + self.down[...] @ self.up[...]

    head = LowRankHead(H, V, rngs=nnx.Rngs(0))
    assert_close(head(x), x @ head.weight, 1e-5)
    assert_close(head.loss(x, labels), fused_linear_ce(x, head.weight, labels), 0)
    gradient = nnx.grad(lambda head: head.loss(x, labels))(head)
    assert all(jnp.any(g != 0) for g in jax.tree.leaves(gradient))


# --- errors ---


def build(**changes):
    arguments = {"hidden": H, "vocab": V, "rngs": nnx.Rngs(0)} | changes
    return LMHead(arguments.pop("hidden"), arguments.pop("vocab"), **arguments)


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [
        (ValueError, "hidden=0", {"hidden": 0}),
        (ValueError, "vocab=-1", {"vocab": -1}),
        (ValueError, "logit_soft_cap must be positive", {"logit_soft_cap": 0.0}),
        (ValueError, r"tie_to.*\[13, 8\]", {"tie_to": nnx.Embed(H, V, rngs=nnx.Rngs(0))}),
        (TypeError, "tie_to must be an nnx.Embed", {"tie_to": jnp.zeros((V, H))}),
    ],
)
def test_bad_construction_raises(error, message, changes):
    with pytest.raises(error, match=message):
        build(**changes)


def test_bad_hidden_states_raise(head):
    with pytest.raises(ValueError, match="hidden = 8"):
        head(jnp.zeros((T, H + 1)))
    with pytest.raises(TypeError, match="int32"):
        head(jnp.zeros((T, H), jnp.int32))
    with pytest.raises(ValueError, match="float32"):
        head.loss(jnp.zeros((T, H + 1)), jnp.zeros(T, jnp.int32))


def test_missing_flax_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "flax", None)
    monkeypatch.delitem(sys.modules, "pallas_loss.nnx")
    with pytest.raises(ImportError, match=r"pip install pallas_loss\[nnx\]"):
        importlib.import_module("pallas_loss.nnx")


# --- labels ---


@pytest.mark.parametrize(
    ("tokens", "segment_ids", "expected"),
    [
        ([5, 6, 7, 8, 9], None, [6, 7, 8, 9, -100]),
        ([5, 6, 7, 8, 9], [0, 0, 0, 1, 1], [6, 7, -100, 9, -100]),
        ([5, 6, 7], [0, 1, 2], [-100, -100, -100]),
        ([5, 6, 7], [3, 0, 3], [-100, -100, -100]),
        ([5], None, [-100]),
        ([], None, []),
        ([[1, 2], [3, 4]], None, [[2, -100], [4, -100]]),
        ([[1, 2, 3], [4, 5, 6]], [[0, 0, 1], [1, 1, 1]], [[2, -100, -100], [5, 6, -100]]),
    ],
)
def test_labels_shift_within_a_document(tokens, segment_ids, expected):
    tokens = np.array(tokens, np.int32)
    assert next_token_labels(tokens, segment_ids and np.array(segment_ids)).tolist() == expected


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "int16", "int32", "uint32"])
def test_labels_hold_the_ignore_index_whatever_the_tokens(dtype):
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        labels = jax.jit(next_token_labels)(jnp.array([[5, 6, 7]], dtype), jnp.zeros((1, 3), dtype))
    assert labels.dtype == jnp.int32
    assert labels.tolist() == [[6, 7, -100]]


def test_labels_take_an_ignore_index():
    assert next_token_labels(jnp.array([5, 6]), ignore_index=-1).tolist() == [6, -1]


def test_bad_tokens_raise():
    with pytest.raises(TypeError, match="float32"):
        next_token_labels(jnp.zeros(3))
    with pytest.raises(ValueError, match="scalar"):
        next_token_labels(jnp.int32(3))
    with pytest.raises(ValueError, match=r"segment_ids must have shape \[3\]"):
        next_token_labels(jnp.zeros(3, jnp.int32), jnp.zeros(2, jnp.int32))


def test_the_head_never_shifts_and_a_sharded_sequence_sums_to_the_whole():
    tokens, segment_ids = jnp.array([5, 6, 7, 8, 9]), jnp.array([0, 0, 0, 1, 1])
    labels = next_token_labels(tokens, segment_ids)
    x = jax.random.normal(jax.random.key(0), (5, 4))
    head = LMHead(4, 10, rngs=nnx.Rngs(0))
    whole, metrics = head.loss(x, labels, reduction="sum", return_metrics=True)
    assert metrics.num_tokens == 3
    assert whole == head.loss(x, jnp.array([6, 7, -100, 9, -100]), reduction="sum")

    log_p = jax.nn.log_softmax(head(x))
    assert_close(whole, -(log_p[0, 6] + log_p[1, 7] + log_p[3, 9]), 1e-5)
    shards = [head.loss(x[i], labels[i], reduction="sum") for i in (slice(0, 3), slice(3, 5))]
    assert_close(sum(shards), whole, 1e-5)


# --- accumulation ---


def test_a_normalizer_makes_micro_batches_add_up_to_the_batch():
    """Three tokens in one micro-batch, one in the other: a mean of means would weigh it thrice."""
    x = jnp.zeros((4, 4)).at[3, 3].set(jnp.log(5.0))
    labels = jnp.zeros(4, jnp.int32)
    head = LMHead(4, 4, rngs=nnx.Rngs(0))
    head.kernel[...] = jnp.eye(4)
    graph, params = nnx.split(head)

    def loss(params, part, normalizer=None):
        return nnx.merge(graph, params).loss(x[part], labels[part], normalizer=normalizer)

    whole, gradient = jax.value_and_grad(loss)(params, slice(0, 4))
    parts = [jax.value_and_grad(loss)(params, part, 4) for part in (slice(0, 3), slice(3, 4))]
    total, total_gradient = jax.tree.map(jnp.add, *parts)
    assert_close(whole, 1.559581)
    assert_close(total, 1.559581)
    assert_close(total_gradient["kernel"][...], gradient["kernel"][...])
