"""What ``LinearBackend.exponentials`` keeps, and the gradients that come of it."""

import jax
import jax.numpy as jnp

from pallas_loss._types import Tile
from pallas_loss.backends import sweep
from pallas_loss.backends.base import LinearGradients, LinearOperands, LinearProblem, Wanted
from pallas_loss.losses import DLogits
from pallas_loss.row_sums import NEG_INF


def gradients(
    problem: LinearProblem,
    operands: LinearOperands,
    e: Tile,
    c: DLogits,
    wanted: Wanted,
    dw_dtype: jnp.dtype,
) -> LinearGradients:
    """The gradients from what ``exponentials`` left of these tokens, in XLA's own products.

    ``dx`` is float32. Whole products of cuBLAS beat this package's kernels by 2 to 6% on an H200
    (``benchmarks/LOG.md``).
    """
    t, _, v = operands.sizes(problem.layout)
    rows, columns = e.shape
    pad_rows = lambda a: jnp.pad(a, [(0, rows - t)] + [(0, 0)] * (a.ndim - 1))  # noqa: E731
    labels = jnp.pad(operands.labels, (0, rows - t), constant_values=-1)
    x = pad_rows(operands.x).astype(jnp.float32)
    c = jax.tree.map(pad_rows, c)
    if c.scales_rows:
        at_label = jnp.where(c.alpha == 0, 0.0, c.at_label / c.alpha)
        # A negative index would wrap; one past the end is dropped.
        column = jnp.where(labels < 0, columns, labels)
        d = e.at[jnp.arange(rows), column].set(
            at_label.astype(e.dtype), mode="drop", unique_indices=True
        )
        scale = lambda a: a * c.alpha[:, None]  # noqa: E731
    else:
        d = dlogits(problem, operands, e, c, labels).astype(e.dtype)
        scale = lambda a: a  # noqa: E731
    vh = problem.layout == "vh"
    dx = dw = dbias = None
    if wanted.dx:
        w = jnp.pad(operands.w, ((0, columns - v), (0, 0)) if vh else ((0, 0), (0, columns - v)))
        dx = scale(sweep.dot(d, w, problem, (1, 0 if vh else 1)))[:t]
    if wanted.dw:
        a, b = (d, scale(x)) if vh else (scale(x), d)
        dw = sweep.dot(a, b, problem, (0, 0), dw_dtype if dw_dtype == d.dtype else jnp.float32)
        dw = (dw[:v] if vh else dw[:, :v]).astype(dw_dtype)
    if wanted.dbias:
        dbias = jnp.sum(scale(d.astype(jnp.float32)), axis=0)[:v]
    return LinearGradients(dx, dw, dbias)


def dlogits(problem: LinearProblem, operands: LinearOperands, e: Tile, c: DLogits, labels) -> Tile:
    """d-logits, float32, from exponentials that may be larger than ``[T, V]``.

    ``c`` and ``labels`` have the rows of ``e``. Columns past V get 0, as do removed classes.
    """
    v = operands.sizes(problem.layout)[2]
    fill = lambda a, value: jnp.pad(a, (0, e.shape[1] - v), constant_values=value)  # noqa: E731
    present = sweep.cols_from(e, 0) < v
    if operands.bias is not None:
        present &= (fill(operands.bias, NEG_INF) > NEG_INF)[None, :]
    cw = operands.class_weights
    tile = operands if cw is None else operands._replace(class_weights=fill(cw, 0.0))
    e = e.astype(jnp.float32)
    return c.of_exponentials(
        e, sweep.cols_from(e, 0), labels, present, sweep.class_weights_of(tile, e)
    )
