"""What ``LinearBackend.exponentials`` keeps, and the gradients that come of it."""

import jax
import jax.numpy as jnp

from pallas_loss._types import Rows, Tile
from pallas_loss.backends import sweep
from pallas_loss.backends.base import LinearGradients, LinearOperands, LinearProblem, Wanted
from pallas_loss.losses import DLogits
from pallas_loss.row_sums import NEG_INF

# Rows of exponentials that one pass turns into d-logits, where the rows are counted on the device.
_ROWS = 1024


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
    d, scale = scaled_dlogits(problem, operands, e, c)
    dx, dw, _ = products(problem, operands, d, scale, wanted, dw_dtype)
    dbias = sum_rows(problem, operands, d, scale) if wanted.dbias else None
    return LinearGradients(scaled(dx, scale), dw, dbias)


def scaled_dlogits(
    problem: LinearProblem, operands: LinearOperands, e: Tile, c: DLogits
) -> tuple[Tile, Rows | None]:
    """``d`` and ``scale`` with d-logits ``scale[:, None] * d``, made in the place of ``e``.

    Like ``e`` both may have more rows than there are tokens.
    """
    rows, columns = e.shape
    labels = _pad_rows(operands.labels, rows, -1)
    c = jax.tree.map(lambda v: _pad_rows(v, rows), c)
    if not c.scales_rows:
        return _dlogits_in_place(problem, operands, e, c, labels), None
    at_label = jnp.where(c.alpha == 0, 0.0, c.at_label / c.alpha)
    # A negative index would wrap; one past the end is dropped.
    column = jnp.where(labels < 0, columns, labels)
    d = e.at[jnp.arange(rows), column].set(
        at_label.astype(e.dtype), mode="drop", unique_indices=True
    )
    return d, c.alpha


def products(
    problem: LinearProblem,
    operands: LinearOperands,
    d: Tile,
    scale: Rows | None,
    wanted: Wanted,
    dw_dtype: jnp.dtype,
) -> LinearGradients:
    """``dx``, which is yet to be ``scaled``, and ``dw`` of ``scaled_dlogits``' answer.

    Every row of that is finite.
    """
    t, _, v = operands.sizes(problem.layout)
    rows, columns = d.shape
    vh = problem.layout == "vh"
    dx = dw = None
    if wanted.dx:
        w = jnp.pad(operands.w, ((0, columns - v), (0, 0)) if vh else ((0, 0), (0, columns - v)))
        dx = sweep.dot(d, w, problem, (1, 0 if vh else 1))[:t]
    if wanted.dw:
        x = scaled(_pad_rows(operands.x, rows).astype(jnp.float32), scale)
        a, b = (d, x) if vh else (x, d)
        dw = sweep.dot(a, b, problem, (0, 0), dw_dtype if dw_dtype == d.dtype else jnp.float32)
        dw = (dw[:v] if vh else dw[:, :v]).astype(dw_dtype)
    return LinearGradients(dx, dw, None)


def scaled(v: jax.Array | None, scale: Rows | None) -> jax.Array | None:
    """``scale[:, None] * v``, of the rows of ``v``."""
    return v if v is None or scale is None else v * scale[: v.shape[0], None]


def sum_rows(problem: LinearProblem, operands: LinearOperands, d: Tile, scale: Rows | None):
    """``dbias``, of the rows that there are."""
    d = d.astype(jnp.float32)
    d = d if scale is None else d * scale[:, None]
    if operands.num_active is not None:
        row = jnp.arange(d.shape[0], dtype=jnp.int32)
        d = jnp.where(row[:, None] < operands.num_active, d, 0.0)
    return jnp.sum(d, axis=0)[: operands.sizes(problem.layout)[2]]


def _dlogits_in_place(problem: LinearProblem, operands: LinearOperands, e, c: DLogits, labels):
    """What adds to every column takes a pass over ``e``: over the rows that there are."""

    def block(start, size, e):
        here = sweep.take_per_row((c, labels), start, size)
        part = jax.lax.dynamic_slice_in_dim(e, start, size)
        d = dlogits(problem, operands, part, *here)
        return sweep.put(e, d.astype(e.dtype), start)

    if operands.num_active is None:
        return dlogits(problem, operands, e, c, labels).astype(e.dtype)
    return sweep.tiled(e.shape[0], _ROWS, block, e, operands.num_active)


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


def _pad_rows(v: jax.Array, rows: int, fill=0) -> jax.Array:
    padding = [(0, rows - v.shape[0])] + [(0, 0)] * (v.ndim - 1)
    return jnp.pad(v, padding, constant_values=fill)
