"""A backend that leaves what lies past the rows that count as a kernel does: full of NaN.

The rows that the Mosaic kernels skip hold whatever was in memory. This backend computes with XLA
and then spoils them, so the rules above it show on any machine that they read none of it.
"""

import jax.numpy as jnp

from pallas_loss.backends.active import ActiveRows
from pallas_loss.backends.xla import Xla


def active(operands, rows=None):
    """Which rows of an array with so many are active."""
    rows = operands.x.shape[0] if rows is None else rows
    return jnp.arange(rows, dtype=jnp.int32) < operands.num_active


def spoiled(operands, per_row):
    """`per_row` with NaN past the active rows."""
    where = active(operands, per_row.shape[0])[:, None]
    return jnp.where(where, per_row, jnp.array(jnp.nan, per_row.dtype))


class Skipping(Xla):
    """`Xla`, of which only the active rows can be used."""

    name = "skipping"
    skips_rows = True

    def row_sums(self, problem, operands):
        operands = operands._replace(x=spoiled(operands, operands.x))
        return super().row_sums(problem, operands).only(active(operands))

    def store(self, problem, operands):
        operands = operands._replace(x=spoiled(operands, operands.x))
        sums, stored = super().store(problem, operands)
        return sums.only(active(operands)), stored

    def exponentials(self, problem, operands, shift):
        operands = operands._replace(x=spoiled(operands, operands.x))
        sums, e = super().exponentials(problem, operands, shift)
        return sums.only(active(operands)), spoiled(operands, e)

    def from_exponentials(self, problem, operands, e, c, wanted, dw_dtype):
        here = active(operands, e.shape[0])[:, None]
        e = jnp.where(here, e, jnp.zeros((), e.dtype))
        grads = super().from_exponentials(problem, operands, e, c, wanted, dw_dtype)
        return grads._replace(dx=None if grads.dx is None else spoiled(operands, grads.dx))

    def gradients(self, problem, operands, wanted, backward):
        if (stored := backward.stored) is not None:
            e = jnp.where(active(operands)[:, None], stored.e, jnp.ones((), stored.e.dtype))
            stored = stored._replace(e=e, m=jnp.where(active(operands)[None], stored.m, 0.0))
        grads = super().gradients(problem, operands, wanted, backward._replace(stored=stored))
        return grads._replace(dx=None if grads.dx is None else spoiled(operands, grads.dx))


BACKEND = ActiveRows(Skipping())
