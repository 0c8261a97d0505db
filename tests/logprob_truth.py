"""The float64 truth of `fused_linear_logprob`, the plain computation, and problems to solve."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from test_conformance import _matmul

from pallas_loss import fused_linear_logprob

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


def eye(n, dtype=np.float32):
    """The weight with which the logits are `x` itself."""
    return np.eye(n).astype(dtype)
