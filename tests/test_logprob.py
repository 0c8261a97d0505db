"""`fused_linear_logprob` against a float64 truth: outputs, and gradients for any cotangents.

The rule is that of `test_conformance`: the largest error of an array may be at most twice that of
`plain`, the same outputs through full float32 logits and JAX's own differentiation with GEMMs in
the same input dtype, plus `EPSILON` of what was summed. `backward="stored"` may add what it
documents, one rounding of e^(z-m) to bfloat16.
"""

import functools
import zlib
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import pytest
from logprob_truth import (
    F64,
    INF,
    OUTPUTS,
    STATIC,
    close,
    f32,
    solve,
    truth,
)
from test_conformance import EPSILON, SHAPES, _fault

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
