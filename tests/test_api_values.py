"""The contract of the public functions: values and dtypes."""

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from ce_problem import H, T, V, close, on, problem


@pytest.mark.standard_promotion
@pytest.mark.parametrize(
    ("x_dtype", "w_dtype"),
    [("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "bfloat16")],
)
def test_mixed_dtypes_are_promoted(backend, x_dtype, w_dtype):
    """The product is taken in the promoted dtype; each gradient has its argument's own."""
    x, w, labels = problem()
    x, w = x.astype(jnp.dtype(x_dtype)), w.astype(jnp.dtype(w_dtype))
    arguments = {
        "x": x,
        "w": w,
        "bias": np.linspace(-1, 1, V).astype(jnp.bfloat16),
        "weights": np.linspace(0.5, 1, T).astype(np.float16),
    }

    def loss(arguments):
        a = dict(arguments)
        return on(backend)(a.pop("x"), a.pop("w"), labels, **a)

    value, grads = jax.value_and_grad(loss)(jax.tree.map(jnp.asarray, arguments))
    assert value.dtype == jnp.float32
    close(value, oracle.evaluate(labels=labels, **arguments).loss)
    expected = oracle.gradients(labels=labels, **arguments)
    for name, given in arguments.items():
        assert grads[name].dtype == given.dtype, name
        half_unit = float(jnp.finfo(given.dtype).eps) / 2
        close(grads[name], getattr(expected, name), atol=1e-6, rtol=1.01 * half_unit + 1e-5)


def test_x64_mode_changes_nothing(backend):
    """float32 in, float32 out, the same numbers, whatever the global default."""
    x, w, labels = problem()
    options = {"bias": np.zeros(V, np.float32), "z_loss": 0.01, "label_smoothing": 0.1}
    both = jax.value_and_grad(on(backend, **options), argnums=(0, 1))
    value, grads = both(x, w, labels)
    with jax.enable_x64(True):
        value_64, grads_64 = both(x, w, labels)
        metrics = on(backend, **options, return_metrics=True)(x, w, labels)[1]
    assert value_64.dtype == jnp.float32
    assert metrics.lse.dtype == metrics.accuracy.dtype == metrics.nll.dtype == jnp.float32
    assert metrics.num_tokens.dtype == metrics.predictions.dtype == jnp.int32
    close(value_64, value, rtol=1e-6)
    for got, right in zip(grads_64, grads, strict=True):
        assert got.dtype == jnp.float32
        close(got, right, atol=1e-7)


def test_prediction_is_the_lowest_index_on_ties(backend):
    """Ties within a tile, across tiles, and of every class."""
    x, labels = np.ones((1, 2), np.float32), np.array([0], np.int32)
    for tied, expected in (((), 0), ((900, 5), 5), ((1499, 1024), 1024), ((128, 127), 127)):
        bias = np.zeros(1500, np.float32)
        bias[list(tied)] = 2
        w = np.zeros((2, 1500), np.float32)
        _, metrics = on(backend, bias=bias, return_metrics=True)(x, w, labels)
        assert metrics.predictions.tolist() == [expected]


def test_metrics_of_partly_counted_tokens(backend):
    """Counts are of tokens, not of weights; accuracy is over counted tokens."""
    x = 4 * np.eye(4, dtype=np.float32)[[0, 1, 2, 3, 0]]
    w, labels = np.eye(4, dtype=np.float32), np.array([0, 1, 0, -100, 0], np.int32)
    weights = np.array([0.5, 2, 1, 1, 0], np.float32)
    options = {"weights": weights, "z_loss": 0.1}
    loss, metrics = on(backend, **options, return_metrics=True)(x, w, labels)
    assert metrics.num_tokens.dtype == metrics.predictions.dtype == jnp.int32
    assert int(metrics.num_tokens) == 3
    close(metrics.accuracy, 2 / 3, 1e-7)
    assert metrics.predictions.tolist() == [0, 1, 2, -1, -1]
    lse = np.log(np.exp(4) + 3)
    close(metrics.lse, [lse, lse, lse, 0, 0])
    mean = weights[:3] / 3.5
    close(metrics.nll, np.sum(mean * (lse - np.array([4, 4, 0]))))
    close(metrics.z_loss, 0.1 * lse**2)
    close(loss, metrics.nll + metrics.z_loss)


def test_metrics_are_a_pytree(backend):
    """They pass through jit and tree functions by name."""
    x, w, labels = problem()
    _, metrics = jax.jit(on(backend, return_metrics=True))(x, w, labels)
    names = ("nll", "z_loss", "num_tokens", "accuracy", "predictions", "lse")
    assert metrics._fields == names
    assert len(jax.tree.leaves(metrics)) == len(names)


def test_metrics_lse_is_differentiable(backend):
    """A cotangent on `lse` is used, alone and beside the loss's own; uncounted tokens get none."""
    x, w, labels = problem()
    labels[1] = -100
    c = np.linspace(-1, 2, T).astype(np.float32)

    def objective(x, w, share):
        loss, metrics = on(backend, z_loss=0.01, return_metrics=True)(x, w, labels)
        return share * loss + jnp.sum(c * metrics.lse)

    for share in (0.0, 1.0, -0.5):
        dx, dw = jax.grad(objective, argnums=(0, 1))(x, w, share)
        expected = oracle.gradients(x, w, labels, share, lse_cotangent=c, z_loss=0.01)
        close(dx, expected.x)
        close(dw, expected.w)
        np.testing.assert_array_equal(dx[1], np.zeros(H))


def test_metrics_nll_and_z_loss_are_differentiable(backend):
    """Their gradients add up to that of the loss, and each is its own term's."""
    x, w, labels = problem()

    def part(x, name):
        return getattr(on(backend, z_loss=0.3, return_metrics=True)(x, w, labels)[1], name)

    d_nll, d_z = (jax.grad(part)(x, name) for name in ("nll", "z_loss"))
    whole = oracle.gradients(x, w, labels, z_loss=0.3).x
    plain = oracle.gradients(x, w, labels).x
    close(d_nll, plain)
    close(d_z, whole - plain)


def test_negative_weights_and_scale(backend):
    """Advantages have signs, and so may the logits' scale; argmax follows the scaled logits."""
    x, w, labels = problem()
    options = {"reduction": "sum", "logit_scale": -0.5}
    weights = np.linspace(-1, 1, T).astype(np.float32)

    def loss(x, w, weights):
        return on(backend, **options, return_metrics=True)(x, w, labels, weights=weights)

    (value, metrics), grads = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(x, w, weights)
    truth = oracle.evaluate(x, w, labels, weights=weights, **options)
    close(value, truth.loss)
    np.testing.assert_array_equal(metrics.predictions, np.argmin(x @ w, axis=1))
    expected = oracle.gradients(x, w, labels, weights=weights, **options)
    for got, name in zip(grads, ("x", "w", "weights"), strict=True):
        close(got, getattr(expected, name))


def test_integer_mask_equals_bool_mask(backend):
    """0/1 integers are a mask; any other integer counts as True."""
    x, w, labels = problem()
    mask = np.array([1, 0, 0, 1, 1, 0])
    expected = oracle.evaluate(x, w, labels, where=mask == 1).loss
    for where in (mask.astype(bool), mask.astype(np.int32), (3 * mask).astype(np.uint8)):
        close(on(backend, where=where)(x, w, labels), expected)


def test_cotangent_of_an_uncounted_token_is_not_read(backend):
    """A caller's 0/0 at a token that does not count stays where it is."""
    x, w, labels = problem()
    labels[2] = -100
    g = np.linspace(1, 2, T).astype(np.float32)
    expected = oracle.gradients(x, w, labels, g, reduction="none")
    g[2] = np.nan
    _, vjp = jax.vjp(lambda x, w: on(backend, reduction="none")(x, w, labels), x, w)
    dx, dw = vjp(jnp.asarray(g))
    close(dw, expected.w)
    close(dx, expected.x)


def test_normalizer_divides_alone(backend):
    """Traced or not, it replaces the whole denominator, class weights included."""
    x, w, labels = problem()
    options = {"weights": np.full(T, 2, np.float32), "class_weights": np.full(V, 3, np.float32)}
    total = oracle.evaluate(x, w, labels, reduction="sum", **options).loss
    for n in (5.0, np.float32(5), jnp.float32(5), 5, jnp.int32(5)):
        close(on(backend, normalizer=n, **options)(x, w, labels), total / 5)
    traced = jax.jit(lambda n: on(backend, normalizer=n, **options)(x, w, labels))
    close(traced(jnp.float32(8)), total / 8)
