"""Every backend against the float64 truth: dtype x option x reduction x shape, all gradients.

The rule: the largest error of an array may be at most twice that of `plain`, the same loss through
full float32 logits and JAX's own differentiation with GEMMs in the same input dtype, plus `EPSILON`
(four float32 units of what was summed, times the condition of the logits). What is documented as
rounded once more than there may add that rounding. No tolerance is chosen by hand.
"""

import functools
import zlib
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax import lax

from pallas_loss import fused_linear_ce

EPSILON = 2.0**-22

# name: (batch shape, H, V)
SHAPES = {
    "ragged": ((3, 11), 19, 137),
    "wide": ((13,), 8, 300),
    "long": ((70,), 40, 5),
    "tiny": ((1,), 2, 3),
    "peaked": ((2, 12), 16, 67),
    "offset": ((24,), 16, 67),
}

DIFFERENTIATED = ("x", "w", "bias", "weights", "temperature", "logit_scale")

# Options that draw arrays name them here; the arrays come from `make_problem`.
OPTIONS = {
    "none": {},
    "bias": {"arrays": ("bias",)},
    "where": {"arrays": ("where",)},
    "weights": {"arrays": ("weights",)},
    "class_weights": {"arrays": ("class_weights",)},
    "ignore_a_real_class": {"ignore_index": 2},
    "label_smoothing": {"label_smoothing": 0.1},
    "smoothing_of_one": {"label_smoothing": 1.0},
    "smoothing_with_class_weights": {"label_smoothing": 0.2, "arrays": ("class_weights",)},
    "z_loss": {"z_loss": 1e-2},
    "logit_soft_cap": {"logit_soft_cap": 2.0},
    "logit_scale": {"logit_scale": np.float32(0.6)},
    "temperature": {"temperature": np.float32(1.7)},
    "token_scaling": {"token_scaling": True},
    "w_vh": {"w_layout": "vh"},
    "everything_in_forward": {
        "arrays": ("bias", "where", "weights", "class_weights"),
        "z_loss": 1e-2,
        "logit_soft_cap": 15.0,
        "temperature": np.float32(1.7),
        "token_scaling": True,
        "w_layout": "vh",
    },
    "everything": {
        "arrays": ("bias", "where", "weights", "class_weights"),
        "label_smoothing": 0.1,
        "z_loss": 1e-2,
        "logit_soft_cap": 15.0,
        "logit_scale": np.float32(0.6),
        "temperature": np.float32(1.7),
        "token_scaling": True,
        "w_layout": "vh",
    },
}


@dataclass(frozen=True)
class Case:
    shape: str
    option: str
    reduction: str  # "normalizer" is a mean with an explicit denominator
    dtype: str = "float32"
    compute_dtype: str | None = None
    backward: str = "recompute"

    def __str__(self):
        parts = [self.dtype, self.shape, self.option, self.reduction]
        parts += ["compute_" + self.compute_dtype] if self.compute_dtype else []
        return "-".join(parts + ([self.backward] if self.backward != "recompute" else []))


def _cases():
    for option in OPTIONS:
        if option != "everything_in_forward":
            yield Case("ragged", option, "none")
    for option in (
        "none",
        "where",
        "weights",
        "class_weights",
        "ignore_a_real_class",
        "everything",
    ):
        yield Case("ragged", option, "mean")
    for option in ("weights", "everything"):
        for reduction in ("sum", "normalizer"):
            yield Case("ragged", option, reduction)
    for shape in SHAPES:
        for option, reduction in (("none", "mean"), ("everything", "none")):
            if shape != "ragged":
                yield Case(shape, option, reduction)
            for dtype in ("bfloat16", "float16"):
                yield Case(shape, option, reduction, dtype)
    yield Case("ragged", "none", "mean", compute_dtype="bfloat16")
    yield Case("peaked", "everything", "none", compute_dtype="bfloat16")
    in_forward = functools.partial(Case, backward="in_forward")
    for option in OPTIONS:
        if not option.startswith("everything"):
            for dtype in ("float32", "bfloat16"):
                yield in_forward("ragged", option, "mean", dtype)
    for shape in SHAPES:
        for dtype in ("float32", "bfloat16"):
            yield in_forward(shape, "everything_in_forward", "sum", dtype)
            if shape != "ragged":
                yield in_forward(shape, "none", "mean", dtype)
    yield in_forward("ragged", "everything_in_forward", "normalizer")
    yield in_forward("ragged", "none", "mean", compute_dtype="bfloat16")


@functools.cache
def make_problem(case):
    """`(arrays, static, cotangent)` as NumPy; float arrays already hold values of the case's
    dtype."""
    batch, hidden, vocab = SHAPES[case.shape]
    option = dict(OPTIONS[case.option])
    drawn = option.pop("arrays", ())
    rng = np.random.default_rng(zlib.crc32(f"{case.shape}{case.option}".encode()))
    dtype = jnp.dtype(case.dtype)
    x = rng.normal(size=(*batch, hidden))
    w = rng.normal(size=(hidden, vocab)) / np.sqrt(hidden)
    labels = rng.integers(0, vocab, size=batch)
    if (
        case.shape == "peaked"
    ):  # logits of about +-60: half the labels are certain, half are hopeless
        w = w * 20.0
        confident = rng.random(batch) < 0.5
        labels = np.where(confident, np.argmax(x @ w, axis=-1), labels)
    if (
        case.shape == "offset"
    ):  # every logit is about 1000 away from 0, exactly representable in every dtype
        x[..., 0], w[0] = 1.0, 1000.0
    ignore = option.get("ignore_index", -100)
    if case.shape != "tiny":
        labels = np.where(rng.random(batch) < 0.2, ignore, labels)
    arrays = {
        "x": x,
        "w": w.T if option.get("w_layout") == "vh" else w,
        "bias": rng.normal(size=vocab),
        "weights": np.where(rng.random(batch) < 0.2, 0.0, rng.uniform(0.2, 2.0, size=batch)),
        "class_weights": rng.uniform(0.2, 2.0, size=vocab),
        "where": rng.random(batch) < 0.8,
    }
    if case.shape == "tiny":
        arrays["weights"], arrays["where"] = np.full(batch, 0.7), np.ones(batch, bool)
    arrays = {name: arrays[name] for name in ("x", "w", *drawn)}
    for name in ("x", "w", "bias"):
        if name in arrays:
            arrays[name] = np.asarray(arrays[name]).astype(dtype)
    for name in ("weights", "class_weights"):
        if name in arrays:
            arrays[name] = arrays[name].astype(np.float32)
    arrays["labels"] = labels.astype(np.int32)
    for name in ("temperature", "logit_scale"):
        if name in option:
            arrays[name] = option.pop(name)
    if case.reduction == "normalizer":
        arrays["normalizer"] = np.float32(17.5)
    option["backward"] = case.backward
    option["reduction"] = "mean" if case.reduction == "normalizer" else case.reduction
    if case.compute_dtype:
        option["compute_dtype"] = case.compute_dtype
    cotangent = rng.normal(size=batch) if case.reduction == "none" else np.asarray(-1.7)
    return arrays, option, cotangent.astype(np.float32)


def _dot(a, b, contract):
    return lax.dot_general(
        a, b, (contract, ((), ())), precision="highest", preferred_element_type=jnp.float32
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _matmul(x, w, contract, dtype):
    """x @ w as a GEMM does it, here and in the backward: operands in `dtype`, float32 sums."""
    return _dot(x.astype(dtype), w.astype(dtype), contract)


def _matmul_fwd(x, w, contract, dtype):
    return _matmul(x, w, contract, dtype), (x, w)


def _matmul_bwd(contract, dtype, saved, d):
    x, w = saved
    d, hidden_axis = d.astype(dtype), contract[1][0]
    dx = _dot(d, w.astype(dtype), ((1,), (1 - hidden_axis,)))
    operands = (x.astype(dtype), d) if hidden_axis == 0 else (d, x.astype(dtype))
    return dx.astype(x.dtype), _dot(*operands, ((0,), (0,))).astype(w.dtype)


_matmul.defvjp(_matmul_fwd, _matmul_bwd)


def plain(
    x,
    w,
    labels,
    *,
    bias=None,
    where=None,
    weights=None,
    class_weights=None,
    normalizer=None,
    ignore_index=-100,
    label_smoothing=0.0,
    z_loss=0.0,
    logit_soft_cap=None,
    logit_scale=1.0,
    temperature=1.0,
    token_scaling=False,
    reduction="mean",
    w_layout="hv",
    compute_dtype=None,
    backward=None,
):
    """The loss through full float32 logits, for JAX to differentiate. Returns `(loss, lse)`."""
    del backward
    batch, labels = labels.shape, labels.reshape(-1)
    x2d = x.reshape(-1, x.shape[-1])
    contract = ((1,), (0 if w_layout == "hv" else 1,))
    z = _matmul(x2d, w, contract, jnp.dtype(compute_dtype or x.dtype))
    vocab = z.shape[1]
    if bias is not None:
        z = z + bias.astype(jnp.float32)[None]
    z = logit_scale * z
    if logit_soft_cap is not None:
        z = logit_soft_cap * jnp.tanh(z / logit_soft_cap)
    z = z / temperature
    weights = jnp.ones(labels.shape) if weights is None else weights.reshape(-1)
    cw = jnp.ones(vocab) if class_weights is None else class_weights
    counted = (labels != ignore_index) & (weights != 0)
    if where is not None:
        counted = counted & where.reshape(-1)
    safe = jnp.where(counted, labels, 0)
    lse = jax.nn.logsumexp(z, axis=1)
    logp = jax.nn.log_softmax(z, axis=1)
    nll = -jnp.take_along_axis(logp, safe[:, None], axis=1)[:, 0]
    token = (1 - label_smoothing) * cw[safe] * nll
    token = token - label_smoothing / vocab * (logp @ cw) + z_loss * lse**2
    if token_scaling:
        token = token * lax.stop_gradient(jnp.exp(-nll))
    token = jnp.where(counted, weights * token, 0.0)
    lse = jnp.where(counted, lse, 0.0).reshape(batch)
    if reduction == "none":
        return token.reshape(batch), lse
    if reduction == "sum":
        return jnp.sum(token), lse
    denominator = (
        jnp.sum(jnp.where(counted, weights * cw[safe], 0.0)) if normalizer is None else normalizer
    )
    return jnp.sum(token) / denominator, lse


@functools.cache
def _compiled(implementation, static):
    """`(arrays, cotangent) -> loss, metrics or lse, gradients by name`, jitted once per set of
    options."""

    @jax.jit
    def run(arrays, cotangent):
        wanted = {name: arrays[name] for name in DIFFERENTIATED if name in arrays}
        fixed = {name: a for name, a in arrays.items() if name not in wanted}

        def loss(wanted):
            arguments = {**fixed, **wanted}
            operands = [arguments.pop(name) for name in ("x", "w", "labels")]
            if implementation is None:
                return plain(*operands, **arguments, **dict(static))
            return fused_linear_ce(
                *operands,
                **arguments,
                **dict(static),
                return_metrics=True,
                implementation=implementation,
            )

        value, vjp, extra = jax.vjp(loss, wanted, has_aux=True)
        return value, extra, vjp(cotangent)[0]

    return run


@functools.cache
def _plain_result(case):
    arrays, static, cotangent = make_problem(case)
    value, lse, grads = _compiled(None, tuple(static.items()))(arrays, cotangent)
    return np.asarray(value), np.asarray(lse), {name: np.asarray(a) for name, a in grads.items()}


@functools.cache
def _truth(case):
    arrays, static, cotangent = make_problem(case)
    options = {**arrays, **static}
    del options["backward"]
    compute_dtype = options.pop("compute_dtype", None)
    if compute_dtype:
        options.update(
            {name: options[name].astype(jnp.dtype(compute_dtype)) for name in ("x", "w")}
        )
    return oracle.evaluate(**options), oracle.gradients(**options, cotangent=cotangent)


def _epsilon(backend, name, case, static):
    """`EPSILON`; or a rounding to the compute dtype, of what is documented to have one more.

    A soft cap's dscale is read off dx. Gradients made in the forward round the exponentials and
    the rows' scales apart. The kernels' dbias sums d-logits that were rounded for the products.
    """
    unit = float(jnp.finfo(case.compute_dtype or case.dtype).eps)
    if name == "logit_scale" and static.get("logit_soft_cap") is not None:
        return unit
    if case.backward == "in_forward" and name in ("x", "w", "bias"):
        return max(unit / 2, EPSILON)
    if name == "bias" and backend.hooks.rounded_dbias:
        return unit / 2
    return EPSILON


def _fault(name, got, ordinary, truth, scale, epsilon=EPSILON):
    """What is wrong with one array, or nothing."""
    got, ordinary = (np.asarray(a).astype(np.float64) for a in (got, ordinary))
    if got.shape != np.shape(truth):
        return [f"{name}: shape {got.shape}, expected {np.shape(truth)}"]
    if not np.all(np.isfinite(got)):
        return [f"{name}: not finite"]
    error = np.max(np.abs(got - truth), initial=0.0)
    ordinary_error = np.max(np.abs(ordinary - truth), initial=0.0)
    bound = 2 * ordinary_error + epsilon * scale
    if error <= bound:
        return []
    return [f"{name}: error {error:.3g}, plain {ordinary_error:.3g}, bound {bound:.3g}"]


@pytest.mark.parametrize("case", list(_cases()), ids=str)
def test_conformance(backend, case):
    """Value, metrics and every gradient are as accurate as the plain computation's."""
    backend.require(case.compute_dtype or case.dtype)
    arrays, static, cotangent = make_problem(case)
    truth, truth_grads = _truth(case)
    plain_loss, plain_lse, plain_grads = _plain_result(case)
    loss, metrics, grads = _compiled(backend.name, tuple(static.items()))(arrays, cotangent)

    condition = 1.0 + truth.condition
    if backend.hooks.absolute_tanh:
        condition += static.get("logit_soft_cap", 0.0)
    assert loss.dtype == jnp.float32
    np.testing.assert_array_equal(metrics.predictions, truth.predictions)
    assert int(metrics.num_tokens) == truth.num_tokens
    assert float(metrics.accuracy) == pytest.approx(truth.accuracy, rel=2**-22)
    assert set(grads) == set(plain_grads)
    faults = _fault("loss", loss, plain_loss, truth.loss, truth.scale * condition)
    faults += _fault("lse", metrics.lse, plain_lse, truth.lse, condition)
    for name, got in grads.items():
        assert got.dtype == arrays[name].dtype, f"gradient of {name} is {got.dtype}"
        scale = truth_grads.scale[name] * condition
        right = getattr(truth_grads, name)
        epsilon = _epsilon(backend, name, case, static)
        faults += _fault("d" + name, got, plain_grads[name], right, scale, epsilon)
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("option", ["none", "everything"])
def test_two_runs_are_bitwise_equal(backend, option):
    """No atomics, no order left to chance: the same call twice gives the same bits."""
    arrays, static, cotangent = make_problem(Case("ragged", option, "mean"))
    run = _compiled(backend.name, tuple(static.items()))
    first, second = run(arrays, cotangent), run(arrays, cotangent)
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_float32_parameters_keep_float32_gradients(backend):
    """With `compute_dtype=bfloat16` the float32 `dw` holds values that bfloat16 cannot."""
    backend.require("bfloat16")
    case = Case("ragged", "none", "mean", compute_dtype="bfloat16")
    arrays, static, cotangent = make_problem(case)
    _, _, grads = _compiled(backend.name, tuple(static.items()))(arrays, cotangent)
    for name in ("x", "w"):
        got = np.asarray(grads[name])
        kept = got.astype(jnp.bfloat16).astype(np.float32) != got
        assert np.mean(kept[got != 0]) > 0.9, f"d{name} was rounded to bfloat16"
