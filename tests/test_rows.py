"""Losses from logits: every backend against the float64 truth, and the public failures of the kind.

The rule is that of `test_conformance`: the largest error of an array may be at most twice that of
the plain float32 computation with JAX's own derivative, plus `EPSILON` of what was summed. A
gradient that a one-pass forward has rounded to bfloat16 is rounded again when a cotangent other
than 1 multiplies it.
"""

import functools
import zlib
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import row_oracle as oracle

import pallas_loss
from pallas_loss import fused_ce, fused_forward_kl, fused_reverse_kl, fused_soft_ce, tuning
from pallas_loss.backends import triton

EPSILON = 2.0**-21
KINDS = ("ce", "soft_ce_probs", "soft_ce", "reverse_kl", "forward_kl")
SHAPES = {
    "ragged": ((3, 11), 137),
    "wide": ((5,), 1000),
    "one": ((1,), 1),
    "peaked": ((2, 12), 67),
    "offset": ((24,), 67),
}
OPTIONS = {
    "none": {},
    "where": {"arrays": ("where",)},
    "weights": {"arrays": ("weights",)},
    "labels": {"arrays": ("labels",)},
    "temperature": {"temperature": np.float32(1.7)},
    "static_temperature": {"temperature": 0.6},
    "target_temperature": {"temperature": 1.3, "target_temperature": np.float32(0.7)},
    "everything": {"arrays": ("where", "weights", "labels"), "temperature": np.float32(1.7)},
}
CE_OPTIONS = {
    "class_weights": {"arrays": ("class_weights",)},
    "smoothing": {"label_smoothing": 0.1},
    "z_loss": {"z_loss": 1e-2},
    "soft_cap": {"logit_soft_cap": 2.0},
    "ce_everything": {
        "arrays": ("where", "weights", "class_weights"),
        "label_smoothing": 0.1,
        "z_loss": 1e-2,
        "logit_soft_cap": 15.0,
        "temperature": np.float32(1.7),
    },
}


@dataclass(frozen=True)
class Case:
    kind: str
    shape: str
    option: str
    reduction: str  # "normalizer" is a mean with an explicit denominator
    dtype: str = "float32"

    def __str__(self):
        return "-".join((self.kind, self.dtype, self.shape, self.option, self.reduction))


def _cases():
    for kind in KINDS:
        options = [*OPTIONS, *(CE_OPTIONS if kind == "ce" else ())]
        for option in options:
            if option == "target_temperature" and kind in ("ce", "soft_ce_probs"):
                continue
            yield Case(kind, "ragged", option, "mean")
            yield Case(kind, "ragged", option, "none")
        last = "ce_everything" if kind == "ce" else "everything"
        for reduction in ("sum", "normalizer"):
            yield Case(kind, "ragged", last, reduction)
        for shape in SHAPES:
            if shape != "ragged":
                yield Case(kind, shape, "none", "mean")
            for dtype in ("bfloat16", "float16"):
                yield Case(kind, shape, "none", "mean", dtype)
        for dtype in ("bfloat16", "float16"):
            yield Case(kind, "ragged", last, "none", dtype)


@functools.cache
def problem(case):
    """`(arrays, static, cotangent)` as NumPy."""
    batch, v = SHAPES[case.shape]
    option = dict((OPTIONS | CE_OPTIONS)[case.option])
    drawn = option.pop("arrays", ())
    rng = np.random.default_rng(zlib.crc32(f"{case.kind}{case.shape}{case.option}".encode()))
    dtype = jnp.dtype(case.dtype)
    z = rng.normal(size=(*batch, v)) * (20.0 if case.shape == "peaked" else 2.0)
    target = 0.5 * z + rng.normal(size=z.shape)
    if case.shape == "offset":
        z, target = np.round(z, 2) + 1000.0, target - 500.0
    if case.kind == "soft_ce_probs":  # of a mass that is not 1, with zeros
        target = np.where(rng.random(z.shape) < 0.5, 0.0, rng.random(z.shape) / v)
    labels = rng.integers(0, v, size=batch)
    if case.shape != "one":
        labels = np.where(rng.random(batch) < 0.2, -100, labels)
    arrays = {"logits": z.astype(dtype)}
    if case.kind == "ce" or "labels" in drawn:
        arrays["labels"] = labels.astype(np.int32)
    if case.kind != "ce":
        arrays["target"] = target.astype(dtype)
    optional = {
        "where": rng.random(batch) < 0.8,
        "weights": np.where(rng.random(batch) < 0.2, 0, rng.uniform(0.2, 2, batch)).astype("f4"),
        "class_weights": rng.uniform(0.2, 2.0, v).astype(np.float32),
    }
    arrays |= {n: a for n, a in optional.items() if n in drawn}
    for name in ("temperature", "target_temperature"):
        if isinstance(option.get(name), np.float32):
            arrays[name] = option.pop(name)
    if case.reduction == "normalizer":
        arrays["normalizer"] = np.float32(17.5)
    option["reduction"] = "mean" if case.reduction == "normalizer" else case.reduction
    g = rng.normal(size=batch) if case.reduction == "none" else np.asarray(-1.7)
    return arrays, option, g.astype(np.float32)


def plain(kind, logits, target=None, labels=None, *, temperature=1.0, target_temperature=None, **o):
    """The loss as a user would write it in float32, for JAX to differentiate."""
    batch, v = logits.shape[:-1], logits.shape[-1]
    raw = logits.astype(jnp.float32).reshape(-1, v)
    cap = o.get("logit_soft_cap")
    z = (cap * jnp.tanh(raw / cap) if cap else raw) / temperature
    logp = jax.nn.log_softmax(z, axis=1)
    flat = lambda name, other: other if o.get(name) is None else o[name].reshape(-1)  # noqa: E731
    weights = flat("weights", jnp.ones(z.shape[0]))
    counted = (weights != 0) & flat("where", jnp.ones(z.shape[0], bool))
    cw_label = jnp.ones(z.shape[0])
    if labels is not None:
        counted = counted & (labels.reshape(-1) != -100)
    if kind == "ce":
        y = jnp.where(counted, labels.reshape(-1), 0)
        e, cw = o.get("label_smoothing", 0.0), o.get("class_weights")
        cw = jnp.ones(v) if cw is None else cw
        cw_label = cw[y]
        nll = -jnp.take_along_axis(logp, y[:, None], axis=1)[:, 0]
        token = (1 - e) * cw_label * nll - e / v * (logp @ cw)
        token = token + o.get("z_loss", 0.0) * jax.nn.logsumexp(z, axis=1) ** 2
    else:
        t = jax.lax.stop_gradient(target.astype(jnp.float32).reshape(-1, v))
        if kind == "soft_ce_probs":
            token = -jnp.sum(t * logp, axis=1)
        else:
            tau = temperature if target_temperature is None else target_temperature
            logq = jax.nn.log_softmax(t / jax.lax.stop_gradient(tau), axis=1)
            token = {
                "soft_ce": lambda: -jnp.sum(jnp.exp(logq) * logp, axis=1),
                "forward_kl": lambda: jnp.sum(jnp.exp(logq) * (logq - logp), axis=1),
                "reverse_kl": lambda: jnp.sum(jnp.exp(logp) * (logp - logq), axis=1),
            }[kind]()
    token = jnp.where(counted, weights * token, 0.0)
    if o["reduction"] == "none":
        return token.reshape(batch)
    if o["reduction"] == "sum":
        return jnp.sum(token)
    n = o.get("normalizer")
    n = jnp.sum(jnp.where(counted, weights * cw_label, 0.0)) if n is None else n
    return jnp.sum(token) / n


def library(kind, logits, target=None, labels=None, **o):
    if kind == "ce":
        return fused_ce(logits, labels, **o)
    if kind == "soft_ce_probs":
        return fused_soft_ce(logits, target, labels=labels, **o)
    f = {"soft_ce": fused_soft_ce, "reverse_kl": fused_reverse_kl, "forward_kl": fused_forward_kl}
    return f[kind](logits, target_logits=target, labels=labels, **o)


def run(case, implementation):
    """`(loss, gradients by name)` of a backend, or of `plain` for None."""
    arrays, static, g = problem(case)
    wanted = [n for n in ("logits", "weights", "temperature") if n in arrays]

    @jax.jit
    def gradients(arrays, g):
        fixed = {n: a for n, a in arrays.items() if n not in wanted}

        def loss(moving):
            if implementation is None:
                return plain(case.kind, **fixed, **moving, **static)
            return library(case.kind, **fixed, **moving, **static, implementation=implementation)

        value, vjp = jax.vjp(loss, {n: arrays[n] for n in wanted})
        return value, vjp(g)[0]

    return jax.tree.map(np.asarray, gradients(jax.tree.map(jnp.asarray, arrays), g))


@functools.cache
def _plain_and_truth(case):
    arrays, static, g = problem(case)
    return run(case, None), oracle.evaluate(case.kind, **arrays, **static, cotangent=g)


def _backend_context(name):
    if name == "triton":  # ragged blocks, in Pallas's own interpreter
        return tuning.override(tuning.TritonRowConfig(64, 1, interpret=True))
    return tuning.override(tuning.XlaConfig(token_tile=7, vocab_tile=64))


def _check(case, name):
    with _backend_context(name):
        value, grads = run(case, name)
    (plain_value, plain_grads), truth = _plain_and_truth(case)
    assert value.dtype == np.float32
    condition = 1.0 + float(np.max(np.abs(np.asarray(problem(case)[0]["logits"], np.float64))))
    found = {"loss": (value, plain_value, truth.loss)}
    found |= {n: (g, plain_grads[n], getattr(truth, n)) for n, g in grads.items()}
    for what, (got, ordinary, right) in found.items():
        got, ordinary = got.astype(np.float64), ordinary.astype(np.float64)
        assert got.shape == np.shape(right), what
        assert np.all(np.isfinite(got)), what
        error = np.max(np.abs(got - right), initial=0.0)
        bound = 2 * np.max(np.abs(ordinary - right), initial=0.0)
        bound += EPSILON * condition * truth.scale[what]
        if what == "logits" and case.dtype == "bfloat16" and case.reduction != "none":
            bound += float(jnp.finfo(case.dtype).eps) / 2 * np.max(np.abs(right))
        assert error <= bound, f"{what}: error {error:.3g}, bound {bound:.3g}"
    assert grads["logits"].dtype == case.dtype


@pytest.mark.parametrize("case", list(_cases()), ids=str)
def test_conformance(case):
    """Value and gradients of logits, weights and temperature."""
    _check(case, "xla")


@pytest.mark.parametrize("case", [c for c in _cases() if "everything" in c.option], ids=str)
def test_reference(case):
    """The same of all rows at once, where every option is given."""
    _check(case, "reference")


TRITON_CASES = [
    *(Case(kind, "ragged", "everything", "mean", "bfloat16") for kind in KINDS),
    *(Case(kind, "ragged", "everything", "none") for kind in KINDS),
    *(Case("ce", shape, "none", "mean") for shape in SHAPES),
    Case("ce", "ragged", "ce_everything", "mean"),
    Case("ce", "ragged", "smoothing", "none"),
]


@pytest.mark.parametrize("case", TRITON_CASES, ids=str)
def test_triton(case):
    """The same of the Triton kernels, interpreted."""
    _check(case, "triton")


def test_triton_in_two_launches():
    """Sums and gradient apart give what one launch gives."""
    case = Case("reverse_kl", "ragged", "none", "mean")
    arrays, static, _ = problem(case)

    def gradient(fused):
        config = tuning.TritonRowConfig(64, 1, fused=fused, interpret=True)
        with tuning.override(config):
            f = functools.partial(fused_reverse_kl, implementation="triton", **static)
            return jax.grad(f)(jnp.asarray(arrays["logits"]), jnp.asarray(arrays["target"]))

    np.testing.assert_allclose(gradient(True), gradient(False), rtol=1e-6, atol=1e-9)


def test_triton_without_its_lowering_names_the_remedy(monkeypatch):
    """A JAX that dropped it says so."""

    def absent(name):
        raise ImportError(name)

    monkeypatch.setattr(triton.importlib, "import_module", absent)
    with pytest.raises(pallas_loss.UnsupportedError, match="install JAX"):
        fused_ce(jnp.zeros((2, 3)), jnp.array([0, 1]), implementation="triton")


@pytest.mark.parametrize("kind", KINDS)
def test_the_oracle_agrees_with_finite_differences(kind):
    """Of its own values."""
    case = Case(kind, "ragged", "ce_everything" if kind == "ce" else "everything", "mean")
    arrays, static, _ = problem(case)
    arrays = {n: np.asarray(a) for n, a in arrays.items()}
    truth = oracle.evaluate(kind, **arrays, **static)
    rng, h = np.random.default_rng(1), 1e-5
    for _ in range(3):
        direction = rng.normal(size=arrays["logits"].shape)
        up, down = (
            oracle.evaluate(
                kind, **arrays | {"logits": arrays["logits"] + s * h * direction}, **static
            ).loss
            for s in (1, -1)
        )
        slope = float(np.sum(direction * truth.logits))
        assert (up - down) / (2 * h) == pytest.approx(slope, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("kind", ["ce", "reverse_kl", "forward_kl", "soft_ce"])
def test_finite_differences(kind):
    """Of the library itself in float32, along random directions."""
    case = Case(kind, "ragged", "everything" if kind != "ce" else "ce_everything", "sum")
    arrays, static, _ = problem(case)
    arrays = jax.tree.map(jnp.asarray, arrays)
    logits = arrays.pop("logits")
    f = jax.jit(lambda z: library(kind, z, **arrays, **static))
    d = jax.grad(f)(logits)
    direction = jnp.asarray(np.random.default_rng(2).normal(size=d.shape), jnp.float32)
    h = 1e-2
    slope = (f(logits + h * direction) - f(logits - h * direction)) / (2 * h)
    assert float(slope) == pytest.approx(float(jnp.sum(d * direction)), rel=5e-3, abs=5e-3)


@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl", "soft_ce"])
def test_a_tile_without_a_finite_logit(kind):
    """First, in the middle or last, in both arrays: as if its columns were not there."""
    rng = np.random.default_rng(0)
    z, t = rng.normal(size=(2, 3, 96)).astype(np.float32)
    loss = getattr(pallas_loss, "fused_" + kind)
    run = lambda z, t: loss(z, target_logits=t, implementation="triton")  # noqa: E731
    value_and_grad = jax.value_and_grad(run)
    for start in (0, 32, 64):
        absent = slice(start, start + 32)
        z_there, t_there = (np.delete(v, np.r_[absent], axis=1) for v in (z, t))
        z_here, t_here = z.copy(), t.copy()
        z_here[:, absent] = t_here[:, absent] = -np.inf
        with tuning.override(tuning.TritonRowConfig(32, 1, interpret=True)):
            value, grad = value_and_grad(z_here, t_here)
            want, want_grad = value_and_grad(z_there, t_there)
        np.testing.assert_allclose(value, want, rtol=1e-6)
        np.testing.assert_allclose(np.delete(grad, np.r_[absent], axis=1), want_grad, atol=1e-7)
        np.testing.assert_array_equal(np.asarray(grad)[:, absent], 0)
