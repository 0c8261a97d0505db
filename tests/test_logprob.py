"""`fused_linear_logprob` against a float64 truth: outputs, and gradients for any cotangents.

The rule is that of `test_conformance`: the largest error of an array may be at most twice that of
`plain`, the same outputs through full float32 logits and JAX's own differentiation with GEMMs in
the same input dtype, plus `EPSILON` of what was summed. `backward="stored"` may add what it
documents, one rounding of e^(z-m) to bfloat16.
"""

import functools
import re
import zlib
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_conformance import EPSILON, SHAPES, _fault, _matmul

from pallas_loss import fused_linear_ce, fused_linear_logprob

F64 = np.float64
INF, NAN = np.inf, np.nan
OUTPUTS = ("logprob", "entropy", "lse")
DIFFERENTIATED = ("x", "w", "bias", "temperature", "logit_scale")
STATIC = ("entropy", "backward", "compute_dtype")  # nothing of these in the truth


def f32(*values):
    return np.array(values, np.float32)


def i32(*values):
    return np.array(values, np.int32)


def close(got, expected, atol=2e-6, rtol=0.0, name=""):
    np.testing.assert_allclose(np.asarray(got).astype(F64), expected, rtol, atol, err_msg=name)


# --- the truth ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Truth:
    """Outputs and gradients by name.

    `scale`: by name of the argument, the largest sum of absolute products in one entry of its
    gradient. `condition`: the largest sum of absolute products in a logit.
    """

    outputs: dict
    gradients: dict
    scale: dict
    condition: float


def _product(a, b):
    """a * b, with 0 * anything = 0."""
    a, b = np.broadcast_arrays(a, b)
    return np.where(a == 0, 0.0, a * np.where(a == 0, 0.0, b))


def truth(
    x,
    w,
    labels,
    cotangents,
    *,
    bias=None,
    where=None,
    ignore_index=-100,
    logit_soft_cap=None,
    logit_scale=1.0,
    temperature=1.0,
    w_layout="hv",
):
    """Float64, from the formulas::

    z = softcap(scale * (x @ w + b)) / temperature        logprob_k = z_k - lse
    lse = log sum_v e^(z_v)                               entropy = -sum_v p_v log p_v
    dz = sum_k g_k (1_k - p) + g_lse p - g_entropy p (log p + entropy)
    """
    x, w, labels = np.asarray(x).astype(F64), np.asarray(w).astype(F64), np.asarray(labels)
    w = w if w_layout == "hv" else w.T
    batch, (hidden, vocab) = x.shape[:-1], w.shape
    tokens = int(np.prod(batch))
    y = labels.reshape(tokens, int(np.prod(labels.shape[len(batch) :])))
    taking_part = y != ignore_index
    if where is not None:
        taking_part = taking_part & np.asarray(where).reshape(-1, 1).astype(bool)
    counted = taking_part.any(axis=1)
    bad = taking_part & ((y < 0) | (y >= vocab))
    safe = np.where(taking_part & ~bad, y, 0)
    x = np.where(counted[:, None], x.reshape(tokens, hidden), 0.0)
    scale, tau = F64(logit_scale), np.asarray(temperature).astype(F64)
    tau = np.where(counted, np.broadcast_to(tau, batch).reshape(-1), 1.0)[:, None]

    affine = x @ w + (0.0 if bias is None else np.asarray(bias).astype(F64))
    capped, slope = scale * affine, np.ones((tokens, vocab))
    if logit_soft_cap is not None:
        tanh = np.tanh(capped / logit_soft_cap)
        capped, slope = logit_soft_cap * tanh, 1.0 - tanh**2
    z = capped / tau
    top = z.max(axis=1, keepdims=True)
    lse = top + np.log(np.exp(z - top).sum(axis=1, keepdims=True))
    log_p = (z - top) - np.log(np.exp(z - top).sum(axis=1, keepdims=True))
    p = np.exp(log_p)
    entropy = -_product(p, log_p).sum(axis=1, keepdims=True)
    logprob = np.take_along_axis(log_p, safe, axis=1)
    outputs = {
        "logprob": np.where(bad, NAN, np.where(taking_part, logprob, 0.0)).reshape(labels.shape),
        "entropy": np.where(counted, entropy[:, 0], 0.0).reshape(batch),
        "lse": np.where(counted, lse[:, 0], 0.0).reshape(batch),
    }

    given = {n: np.asarray(g).astype(F64) for n, g in cotangents.items()}
    g = np.broadcast_to(given.get("logprob", 0.0), labels.shape).reshape(y.shape)
    g = np.where(taking_part, g, 0.0)
    g_lse, g_entropy = (
        np.where(counted, np.broadcast_to(given.get(n, 0.0), batch).reshape(-1), 0.0)[:, None]
        for n in ("lse", "entropy")
    )
    by_entropy = _product(p, log_p + entropy)
    dz = g_lse * p - g_entropy * by_entropy
    size = np.abs(g_lse) * p + np.abs(g_entropy) * _product(p, np.abs(log_p) + entropy)
    for k in range(y.shape[1]):
        towards = (np.arange(vocab) == safe[:, k, None]) - p
        dz = dz + g[:, k, None] * towards
        size = size + np.abs(g[:, k, None] * towards)
    dz = np.where((bad & (g != 0)).any(axis=1, keepdims=True), NAN, dz)
    daffine = scale * _product(dz, slope) / tau
    # The slope is itself a sum, 1 - tanh^2.
    doubt = np.abs(scale) * size * (2.0 - slope) / tau
    by_tau = -_product(dz, z).sum(axis=1) / tau[:, 0]
    tau_doubt = _product(size, np.abs(z)).sum(axis=1) / tau[:, 0]
    per_token = np.ndim(temperature) > 0
    return Truth(
        outputs,
        gradients={
            "x": (daffine @ w.T).reshape(*batch, hidden),
            "w": x.T @ daffine if w_layout == "hv" else daffine.T @ x,
            "bias": daffine.sum(axis=0),
            "temperature": by_tau.reshape(batch) if per_token else by_tau.sum(),
            "logit_scale": _product(daffine / scale, affine).sum(),
        },
        scale={
            "x": np.max(doubt @ np.abs(w).T, initial=0.0),
            "w": np.max(np.abs(x).T @ doubt, initial=0.0),
            "bias": np.max(doubt.sum(axis=0), initial=0.0),
            "temperature": np.max(tau_doubt, initial=0.0) if per_token else tau_doubt.sum(),
            "logit_scale": _product(doubt / np.abs(scale), np.abs(affine)).sum(),
        },
        condition=np.max(np.abs(x) @ np.abs(w) * np.abs(scale) / tau, initial=0.0),
    )


@pytest.mark.parametrize("layout", ["hv", "vh"])
@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("candidates", [0, 3])
def test_truth_equals_central_differences(candidates, per_token, cap, layout):
    """Every entry of every gradient, for random cotangents of the three outputs at once."""
    rng = np.random.default_rng(7)
    batch, hidden, vocab = (2, 3), 4, 6
    labels = rng.integers(0, vocab, (*batch, candidates) if candidates else batch)
    labels.flat[2] = -100
    w = rng.normal(size=(hidden, vocab))
    point = {
        "x": rng.normal(size=(*batch, hidden)),
        "w": w if layout == "hv" else w.T,
        "bias": rng.normal(size=vocab),
        "temperature": rng.uniform(0.5, 2.0, batch if per_token else ()),
        "logit_scale": np.array(0.7),
    }
    fixed = {"labels": labels, "logit_soft_cap": cap, "w_layout": layout}
    fixed["where"] = np.array([[True, True, True], [False, True, True]])
    g = {n: rng.normal(size=labels.shape if n == "logprob" else batch) for n in OUTPUTS}

    def value(moved):
        outputs = truth(**point | moved, **fixed, cotangents={}).outputs
        return sum(np.sum(g[n] * outputs[n]) for n in OUTPUTS)

    gradients = truth(**point, **fixed, cotangents=g).gradients
    for name, at in point.items():
        expected = np.zeros_like(at)
        for index in np.ndindex(at.shape):
            step = np.zeros_like(at)
            step[index] = 1e-5
            expected[index] = (value({name: at + step}) - value({name: at - step})) / 2e-5
        close(gradients[name], expected, 2e-9, 2e-7, name)


# --- the library and the plain computation --------------------------------------------------------


@functools.cache
def _compiled(implementation, static, outputs):
    """`(arrays, cotangents of outputs) -> LogProbs, gradients by name`; None is `plain`."""
    function = (
        plain
        if implementation is None
        else functools.partial(fused_linear_logprob, implementation=implementation)
    )

    @jax.jit
    def run(arrays, cotangents):
        wanted = {n: a for n, a in arrays.items() if n in DIFFERENTIATED}
        fixed = {n: a for n, a in arrays.items() if n not in DIFFERENTIATED}

        def chosen(wanted):
            out = function(**wanted, **fixed, **dict(static))
            return {n: getattr(out, n) for n in outputs}, out

        _, vjp, out = jax.vjp(chosen, wanted, has_aux=True)
        return out, vjp(cotangents)[0]

    return run


def plain(x, w, labels, *, entropy, backward="recompute", **options):
    """Through full float32 logits, for JAX to differentiate."""
    del entropy, backward
    return _plain(x, w, labels, **options)


def _plain(
    x,
    w,
    labels,
    *,
    bias=None,
    where=None,
    ignore_index=-100,
    logit_soft_cap=None,
    logit_scale=1.0,
    temperature=1.0,
    w_layout="hv",
    compute_dtype=None,
):
    batch, rows = x.shape[:-1], x.reshape(-1, x.shape[-1])
    y = labels.reshape(len(rows), -1)
    contract = ((1,), (0 if w_layout == "hv" else 1,))
    z = _matmul(rows, w, contract, jnp.dtype(compute_dtype or x.dtype))
    removed = jnp.zeros(z.shape[1:], bool) if bias is None else jnp.isinf(bias)
    if bias is not None:
        z = z + jnp.where(removed, 0.0, bias.astype(jnp.float32))[None]
    z = logit_scale * z
    if logit_soft_cap is not None:
        z = logit_soft_cap * jnp.tanh(z / logit_soft_cap)
    z = z / (temperature.reshape(-1, 1) if jnp.ndim(temperature) else temperature)
    z = jnp.where(removed[None], -jnp.inf, z)  # here, where no derivative multiplies it
    taking_part = y != ignore_index
    if where is not None:
        taking_part = taking_part & where.reshape(-1, 1)
    counted = jnp.any(taking_part, axis=1)
    log_p = jax.nn.log_softmax(z, axis=1)
    # 0 * -inf, in the value and in the derivative of the product.
    finite = jnp.where(jnp.isfinite(log_p), log_p, 0.0)
    entropy = -jnp.sum(jnp.exp(log_p) * finite, axis=1)
    logprob = jnp.take_along_axis(log_p, jnp.where(taking_part, y, 0), axis=1)
    masked = lambda v: jnp.where(counted, v, 0.0).reshape(batch)  # noqa: E731
    logprob = jnp.where(taking_part, logprob, 0.0).reshape(labels.shape)
    return _Plain(logprob, masked(entropy), masked(jax.nn.logsumexp(z, axis=1)))


@functools.partial(jax.tree_util.register_dataclass, data_fields=OUTPUTS, meta_fields=())
@dataclass(frozen=True)
class _Plain:
    logprob: jax.Array
    entropy: jax.Array
    lse: jax.Array


def solve(implementation, x, w, labels, cotangents=None, **options):
    """`(LogProbs, gradients by name)` under jit; arrays are traced, the rest is static.

    `cotangents` by output; without them the outputs are summed. Entropy is on unless it is False.
    """
    arrays = {"x": jnp.asarray(x), "w": jnp.asarray(w), "labels": jnp.asarray(labels)}
    static = {"entropy": True}
    for name, value in options.items():
        if isinstance(value, np.ndarray | np.generic | jax.Array):
            arrays[name] = jnp.asarray(value)
        else:
            static[name] = value
    if cotangents is None:
        cotangents = dict.fromkeys(OUTPUTS if static["entropy"] else ("logprob", "lse"), 1.0)
    outputs = tuple(n for n in OUTPUTS if n in cotangents)
    run = _compiled(implementation, tuple(sorted(static.items())), outputs)
    batch = arrays["x"].shape[:-1]
    shapes = {n: arrays["labels"].shape if n == "logprob" else batch for n in outputs}
    given = {n: jnp.broadcast_to(jnp.float32(cotangents[n]), shapes[n]) for n in outputs}
    return run(arrays, given)


def solve_and_compare(backend, x, w, labels, cotangents=None, atol=2e-6, rtol=2e-6, **options):
    """`solve` with `w [V, H]`, every number compared with the truth."""
    options.setdefault("w_layout", "vh")
    out, grads = solve(backend.name, x, w, labels, cotangents, **options)
    right = {n: v for n, v in options.items() if n not in STATIC}
    expected = truth(x, w, labels, cotangents or dict.fromkeys(OUTPUTS, 1.0), **right)
    for name in OUTPUTS:
        assert getattr(out, name).dtype == jnp.float32
        close(getattr(out, name), expected.outputs[name], atol, rtol, name)
    for name, got in grads.items():
        close(got, expected.gradients[name], atol, rtol, "d" + name)
    return out, grads


# --- conformance ----------------------------------------------------------------------------------

OPTIONS = {
    "none": {},
    "removed": {"arrays": ("removed", "temperatures"), "logit_scale": np.float32(0.6)},
    "ignore_a_real_class": {"ignore_index": 2},
    "soft_cap": {"logit_soft_cap": 2.0, "logit_scale": np.float32(0.6)},
    "static_temperature": {"temperature": 1.7},
    "traced_temperature": {"temperature": np.float32(0.6)},
    "temperatures": {"arrays": ("temperatures",)},
    "everything": {
        "arrays": ("bias", "where", "temperatures"),
        "logit_soft_cap": 15.0,
        "logit_scale": np.float32(0.6),
        "w_layout": "vh",
    },
}
OPTIONS |= {
    "candidates": {"k": 5},
    "all_candidates": OPTIONS["everything"] | {"k": 3},
    "stored": {"backward": "stored"},
    "all_stored": OPTIONS["everything"] | {"backward": "stored"},
    "stored_candidates": OPTIONS["removed"] | {"backward": "stored", "k": 4},
}


@dataclass(frozen=True)
class Case:
    shape: str
    option: str
    dtype: str = "float32"
    compute_dtype: str | None = None

    def __str__(self):
        parts = [self.dtype, self.shape, self.option]
        return "-".join(parts + (["compute_" + self.compute_dtype] if self.compute_dtype else []))


def _cases():
    for option in OPTIONS:
        yield Case("ragged", option)
    for shape in ("wide", "tiny", "peaked", "offset"):
        yield Case(shape, "everything")
    for shape in ("peaked", "offset"):
        yield Case(shape, "none")
    yield Case("peaked", "candidates")
    yield Case("peaked", "all_stored")
    for dtype in ("bfloat16", "float16"):
        for option in ("none", "everything", "all_candidates", "all_stored"):
            yield Case("ragged", option, dtype)
        yield Case("peaked", "everything", dtype)
    yield Case("ragged", "everything", compute_dtype="bfloat16")


@functools.cache
def make_problem(case):
    """`(arguments, cotangents)`; float arrays already hold values of the case's dtype."""
    batch, hidden, vocab = SHAPES[case.shape]
    option = dict(OPTIONS[case.option])
    drawn, k = option.pop("arrays", ()), option.pop("k", 0)
    rng = np.random.default_rng(zlib.crc32(f"{case.shape}{case.option}".encode()))
    x, w = rng.normal(size=(*batch, hidden)), rng.normal(size=(hidden, vocab)) / np.sqrt(hidden)
    if case.shape == "peaked":
        w = w * 20.0
    if case.shape == "offset":
        x[..., 0], w[0] = 1.0, 1000.0
    labels = rng.integers(0, vocab, (*batch, k) if k else batch)
    if case.shape == "peaked":
        best = np.argmax(x @ w, axis=-1)
        confident = rng.random(batch) < 0.5
        labels = np.where(
            confident[..., None] if k else confident, best[..., None] if k else best, labels
        )
    bias = rng.normal(size=vocab)
    if "removed" in drawn:
        gone = np.arange(vocab) % 16 < 3
        gone[64:128] = True  # a whole tile of the suite's
        bias[gone] = -INF
        kept = np.flatnonzero(~gone)
        labels = kept[labels % kept.size]
    if k:
        labels[..., -1] = labels[..., 0]  # counts twice
    if case.shape != "tiny":
        labels = np.where(rng.random(labels.shape) < 0.2, option.get("ignore_index", -100), labels)
    dtype = jnp.dtype(case.dtype)
    arguments = {
        "x": x.astype(dtype),
        "w": (w.T if option.get("w_layout") == "vh" else w).astype(dtype),
        "labels": labels.astype(np.int32),
        **option,
    }
    if "bias" in drawn or "removed" in drawn:
        arguments["bias"] = bias.astype(dtype)
    if "where" in drawn:
        arguments["where"] = rng.random(batch) < 0.8 if case.shape != "tiny" else np.ones(1, bool)
    if "temperatures" in drawn:
        arguments["temperature"] = rng.uniform(0.5, 2.0, batch).astype(np.float32)
    if case.compute_dtype:
        arguments["compute_dtype"] = case.compute_dtype
    shapes = {n: labels.shape if n == "logprob" else batch for n in OUTPUTS}
    return arguments, {n: rng.normal(size=s).astype(np.float32) for n, s in shapes.items()}


@functools.cache
def _plain_result(case, outputs):
    arguments, cotangents = make_problem(case)
    return solve(None, **arguments, cotangents={n: cotangents[n] for n in outputs})


def _check(backend, case, outputs):
    backend.require(case.compute_dtype or case.dtype)
    arguments, cotangents = make_problem(case)
    cotangents = {n: cotangents[n] for n in outputs}
    out, grads = solve(backend.name, **arguments, cotangents=cotangents)
    ordinary, ordinary_grads = _plain_result(case, outputs)
    exact = {n: a for n, a in arguments.items() if n not in STATIC}
    if case.compute_dtype:
        exact |= {n: exact[n].astype(jnp.dtype(case.compute_dtype)) for n in ("x", "w")}
    expected = truth(**exact, cotangents=cotangents)

    condition = 1.0 + expected.condition
    faults = []
    for name in OUTPUTS:
        got, right = getattr(out, name), expected.outputs[name]
        assert got.dtype == jnp.float32
        scale = condition * (1.0 + np.max(np.abs(right)))
        faults += _fault(name, got, getattr(ordinary, name), right, scale)
    assert set(grads) == set(ordinary_grads)
    for name, got in grads.items():
        assert got.dtype == arguments[name].dtype, f"gradient of {name} is {got.dtype}"
        epsilon = EPSILON * condition
        if arguments.get("backward") == "stored":
            epsilon += float(jnp.finfo(jnp.bfloat16).eps)
        if name == "logit_scale" and "logit_soft_cap" in arguments:  # read off dx and its rounding
            epsilon += float(jnp.finfo(case.compute_dtype or case.dtype).eps)
        right, scale = expected.gradients[name], expected.scale[name]
        faults += _fault("d" + name, got, ordinary_grads[name], right, scale, epsilon)
    assert not faults, "\n".join(faults)
    return out, grads


@pytest.mark.parametrize("case", list(_cases()), ids=str)
def test_conformance(backend, case):
    """Outputs, and gradients of all three at once, are as accurate as the plain computation's."""
    out, _ = _check(backend, case, OUTPUTS)
    vocab = SHAPES[case.shape][2]
    assert np.all(np.asarray(out.logprob) <= 0)
    assert np.all(np.asarray(out.entropy) >= 0)
    assert np.all(np.asarray(out.entropy) <= np.log(vocab) * (1 + 2.0**-22))


@pytest.mark.parametrize("option", ["none", "all_candidates"])
@pytest.mark.parametrize("output", OUTPUTS)
def test_one_output_alone(backend, output, option):
    """The gradient of one output, the others without a cotangent; none of the three is 0."""
    _, grads = _check(backend, Case("ragged", option), (output,))
    for name, got in grads.items():
        assert np.any(np.asarray(got) != 0), name


def test_a_gradient_is_linear_in_the_cotangents(backend):
    """AI-Hypercomputer/maxtext#4699: scaled for the head and not for the body, or right at 1 only;
    the three add up."""
    arguments, cotangents = make_problem(Case("ragged", "everything"))

    def gradients(**factors):
        given = {n: factors.get(n, 0) * g for n, g in cotangents.items()}
        return solve(backend.name, **arguments, cotangents=given)[1]

    alone = [gradients(**{n: 1}) for n in OUTPUTS]
    for factors in ((1, 1, 1), (3, -2, 0.5), (1 / 65528, 0, 0), (0, 0, 0)):
        joint = gradients(**dict(zip(OUTPUTS, factors, strict=True)))
        for name, got in joint.items():
            parts = [f * np.asarray(a[name], F64) for f, a in zip(factors, alone, strict=True)]
            size = max(np.max(np.abs(part)) for part in parts)
            close(got, sum(parts), 3e-6 * size, name=name)


@pytest.mark.parametrize("option", ["none", "removed"])
def test_stored_changes_no_output(backend, option):
    """What the forward keeps is for the backward alone."""
    arguments, cotangents = make_problem(Case("ragged", option))
    kept, _ = solve(backend.name, **arguments, cotangents=cotangents, backward="stored")
    again, _ = solve(backend.name, **arguments, cotangents=cotangents)
    for name in OUTPUTS:
        close(getattr(kept, name), getattr(again, name), 1e-6, 1e-6, name)


@pytest.mark.parametrize("temperature", [0.05, 0.3])
def test_stored_zeros_of_a_soft_cap_stay_finite(backend, temperature):
    """e^(z-m) underflows while the cap still slopes: no tanh can be read off a 0."""
    rng = np.random.default_rng(4)
    x, w = f32(*(10 * rng.normal(size=(8, 16)))), f32(*rng.normal(size=(80, 16)))
    options = {"logit_soft_cap": 30.0, "temperature": np.float32(temperature), "w_layout": "vh"}
    labels = np.argmax(x @ w.T, axis=1).astype(np.int32)
    _, kept = solve(backend.name, x, w, labels, **options, backward="stored")
    expected = truth(x, w, labels, dict.fromkeys(OUTPUTS, 1.0), **options)
    for name, got in kept.items():
        close(got, expected.gradients[name], expected.scale[name] * 2.0**-7, name=name)


# --- exact numbers --------------------------------------------------------------------------------


def eye(n, dtype=np.float32):
    """The weight with which the logits are `x` itself."""
    return np.eye(n).astype(dtype)


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


# --- masks and labels -----------------------------------------------------------------------------


@pytest.mark.parametrize("mask", ["ignored", "where"])
@pytest.mark.parametrize("several", [False, True], ids=["one", "candidates"])
def test_masked_rows_are_zeros_whatever_they_hold(backend, several, mask):
    """NVIDIA-NeMo/Megatron-Bridge#3117: 0 * NaN reached the sum or the gradient of the weight."""
    rng = np.random.default_rng(1)
    x, w = f32(*rng.normal(size=(40, 3))), f32(*rng.normal(size=(70, 3)))
    labels = rng.integers(0, 70, (40, 2) if several else 40).astype(np.int32)
    keep = np.arange(40) % 20 == 19  # whole blocks have no token
    x[~keep] = NAN
    temperature = np.where(keep, 0.7, NAN).astype(np.float32)
    options = {
        "temperature": temperature,
        "where": np.ones(40, bool),
        "bias": np.zeros(70, np.float32),
    }
    if mask == "where":
        options["where"] = keep
    else:
        labels[~keep] = -100
    g = {n: np.where(keep, 1.0, NAN).astype(np.float32) for n in OUTPUTS}
    g["logprob"] = g["logprob"][:, None] if several else g["logprob"]
    out, grads = solve_and_compare(backend, x, w, labels, g, **options)
    for name in OUTPUTS:
        np.testing.assert_array_equal(np.asarray(getattr(out, name))[~keep], 0)
    for name in ("x", "temperature"):
        np.testing.assert_array_equal(np.asarray(grads[name])[~keep], 0)


def test_no_counted_token_is_zero_everywhere(backend):
    """linkedin/Liger-Kernel#177: every token masked."""
    x = np.full((4, 3), NAN, np.float32)
    options = {"bias": np.zeros(5, np.float32), "temperature": np.ones(4, np.float32)}
    out, grads = solve(backend.name, x, np.ones((3, 5), np.float32), i32(*[-100] * 4), **options)
    for array in (*out, *grads.values()):
        np.testing.assert_array_equal(array, np.zeros_like(array))


def test_a_masked_token_adds_to_no_gradient(backend):
    """alibaba/ROLL#444: masked tokens in one of two sums; ignored and masked is out once."""
    x, mask = f32([0, 0], [9, 0], [0, 0], [-9, 0]), np.array([True, False, True, False])
    for where in (mask, mask.astype(np.int32)):
        out, grads = solve_and_compare(backend, x, eye(2), i32(0, -100, 0, 0), where=where)
        close(out.logprob, np.where(mask, -0.693147, 0), 1e-6)
        np.testing.assert_array_equal(grads["x"][1::2], np.zeros((2, 2)))


@pytest.mark.parametrize(
    ("label", "ignore"),
    [(128, -100), (-1, -100), (-100, -1), (2**31 - 1, -100)],
)
def test_label_outside_the_vocabulary_is_loud(backend, label, ignore):
    """google-deepmind/optax#1185: a wrapped or clipped class. Entropy and lse need no label."""
    x = np.broadcast_to(np.arange(128) / 16, (3, 128)).astype(np.float32)
    for labels in (i32(7, label, 100), i32([7, 1], [3, label], [100, 2])):
        several = labels.ndim == 2
        g = np.ones(labels.shape, np.float32)
        given = {"logprob": g, "entropy": 1.0}
        out, grads = solve_and_compare(backend, x, eye(128), labels, given, ignore_index=ignore)
        assert np.isnan(out.logprob).tolist() == (
            [[False, False], [False, True], [False, False]] if several else [False, True, False]
        )
        assert np.isnan(grads["x"]).any(axis=1).tolist() == [False, True, False]
        g[1] = 0
        _, grads = solve_and_compare(
            backend, x, eye(128), labels, given | {"logprob": g}, ignore_index=ignore
        )
        assert all(np.all(np.isfinite(a)) for a in grads.values())


def test_candidates_are_ignored_one_by_one(backend):
    """A token counts if any of its candidates does; a class that is the mark never counts."""
    rng = np.random.default_rng(2)
    x, w = f32(*rng.normal(size=(3, 4))), f32(*rng.normal(size=(6, 4)))
    labels = i32([1, -100, 5], [-100, -100, -100], [3, 3, -100])
    out, grads = solve_and_compare(backend, x, w, labels)
    assert (np.asarray(out.logprob) == 0).tolist() == (labels == -100).tolist()
    assert (np.asarray(out.entropy) == 0).tolist() == [False, True, False]
    np.testing.assert_array_equal(grads["x"][1], np.zeros(4))
    one, _ = solve_and_compare(backend, x, w, labels[:, :1])
    close(one.logprob[:, 0], np.asarray(out.logprob)[:, 0], 1e-6)


# --- degenerate shapes ----------------------------------------------------------------------------


@pytest.mark.parametrize("backward", ["recompute", "stored"])
@pytest.mark.parametrize("several", [False, True], ids=["one", "candidates"])
def test_no_tokens(backend, several, backward):
    """linkedin/Liger-Kernel#1289: a division by zero in the block arithmetic."""
    for batch in ((0,), (2, 0)):
        x, w = np.zeros((*batch, 8), np.float32), np.ones((8, 5), np.float32)
        labels = np.zeros((*batch, 3) if several else batch, np.int32)
        out, grads = solve(backend.name, x, w, labels, backward=backward)
        assert out.logprob.shape == labels.shape
        assert out.entropy.shape == out.lse.shape == batch
        np.testing.assert_array_equal(grads["w"], np.zeros_like(w))
        assert grads["x"].shape == x.shape


@pytest.mark.parametrize("backward", ["recompute", "stored"])
def test_one_token_or_one_class(backend, backward):
    """triton-lang/triton#3709: dimensions below the smallest tile; a single certain class."""
    x, w = f32([1, -1]), f32([1, 0], [0, 1], [1, 1])
    out, grads = solve(
        backend.name, x, w, i32(2), {"logprob": -1.0}, bias=np.zeros(3, np.float32),
        w_layout="vh", backward=backward,
    )  # fmt: skip
    close(out.logprob, [-1.407606], 1e-6)
    close(grads["bias"], [0.665241, 0.090031, -0.755272], 1e-6 if backward == "recompute" else 3e-3)
    out, grads = solve(backend.name, x, w[:1], i32(0), w_layout="vh", backward=backward)
    assert out.logprob == out.entropy == 0
    close(grads["w"], [[1, -1]])  # of lse alone
    out, _ = solve(backend.name, x[0], w, np.int32(2), w_layout="vh", backward=backward)
    assert out.logprob.shape == out.entropy.shape == ()


# --- bad input ------------------------------------------------------------------------------------

# name: (arguments replaced, error, what the message must hold)
BAD = {
    "temperature of another shape": ({"temperature": np.ones(5, np.float32)}, ValueError, ["[5]"]),
    "temperature column": ({"temperature": jnp.ones((6, 1))}, ValueError, ["[6, 1]", "[6]"]),
    "temperature integers": ({"temperature": np.ones(6, np.int32)}, TypeError, ["int32[6]"]),
    "temperature zero": ({"temperature": 0}, ValueError, ["0"]),
    "temperature negative": ({"temperature": -1.0}, ValueError, ["-1.0"]),
    "temperature nan": ({"temperature": np.nan}, ValueError, ["nan"]),
    "labels floats": ({"labels": np.zeros(6, np.float32)}, TypeError, ["float32[6]"]),
    "labels of another shape": ({"labels": np.zeros(5, np.int32)}, ValueError, ["int32[5]"]),
    "labels of other tokens": ({"labels": np.zeros((5, 3), np.int32)}, ValueError, ["labels", "5"]),
    "labels with no candidate": ({"labels": np.zeros((6, 0), np.int32)}, ValueError, ["[6, 0]"]),
    "labels with too many axes": ({"labels": np.zeros((6, 2, 2), np.int32)}, ValueError, ["2, 2]"]),
    "x of another width": ({"x": np.ones((6, 5), np.float32)}, ValueError, ["[6, 5]", "w"]),
    "w vector": ({"w": np.ones(4, np.float32)}, ValueError, ["[4]"]),
    "w empty": ({"w": np.ones((4, 0), np.float32)}, ValueError, ["[4, 0]"]),
    "bias per token": ({"bias": np.zeros(6, np.float32)}, ValueError, ["float32[6]"]),
    "where per candidate": ({"where": np.ones((6, 1), bool)}, ValueError, ["bool[6, 1]"]),
    "where floats": ({"where": np.ones(6, np.float32)}, TypeError, ["float32[6]"]),
    "ignore_index fraction": ({"ignore_index": 1.5}, TypeError, ["1.5"]),
    "logit_soft_cap zero": ({"logit_soft_cap": 0.0}, ValueError, ["0.0"]),
    "logit_scale zero": ({"logit_scale": 0}, ValueError, ["0"]),
    "logit_scale per token": ({"logit_scale": jnp.ones(6)}, TypeError, ["float32[6]"]),
    "backward": ({"backward": "fused"}, ValueError, ["'fused'", "'stored'"]),
    "w_layout": ({"w_layout": "vv"}, ValueError, ["'vv'"]),
    "compute_dtype": ({"compute_dtype": "bf17"}, TypeError, ["bf17"]),
    "implementation": ({"implementation": "cuda"}, ValueError, ["cuda", "xla"]),
    "label_smoothing": ({"label_smoothing": 0.1}, TypeError, []),
    "reduction": ({"reduction": "none"}, TypeError, []),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_raises_and_names_the_argument(name):
    """The message names the argument and prints its value, or its dtype and shape; so under jit."""
    changes, error, words = BAD[name]
    arrays = {
        "x": np.ones((6, 4), np.float32),
        "w": np.ones((4, 7), np.float32),
        "labels": np.zeros(6, np.int32),
    }
    options = {n: a for n, a in changes.items() if n not in arrays}
    arrays |= {n: a for n, a in changes.items() if n in arrays}

    def call(arrays):
        return fused_linear_logprob(**arrays, **options)

    for run in (call, functools.partial(jax.eval_shape, call)):
        with pytest.raises(error) as caught:
            run(arrays)
        for word in (name.split()[0], *words):
            assert word in str(caught.value), str(caught.value)


def test_traced_temperatures_are_not_checked(backend):
    """They cannot raise; a value <= 0 gives what the formula gives."""
    out, _ = solve(backend.name, f32([1, 2, 4]), eye(3), i32(0), temperature=np.float32(-1))
    close(out.logprob, [-1 - np.log(np.exp([-1.0, -2.0, -4.0]).sum())], 1e-6)


# --- transformations ------------------------------------------------------------------------------


def _per_token(backend, **options):
    return functools.partial(
        fused_linear_logprob, entropy=True, implementation=backend.name, **options
    )


def _transform_problem():
    rng = np.random.default_rng(3)
    x, w = f32(*rng.normal(size=(6, 4))), f32(*rng.normal(size=(4, 7)))
    t, g = f32(*rng.uniform(0.5, 2, 6)), f32(*rng.normal(size=(3, 6)))
    return x, w, rng.integers(0, 7, 6).astype(np.int32), t, g


def _objective(out, g):
    return sum(jnp.sum(v * gv) for v, gv in zip(out, g, strict=True))


@pytest.mark.parametrize("backward", ["recompute", "stored"])
def test_vmap_scan_and_checkpoint_equal_one_call(backend, backward):
    """jax-ml/jax#5832: a shared weight under `vmap` and `scan`; a temperature for every token."""
    backend.require_transforms()
    x, w, labels, t, g = _transform_problem()
    call = _per_token(backend, backward=backward)

    def whole(x, w, t):
        return _objective(call(x, w, labels, temperature=t), g)

    def by_vmap(x, w, t):
        one = lambda x, y, t: call(x, w, y, temperature=t)  # noqa: E731
        return _objective(jax.vmap(one)(x, labels, t), g)

    def by_scan(x, w, t):
        parts = jax.tree.map(lambda a: a.reshape(3, 2, *a.shape[1:]), (x, labels, t))
        one = lambda c, p: (c, call(p[0], w, p[1], temperature=p[2]))  # noqa: E731
        out = jax.lax.scan(one, 0, parts)[1]
        return _objective(jax.tree.map(lambda v: v.reshape(6), out), g)

    expected = jax.value_and_grad(whole, (0, 1, 2))(x, w, t)  # not jitted
    exact = truth(x, w, labels, dict(zip(OUTPUTS, g, strict=True)), temperature=t).gradients
    rounding = 1e-5 if backward == "recompute" else 2e-2
    for got, name in zip(expected[1], ("x", "w", "temperature"), strict=True):
        close(got, exact[name], rounding, name=name)
    for form in (jax.jit(whole), by_vmap, by_scan, jax.checkpoint(whole)):
        got = jax.jit(jax.value_and_grad(form, (0, 1, 2)))(x, w, t)
        jax.tree.map(functools.partial(close, atol=1e-5), got, expected)


def test_second_derivatives_and_forward_mode_raise(backend):
    """tensorflow/tensorflow#31700: zero second derivatives and no error."""
    x, w, labels, t, g = _transform_problem()

    def objective(t):
        return _objective(_per_token(backend)(x, w, labels, temperature=t), g)

    for derivative in (
        lambda: jax.grad(lambda t: jnp.sum(jax.grad(objective)(t)))(t),
        lambda: jax.jvp(objective, (t,), (t,)),
    ):
        with pytest.raises(TypeError, match="(?i)fused_linear|forward|second|reverse"):
            derivative()


def test_a_new_temperature_does_not_compile_anew(backend):
    """A float is static; an array, scalar or per token, is not."""
    x, w, labels, t, _ = _transform_problem()
    traces = []

    @jax.jit
    def call(t):
        traces.append(t.shape)
        return _per_token(backend)(x, w, labels, temperature=t).logprob

    for factor in (1, 2, 3):
        call(factor * t)
        call(jnp.float32(factor))
    assert traces == [(6,), ()]


# --- memory and work ------------------------------------------------------------------------------

BIG_T, BIG_H, BIG_V = 8192, 128, 131072


def _program(implementation, kind, gradients=(0, 1), k=None, **options):
    """The compiled program at `[8192, 128, 131072]`, per-token cotangents among its arguments."""
    shape = jax.ShapeDtypeStruct
    x, w = shape((BIG_T, BIG_H), jnp.bfloat16), shape((BIG_V, BIG_H), jnp.bfloat16)
    labels, g = shape((BIG_T, k) if k else (BIG_T,), jnp.int32), shape((BIG_T,), jnp.float32)

    def objective(x, w, labels, g):
        common = {"w_layout": "vh", "implementation": implementation}
        if kind == "ce":
            return jnp.sum(g * fused_linear_ce(x, w, labels, reduction="none", **common, **options))
        out = fused_linear_logprob(x, w, labels, **common, **options)
        value = jnp.sum(g * out.logprob) if k is None else jnp.sum(g[:, None] * out.logprob)
        return value if out.entropy is None else value + jnp.sum(g * out.entropy)

    step = jax.value_and_grad(objective, gradients) if gradients else objective
    return jax.jit(step).lower(x, w, labels, g).compile()


@pytest.mark.own_tiles
def test_entropy_costs_nothing_unless_asked_for(backend):
    """Without it the work is that of the cross-entropy; with it the row sums hold a moment more."""

    def flops(kind, **options):
        return _program(backend.name, kind, **options).cost_analysis()["flops"]

    for gradients in ((), (0, 1)):
        plain = flops("logprob", gradients=gradients)
        assert plain == pytest.approx(flops("ce", gradients=gradients), rel=1e-4)
        assert plain < flops("logprob", gradients=gradients, entropy=True)
    out = fused_linear_logprob(
        np.ones((2, 3), np.float32), eye(3), i32(0, 1), implementation=backend.name
    )
    assert out.entropy is None


@pytest.mark.own_tiles
@pytest.mark.parametrize("k", [None, 64])
def test_no_full_logits(backend, k):
    """NVIDIA-NeMo/Automodel#3907: a one-hot, a copy or saved chunks were [T, V] again."""
    if backend.hooks.full_logits:
        pytest.skip("holds full logits by design")
    compiled = _program(
        backend.name, "logprob", k=k, entropy=True, logit_soft_cap=30.0, temperature=0.7
    )
    gathered = 2**28 if k else 0
    assert compiled.memory_analysis().temp_size_in_bytes < 0.3e9 + gathered
    shapes = re.findall(r"\b(?:pred|[a-z]+\d+\w*)\[([\d,]+)\]", compiled.as_text())
    largest = max(np.prod([int(n) for n in dims.split(",")]) for dims in set(shapes))
    assert largest < BIG_T * BIG_V // 8


@pytest.mark.own_tiles
def test_stored_takes_the_memory_it_says_and_spares_a_product(backend):
    """T V 2 bytes more, and about a quarter fewer flops."""
    if backend.hooks.full_logits:
        pytest.skip("its logits are at hand in the backward either way")
    programs = [_program(backend.name, "logprob", backward=b) for b in ("recompute", "stored")]
    recompute, stored = (p.memory_analysis().temp_size_in_bytes for p in programs)
    assert stored - recompute == pytest.approx(BIG_T * BIG_V * 2, rel=0.1)
    recompute, stored = (p.cost_analysis()["flops"] for p in programs)
    assert 0.7 < stored / recompute < 0.85
