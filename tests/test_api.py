"""The contract of the public functions: what is refused, what is accepted, how it transforms."""

import functools
import logging
import subprocess
import sys
import textwrap

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.experimental import checkify

import pallas_loss
from pallas_loss import UnsupportedError, check_labels, fused_linear_ce

T, H, V = 6, 4, 7


def problem(seed=0, tokens=T, hidden=H, vocab=V):
    """float32 `x [T, H]`, `w [H, V]`, int32 `labels [T]`."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(tokens, hidden)).astype(np.float32)
    w = rng.normal(size=(hidden, vocab)).astype(np.float32)
    return x, w, rng.integers(0, vocab, tokens).astype(np.int32)


def close(got, expected, atol=2e-6, rtol=2e-6):
    np.testing.assert_allclose(
        np.asarray(got).astype(np.float64), np.asarray(expected).astype(np.float64), rtol, atol
    )


def on(backend, **options):
    """`fused_linear_ce` on one backend."""
    return functools.partial(fused_linear_ce, implementation=backend.name, **options)


# --- bad input ------------------------------------------------------------------------------------

# name: (arguments replaced, error, what the message must hold)
BAD = {
    "hidden sizes differ": ({"x": np.ones((T, 5), np.float32)}, ValueError, ["x", "[6, 5]", "w"]),
    "w transposed": ({"w": np.ones((V, H), np.float32)}, ValueError, ["w", "[7, 4]", "float32"]),
    "w vector": ({"w": np.ones(H, np.float32)}, ValueError, ["w", "[4]", "float32"]),
    "w stack": ({"w": np.ones((2, H, V), np.float32)}, ValueError, ["w", "[2, 4, 7]", "float32"]),
    "x scalar": ({"x": np.float32(1), "labels": np.int32(1)}, ValueError, ["x", "[]", "float32"]),
    "x integers": ({"x": np.ones((T, H), np.int32)}, TypeError, ["x", "[6, 4]", "int32"]),
    "x complex": ({"x": np.ones((T, H), np.complex64)}, TypeError, ["x", "[6, 4]", "complex64"]),
    "w integers": ({"w": np.ones((H, V), np.int8)}, TypeError, ["w", "[4, 7]", "int8"]),
    "empty vocabulary": ({"w": np.ones((H, 0), np.float32)}, ValueError, ["w", "[4, 0]"]),
    "no hidden": (
        {"x": np.ones((T, 0), np.float32), "w": np.ones((0, V), np.float32)},
        ValueError,
        ["x", "[6, 0]"],
    ),
    "too few labels": ({"labels": np.zeros(5, np.int32)}, ValueError, ["labels", "[5]", "int32"]),
    "labels one-hot": ({"labels": np.zeros((T, V), np.int32)}, ValueError, ["labels", "[6, 7]"]),
    "labels column": ({"labels": np.zeros((T, 1), np.int32)}, ValueError, ["labels", "[6, 1]"]),
    "labels floats": ({"labels": np.zeros(T, np.float32)}, TypeError, ["labels", "[6]", "float32"]),
    "labels bools": ({"labels": np.zeros(T, bool)}, TypeError, ["labels", "[6]", "bool"]),
    "bias per token": ({"bias": np.zeros(T, np.float32)}, ValueError, ["bias", "[6]", "float32"]),
    "bias scalar": ({"bias": np.float32(1)}, ValueError, ["bias", "[]", "float32"]),
    "bias integers": ({"bias": np.zeros(V, np.int32)}, TypeError, ["bias", "[7]", "int32"]),
    "where shape": ({"where": np.ones((1, T), bool)}, ValueError, ["where", "[1, 6]", "bool"]),
    "where floats": ({"where": np.ones(T, np.float32)}, TypeError, ["where", "[6]", "float32"]),
    "weights shape": ({"weights": np.ones((T, 1), np.float32)}, ValueError, ["weights", "[6, 1]"]),
    "weights integers": ({"weights": np.ones(T, np.int32)}, TypeError, ["weights", "[6]", "int32"]),
    "class weights per token": (
        {"class_weights": np.ones(T, np.float32)},
        ValueError,
        ["class_weights", "[6]", "float32"],
    ),
    "class weights integers": (
        {"class_weights": np.ones(V, np.int32)},
        TypeError,
        ["class_weights", "[7]", "int32"],
    ),
    "ignore index fraction": ({"ignore_index": 1.5}, TypeError, ["ignore_index", "1.5"]),
    "ignore index text": ({"ignore_index": "pad"}, TypeError, ["ignore_index", "pad"]),
    "ignore index none": ({"ignore_index": None}, TypeError, ["ignore_index", "None"]),
    "smoothing negative": ({"label_smoothing": -0.1}, ValueError, ["label_smoothing", "-0.1"]),
    "smoothing above one": ({"label_smoothing": 1.1}, ValueError, ["label_smoothing", "1.1"]),
    "smoothing nan": ({"label_smoothing": np.nan}, ValueError, ["label_smoothing", "nan"]),
    "smoothing text": ({"label_smoothing": "0.1"}, TypeError, ["label_smoothing", "0.1"]),
    "smoothing none": ({"label_smoothing": None}, TypeError, ["label_smoothing", "None"]),
    "z_loss nan": ({"z_loss": np.nan}, ValueError, ["z_loss", "nan"]),
    "z_loss array": ({"z_loss": np.ones(2, np.float32)}, TypeError, ["z_loss"]),
    "soft cap zero": ({"logit_soft_cap": 0.0}, ValueError, ["logit_soft_cap", "0.0"]),
    "soft cap negative": ({"logit_soft_cap": -30}, ValueError, ["logit_soft_cap", "-30"]),
    "soft cap nan": ({"logit_soft_cap": np.nan}, ValueError, ["logit_soft_cap", "nan"]),
    "scale zero": ({"logit_scale": 0}, ValueError, ["logit_scale"]),
    "scale text": ({"logit_scale": "1"}, TypeError, ["logit_scale"]),
    "scale per token": ({"logit_scale": jnp.ones(T)}, TypeError, ["logit_scale", "[6]", "float32"]),
    "temperature zero": ({"temperature": 0}, ValueError, ["temperature", "0"]),
    "temperature negative": ({"temperature": -1.0}, ValueError, ["temperature", "-1.0"]),
    "temperature nan": ({"temperature": np.nan}, ValueError, ["temperature", "nan"]),
    "temperature vector": ({"temperature": jnp.ones(1)}, TypeError, ["temperature", "[1]"]),
    "reduction": ({"reduction": "avg"}, ValueError, ["reduction", "'avg'", "'mean'", "'none'"]),
    "reduction none": ({"reduction": None}, ValueError, ["reduction", "None", "'none'"]),
    "layout": ({"w_layout": "vv"}, ValueError, ["w_layout", "'vv'", "'hv'"]),
    "compute dtype": ({"compute_dtype": jnp.int8}, (ValueError, TypeError), ["compute_dtype"]),
    "compute dtype text": (
        {"compute_dtype": "bf17"},
        (ValueError, TypeError),
        ["compute_dtype", "bf17"],
    ),
    "normalizer of a sum": (
        {"normalizer": 2.0, "reduction": "sum"},
        ValueError,
        ["normalizer", "reduction", "'sum'"],
    ),
    "normalizer of none": (
        {"normalizer": 2.0, "reduction": "none"},
        ValueError,
        ["normalizer", "reduction", "'none'"],
    ),
    "normalizer per token": (
        {"normalizer": np.ones(T, np.float32)},
        (ValueError, TypeError),
        ["normalizer", "[6]"],
    ),
    "implementation": ({"implementation": "cuda"}, ValueError, ["implementation", "cuda", "xla"]),
}


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize("name", BAD)
def test_bad_input_raises_and_names_the_argument(name, traced):
    """The message names the argument and prints its value, or its shape and dtype; so under jit."""
    changes, error, words = BAD[name]
    x, w, labels = problem()
    arguments = {"x": x, "w": w, "labels": labels, **changes}
    arrays = {n: a for n, a in arguments.items() if n in ("x", "w", "labels")}
    options = {n: a for n, a in arguments.items() if n not in arrays}

    def call(arrays):
        return fused_linear_ce(**arrays, **options)

    with pytest.raises(error) as caught:
        jax.eval_shape(call, arrays) if traced else call(arrays)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_float64_input_is_refused():
    """Under x64 a float64 array would be computed in float32 behind the caller's back."""
    x, w, labels = problem()
    with jax.enable_x64(True), pytest.raises(TypeError, match=r"x .*float64\[6, 4\]"):
        fused_linear_ce(x.astype(np.float64), w, labels)
    with jax.enable_x64(True), pytest.raises(TypeError, match=r"w .*float64\[4, 7\]"):
        fused_linear_ce(x, w.astype(np.float64), labels)


@pytest.mark.parametrize("option", ["label_smoothing", "z_loss", "logit_soft_cap", "ignore_index"])
def test_traced_static_option_is_named(backend, option):
    """What decides the program cannot be traced; never a leaked tracer."""
    x, w, labels = problem()
    value = 1 if option == "ignore_index" else 0.5

    def loss(value):
        return on(backend, **{option: value})(x, w, labels)

    for transform in (jax.jit, jax.grad):
        if option == "ignore_index" and transform is jax.grad:
            continue
        with pytest.raises(TypeError, match=option):
            transform(loss)(value)


@pytest.mark.parametrize("name", ["mosaic_gpu", "triton", "mosaic_tpu", "pallas"])
def test_a_named_implementation_never_falls_back(name):
    """A kernel that cannot run here raises; a name that does not exist is a ValueError."""
    assert issubclass(UnsupportedError, NotImplementedError)
    with pytest.raises((UnsupportedError, ValueError)) as caught:
        fused_linear_ce(*problem(), implementation=name)
    assert name in str(caught.value)
    if isinstance(caught.value, ValueError):
        assert "xla" in str(caught.value)


def test_the_default_says_once_what_it_picked():
    """Two calls, one line naming the backend and one the plan; the value is the named one's."""
    script = """
        import logging, numpy as np
        logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s")
        from pallas_loss import fused_linear_ce
        x, w, y = np.ones((2, 3), np.float32), np.eye(3, dtype=np.float32), np.array([0, 1])
        for _ in range(2):
            assert fused_linear_ce(x, w, y) == fused_linear_ce(x, w, y, implementation="xla")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True
    )
    said = [line for line in done.stderr.splitlines() if line.startswith("pallas_loss")]
    assert len(said) == 2, done.stderr
    assert "xla" in said[0] and "gradients: recompute" in said[1]
    assert logging.getLogger("pallas_loss").level == logging.NOTSET


def test_public_names():
    """What the package promises to export."""
    for name in ("fused_linear_ce", "check_labels", "UnsupportedError"):
        assert name in pallas_loss.__all__


# --- labels ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"])
def test_label_dtypes(backend, dtype):
    """Any integer dtype, also one that cannot hold V or `ignore_index`."""
    x, w, labels = problem(vocab=300)
    labels = np.array([0, 1, 99, 100, 127, 5]).astype(dtype)
    if dtype.startswith("int"):
        labels[1] = -100
    options = {"reduction": "none"}
    with jax.enable_x64(dtype == "int64"):
        loss = on(backend, **options)(x, w, labels)
    assert loss.dtype == jnp.float32
    close(loss, oracle.evaluate(x, w, labels, **options).loss)


@pytest.mark.parametrize(
    ("dtype", "label"),
    [
        ("int64", 2**32 + 1),
        ("int64", -(2**32) + 1),
        ("int64", -(2**32) - 100),
        ("uint32", 2**32 - 100),
        ("uint32", 2**31 + 1),
        ("uint64", 2**64 - 100),
        ("uint64", 2**32),
        ("uint8", 156),
        ("int8", -1),
    ],
)
def test_labels_are_not_narrowed_before_the_check(backend, dtype, label):
    """A label that would wrap to a class, or to `ignore_index`, in a narrower type is still bad."""
    x, w, _ = problem(tokens=2)
    labels = np.array([3, label], dtype)
    with jax.enable_x64(True):
        loss = np.asarray(on(backend, reduction="none")(x, w, labels))
    close(loss[0], oracle.evaluate(x[:1], w, labels[:1]).loss)
    assert np.isnan(loss[1])


def test_labels_and_masks_have_no_gradient(backend):
    """Integers and bools get the float0 cotangent, class weights zeros: documented constants."""
    x, w, labels = problem()
    cw = jnp.linspace(0.5, 1.5, V)

    def loss(labels, where, cw):
        return on(backend)(x, w, labels, where=where, class_weights=cw)

    _, vjp = jax.vjp(loss, jnp.asarray(labels), jnp.ones(T, bool), cw)
    d_labels, d_where, d_cw = vjp(jnp.float32(1))
    assert d_labels.dtype == jax.dtypes.float0
    assert d_where.dtype == jax.dtypes.float0
    np.testing.assert_array_equal(d_cw, np.zeros(V))


@pytest.mark.parametrize("labels", [[0, 7], [0, -1], [-99], [6, 2**31 - 1], [[0], [100]]])
def test_check_labels_raises_on_concrete_input(labels):
    """A ValueError with the label and the range."""
    bad = [y for y in np.ravel(labels) if not 0 <= y < V]
    with pytest.raises(ValueError, match=rf"labels.*\b{V}\b.*{bad[0]}"):
        check_labels(np.array(labels), V)


def test_check_labels_passes_good_labels():
    """In range, ignored, empty; and the ignore mark is the one given."""
    for labels in ([0, 6], [-100, 3], [], [[1, 2], [3, -100]]):
        assert check_labels(np.array(labels, np.int32), V) is None
    assert check_labels(np.array([-1, 0]), V, ignore_index=-1) is None
    assert check_labels(np.array([9, 0], np.uint8), V, ignore_index=9) is None
    with pytest.raises(ValueError, match="-100"):
        check_labels(np.array([-100, 0]), V, ignore_index=-1)
    with pytest.raises(TypeError, match=r"labels.*float32"):
        check_labels(np.zeros(3, np.float32), V)


def test_check_labels_under_checkify():
    """Traced, the error is carried out of jit, and good labels carry none."""

    @jax.jit
    @checkify.checkify
    def step(x, w, labels):
        check_labels(labels, V)
        return fused_linear_ce(x, w, labels)

    x, w, labels = problem()
    labels[0] = -100
    error, loss = step(x, w, labels)
    assert error.get() is None
    close(loss, oracle.evaluate(x, w, labels).loss)
    labels[2] = V
    error, _ = step(x, w, labels)
    with pytest.raises(checkify.JaxRuntimeError, match=rf"labels.*\b{V}\b"):
        error.throw()


# --- values and dtypes ----------------------------------------------------------------------------


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


# --- transformations ------------------------------------------------------------------------------


def test_jit_and_eager_agree(backend):
    """The same numbers, and the value is not changed by asking for gradients."""
    x, w, labels = problem()
    loss = on(backend, label_smoothing=0.1)
    expected = oracle.evaluate(x, w, labels, label_smoothing=0.1).loss
    for value in (
        loss(x, w, labels),
        jax.jit(loss)(x, w, labels),
        jax.value_and_grad(loss)(x, w, labels)[0],
        jax.jit(jax.value_and_grad(loss))(x, w, labels)[0],
    ):
        close(value, expected, atol=5e-7, rtol=5e-7)


def test_vjp_called_more_than_once(backend):
    """The saved values survive the first call; each call answers its own cotangent."""
    x, w, labels = problem()
    _, vjp = jax.vjp(lambda x, w: on(backend, reduction="none")(x, w, labels), x, w)
    cotangents = [np.eye(T, dtype=np.float32)[i] for i in (0, 3)] + [np.ones(T, np.float32)]
    for g in [*cotangents, cotangents[0]]:
        expected = oracle.gradients(x, w, labels, g, reduction="none")
        for got, right in zip(vjp(jnp.asarray(g)), (expected.x, expected.w), strict=True):
            close(got, right)
    batched = jax.vmap(vjp)(jnp.stack(cotangents))
    for i, g in enumerate(cotangents):
        expected = oracle.gradients(x, w, labels, g, reduction="none")
        close(batched[0][i], expected.x)
        close(batched[1][i], expected.w)


def test_vmap_over_tokens(backend):
    """One token at a time: unreduced losses and the gradient of the shared weight."""
    backend.require_transforms()
    x, w, labels = problem()

    def total(x, w):
        per_token = jax.vmap(on(backend), in_axes=(0, None, 0))(x, w, labels)
        return jnp.sum(per_token), per_token

    (_, per_token), grads = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(x, w)
    close(per_token, oracle.evaluate(x, w, labels, reduction="none").loss)
    expected = oracle.gradients(x, w, labels, reduction="sum")
    close(grads[0], expected.x)
    close(grads[1], expected.w)


def test_vmap_over_stacked_weights_and_options(backend):
    """An ensemble of heads, biases and temperatures over one batch of tokens."""
    backend.require_transforms()
    x, w, labels = problem()
    ws = np.stack([w, -w, 2 * w])
    biases = np.linspace(-1, 1, 3 * V).reshape(3, V).astype(np.float32)
    temperatures = np.array([0.5, 1.0, 2.0], np.float32)

    def loss(w, bias, temperature):
        return on(backend, z_loss=0.01)(x, w, labels, bias=bias, temperature=temperature)

    values, grads = jax.jit(jax.vmap(jax.value_and_grad(loss, (0, 1, 2))))(ws, biases, temperatures)
    for i in range(3):
        options = {"bias": biases[i], "temperature": temperatures[i], "z_loss": 0.01}
        close(values[i], oracle.evaluate(x, ws[i], labels, **options).loss)
        expected = oracle.gradients(x, ws[i], labels, **options)
        close(grads[0][i], expected.w)
        close(grads[1][i], expected.bias)
        close(grads[2][i], expected.temperature)


def test_vmap_over_masks_and_labels(backend):
    """Batched integer operands only: different tokens counted in each element."""
    backend.require_transforms()
    x, w, labels = problem()
    where = np.array([[1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]], bool)
    stacked = np.stack([labels, (labels + 1) % V, (labels + 2) % V])

    def loss(w, y, m):
        return on(backend)(x, w, y, where=m)

    values, dw = jax.vmap(jax.value_and_grad(loss), in_axes=(None, 0, 0))(w, stacked, where)
    for i in range(3):
        close(values[i], oracle.evaluate(x, w, stacked[i], where=where[i]).loss)
        close(dw[i], oracle.gradients(x, w, stacked[i], where=where[i]).w)


def test_scan_with_a_gradient_through_the_carry(backend):
    """Losses of micro-batches summed in a scan, and SGD steps whose carry is the weight."""
    x, w, labels = problem(tokens=8)
    xs, ys = x.reshape(4, 2, H), labels.reshape(4, 2)
    loss = on(backend, reduction="sum")

    def accumulated(w):
        return jax.lax.scan(lambda c, xy: (c + loss(xy[0], w, xy[1]), None), 0.0, (xs, ys))[0]

    value, dw = jax.jit(jax.value_and_grad(accumulated))(w)
    close(value, oracle.evaluate(x, w, labels, reduction="sum").loss)
    close(dw, oracle.gradients(x, w, labels, reduction="sum").w)

    def step(w, xy):
        value, dw = jax.value_and_grad(loss, 1)(xy[0], w, xy[1])
        return w - 0.1 * dw, value

    got, values = jax.jit(lambda w: jax.lax.scan(step, w, (xs, ys)))(w)
    expected = w.astype(np.float64)
    for i in range(4):
        close(values[i], oracle.evaluate(xs[i], expected, ys[i], reduction="sum").loss, 3e-6)
        expected = expected - 0.1 * oracle.gradients(xs[i], expected, ys[i], reduction="sum").w
    close(got, expected, 3e-6)


@pytest.mark.parametrize("policy", ["nothing_saveable", "everything_saveable", "dots_saveable"])
def test_checkpoint_changes_no_bit(backend, policy):
    """Rematerialised or saved, alone or around the layer before."""
    backend.require_transforms()
    x, w, labels = problem()

    def loss(x, w):
        return on(backend)(jnp.tanh(x), w, labels)

    remat = jax.checkpoint(loss, policy=getattr(jax.checkpoint_policies, policy))
    plain = jax.jit(jax.value_and_grad(loss, (0, 1)))(x, w)
    got = jax.jit(jax.value_and_grad(remat, (0, 1)))(x, w)
    jax.tree.map(np.testing.assert_array_equal, got, plain)
    inner = oracle.gradients(np.tanh(x.astype(np.float64)), w, labels)
    close(got[1][0], inner.x * (1 - np.tanh(x) ** 2))


def test_donation(backend):
    """Donated operands are reused, not read afterwards: an SGD step in place."""
    x, w, labels = problem()
    loss = on(backend)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(x, w, labels):
        value, (dx, dw) = jax.value_and_grad(loss, (0, 1))(x, w, labels)
        return value, x - dx, w - dw

    expected = oracle.gradients(x, w, labels)
    given_x, given_w = jnp.array(x), jnp.array(w)
    value, new_x, new_w = step(given_x, given_w, labels)
    assert given_x.is_deleted()
    assert given_w.is_deleted()
    close(value, oracle.evaluate(x, w, labels).loss)
    close(new_x, x - expected.x)
    close(new_w, w - expected.w)


def test_control_flow(backend):
    """Under `cond` and `switch` on a traced value, and forward only in a `while_loop`."""
    x, w, labels = problem()
    loss = on(backend)

    @jax.jit
    def chosen(w, use):
        return jax.lax.cond(use, lambda w: loss(x, w, labels), lambda w: jnp.sum(w) * 0, w)

    close(jax.grad(chosen)(w, True), oracle.gradients(x, w, labels).w)
    np.testing.assert_array_equal(jax.grad(chosen)(w, False), np.zeros((H, V)))
    looped = jax.lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + loss(x, w, labels)), (0, jnp.float32(0))
    )
    close(looped[1], 3 * oracle.evaluate(x, w, labels).loss)


def test_gradient_of_traced_scalars(backend):
    """Temperature and scale given as arrays: right gradient, through jit, with a soft cap."""
    x, w, labels = problem()
    options = {"logit_soft_cap": 2.0, "z_loss": 0.02, "label_smoothing": 0.1}

    def loss(temperature, scale):
        return on(backend, **options)(x, w, labels, temperature=temperature, logit_scale=scale)

    value, grads = jax.jit(jax.value_and_grad(loss, (0, 1)))(jnp.float32(0.7), jnp.float32(1.4))
    options |= {"temperature": np.float32(0.7), "logit_scale": np.float32(1.4)}
    close(value, oracle.evaluate(x, w, labels, **options).loss)
    expected = oracle.gradients(x, w, labels, **options)
    close(grads[0], expected.temperature)
    close(grads[1], expected.logit_scale)


def _mixed(backend):
    x, w, labels = problem()
    tangent = np.ones((T, H), np.float32)

    def loss(x, weights, temperature):
        return on(backend, reduction="sum")(x, w, labels, weights=weights, temperature=temperature)

    return loss, x, jnp.ones(T), jnp.float32(1.5), tangent


def test_mixed_second_derivatives_are_right_or_raise(backend):
    """d/dweights of dloss/dx is the unweighted dloss/dx; a zero would be a silent lie."""
    loss, x, weights, temperature, tangent = _mixed(backend)
    _, w, labels = problem()
    per_token = oracle.gradients(x, w, labels, reduction="sum", temperature=1.5).x
    directions = np.sum(per_token * tangent, axis=1)

    def dx_along(weights):
        return jnp.sum(tangent * jax.grad(loss)(x, weights, temperature))

    def dweights_sum(x):
        return jnp.sum(jax.grad(loss, 1)(x, weights, temperature))

    for derivative, right in (
        (jax.grad(dx_along), directions),
        (jax.grad(dweights_sum), per_token),
    ):
        try:
            got = derivative(weights if derivative is not None and right.ndim == 1 else x)
        except TypeError as error:
            assert "fused_linear_ce" in str(error) or "second" in str(error)
        else:
            close(got, right)
    with pytest.raises(TypeError):
        jax.grad(lambda t: jnp.sum(tangent * jax.grad(loss)(x, weights, t)))(temperature)
    with pytest.raises(TypeError):
        jax.grad(lambda t: jax.grad(loss, 2)(x, weights, t))(temperature)


@pytest.mark.parametrize("argument", ["x", "w", "bias", "temperature", "logit_scale"])
def test_forward_mode_raises_for_every_argument(backend, argument):
    """Never zeros, whichever argument carries the tangent, under jit as well."""
    x, w, labels = problem()
    arguments = {
        "x": jnp.asarray(x),
        "w": jnp.asarray(w),
        "bias": jnp.zeros(V),
        "temperature": jnp.float32(1.2),
        "logit_scale": jnp.float32(0.8),
    }

    def loss(value):
        a = {**arguments, argument: value}
        return on(backend)(a.pop("x"), a.pop("w"), labels, **a)

    point = arguments[argument]
    for f in (loss, jax.jit(loss)):
        with pytest.raises(TypeError, match="(?i)fused_linear_ce|forward|reverse"):
            jax.jvp(f, (point,), (jnp.ones_like(point),))


# --- compilation ----------------------------------------------------------------------------------


def test_equal_options_trace_once(backend):
    """Fresh but equal options, arrays instead of arrays: one trace. New arrays are not new
    options."""
    x, w, labels = problem()
    traces = []

    @functools.partial(jax.jit, static_argnames=("options",))
    def step(x, w, labels, temperature, options):
        traces.append(options)
        loss = on(backend, **dict(options))
        return jax.value_and_grad(loss)(x, w, labels, temperature=temperature)

    for i in range(5):
        options = tuple({"label_smoothing": 0.1, "logit_soft_cap": float("30")}.items())
        step(x + i, w, labels, jnp.float32(1 + i), options)
    assert len(traces) == 1


@pytest.mark.parametrize("what", ["value", "gradients"])
def test_repeated_eager_calls_compile_nothing(backend, what):
    """A loop in Python over one shape compiles at its first turn only, options and all."""
    x, w, labels = (jnp.asarray(a) for a in problem())
    mask = jnp.ones(T, bool)
    loss = on(backend, z_loss=0.01, logit_soft_cap=5.0)
    call = loss if what == "value" else jax.grad(loss, (0, 1))
    compiled = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(duration)

    def turn():
        jax.block_until_ready(call(x, w, labels, where=mask, temperature=jnp.float32(2)))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        jax.clear_caches()
        turn()
        first = len(compiled)
        turn()
        turn()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert first > 0
    assert len(compiled) == first


def test_lengths_that_differ_compile_by_their_own_shape(backend):
    """No hidden bucketing: padding is the caller's, and an ignored tail changes no number."""
    x, w, labels = problem(tokens=8)
    traces = []

    @jax.jit
    def step(x, w, labels):
        traces.append(x.shape)
        return on(backend)(x, w, labels)

    padded = [np.where(np.arange(8) < n, labels, -100).astype(np.int32) for n in range(1, 9)]
    for n, y in enumerate(padded, start=1):
        close(step(x, w, y), oracle.evaluate(x[:n], w, labels[:n]).loss)
    assert len(traces) == 1
