"""The contract of the public functions: what is refused, and how labels are read."""

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
from ce_problem import H, T, V, close, on, problem
from jax.experimental import checkify

import pallas_loss
from pallas_loss import UnsupportedError, check_labels, fused_linear_ce

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
