"""The arrays of a workload, made on the device from a seed."""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.workloads import LOGIT_STD, Workload


class LinearInputs(NamedTuple):
    """``x [T,H]``, ``w [H,V]`` or ``[V,H]``, ``labels [T]``."""

    x: jax.Array
    w: jax.Array
    labels: jax.Array


def make_inputs(
    workload: Workload, dtype=jnp.bfloat16, layout: str = "vh", seed: int = 0
) -> LinearInputs:
    """Inputs whose logits have the spread of a trained head's.

    ``x ~ N(0, 1)``; ``w`` gives logits a standard deviation of ``LOGIT_STD``; labels are uniform,
    and ``x`` leans towards its label's row of ``w`` by as much as raises that logit by a random
    margin.
    """
    return _make(jax.random.key(seed), workload, jnp.dtype(dtype), layout)


@partial(jax.jit, static_argnames=("workload", "dtype", "layout"))
def _make(key, workload: Workload, dtype, layout: str) -> LinearInputs:
    t, h, v = workload.T, workload.H, workload.V
    for_x, for_w, for_labels, for_margin = jax.random.split(key, 4)
    labels = jax.random.randint(for_labels, (t,), 0, v)
    w = jax.random.normal(for_w, (v, h) if layout == "vh" else (h, v), jnp.float32)
    w = (w * (LOGIT_STD / math.sqrt(h))).astype(dtype)
    label_rows = w[labels] if layout == "vh" else w[:, labels].T
    typical_lse = math.log(v) + LOGIT_STD**2 / 2
    margin = jax.random.uniform(for_margin, (t, 1), jnp.float32, 0.0, 2 * typical_lse)
    # A row of w has length LOGIT_STD, so this much of it raises its own logit by the margin.
    lean = (margin / LOGIT_STD**2) * label_rows.astype(jnp.float32)
    x = jax.random.normal(for_x, (t, h), jnp.float32) + lean
    return LinearInputs(x.astype(dtype), w, labels)


@partial(jax.jit, static_argnames=("workload", "dtype"))
def make_dlogits(key, workload: Workload, dtype) -> jax.Array:
    """``[T, V]`` with the magnitudes of ``softmax(z) / T``.

    The values matter: a product of zeros draws less power, and so runs faster, than one of these.
    """
    t, v = workload.T, workload.V
    z = LOGIT_STD * jax.random.normal(key, (t, v), jnp.float32)
    return (jnp.exp(z) / (t * v * math.exp(LOGIT_STD**2 / 2))).astype(dtype)
