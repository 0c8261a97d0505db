"""Cross-entropy on small inputs: solved on a backend, compared with the float64 truth."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle

from pallas_loss import fused_linear_ce

NAN, INF = np.nan, np.inf
DIFFERENTIATED = ("x", "w", "bias", "weights", "temperature", "logit_scale")


def close(got, expected, atol=1e-5, rtol=0.0, name=""):
    np.testing.assert_allclose(
        np.asarray(got).astype(np.float64), expected, atol=atol, rtol=rtol, err_msg=name
    )


@functools.cache
def compiled(implementation, static):
    @jax.jit
    def run(arrays, cotangent):
        wanted = {n: a for n, a in arrays.items() if n in DIFFERENTIATED}
        fixed = {n: a for n, a in arrays.items() if n not in DIFFERENTIATED}

        def loss(wanted):
            arguments = {**wanted, **fixed}
            operands = [arguments.pop(n) for n in ("x", "w", "labels")]
            return fused_linear_ce(
                *operands,
                **arguments,
                **dict(static),
                return_metrics=True,
                implementation=implementation,
            )

        value, vjp, metrics = jax.vjp(loss, wanted, has_aux=True)
        return value, metrics, vjp(jnp.broadcast_to(cotangent, value.shape))[0]

    return run


def solve(backend, x, w, labels, cotangent=1.0, **options):
    """`(loss, gradients by name, metrics)` under jit; `w` is `[V, H]`. Arrays are traced, the rest
    is static."""
    options.setdefault("w_layout", "vh")
    arrays = {"x": jnp.asarray(x), "w": jnp.asarray(w), "labels": jnp.asarray(labels)}
    static = {}
    for name, value in options.items():
        if isinstance(value, np.ndarray | np.generic | jax.Array):
            arrays[name] = jnp.asarray(value)
        else:
            static[name] = value
    run = compiled(backend.name, tuple(sorted(static.items())))
    loss, metrics, grads = run(arrays, jnp.asarray(cotangent, jnp.float32))
    return loss, grads, metrics


def solve_and_compare(backend, x, w, labels, cotangent=1.0, atol=1e-5, rtol=1e-5, **options):
    """`solve`, with the loss and every gradient compared with the float64 truth."""
    loss, grads, metrics = solve(backend, x, w, labels, cotangent, **options)
    options.setdefault("w_layout", "vh")
    truth = oracle.evaluate(x, w, labels, **options)
    wanted = np.broadcast_to(np.asarray(cotangent), truth.loss.shape)
    expected = oracle.gradients(x, w, labels, cotangent=wanted, **options)
    assert loss.dtype == jnp.float32
    close(loss, truth.loss, atol, rtol, "loss")
    for name, got in grads.items():
        close(got, getattr(expected, name), atol, rtol, "d" + name)
    return loss, grads, metrics


def f32(*values):
    return np.array(values, np.float32)


def i32(*values):
    return np.array(values, np.int32)


def eye(n, dtype=np.float32):
    """The weight with which the logits are `x` itself."""
    return np.eye(n).astype(dtype)


ROWS = f32([0, 0, 0, 0], [1, 0, 0, 0], [0, 2, 0, 0])
ROW_LABELS = i32(0, 1, 2)


def by_tiling(backend, solve_once):
    """`solve_once()` under each of the backend's tilings, each traced afresh."""
    results = {}
    for name, tiling in backend.hooks.tilings.items():
        compiled.cache_clear()
        with tiling():
            results[name] = solve_once()
    compiled.cache_clear()
    return results
