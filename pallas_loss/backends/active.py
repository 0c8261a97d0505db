"""Rows that count first: a loss whose tokens are mostly masked is one over the few that are not.

The order is made on the device, and the number of active rows is data, so a new mask compiles
nothing. Rows go by in their own order, those that do not count after all that do; a gather brings
them there and another one back. Both read ``T H`` elements, beside the ``T H V`` of a product.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_loss._types import Array, Candidates, Float, Int, RowLabels, RowMask, Rows
from pallas_loss.backends.base import (
    Backward,
    LinearBackend,
    LinearGradients,
    LinearOperands,
    LinearProblem,
    Stored,
    Wanted,
)
from pallas_loss.losses import DLogits
from pallas_loss.row_sums import RowSums


class Order(NamedTuple):
    """``source[i]`` is the i-th row that counts, ``place[t]`` where row ``t`` went if it does."""

    counted: RowMask
    source: RowLabels
    place: RowLabels
    num_active: Int[Array, ""]

    @classmethod
    def of(cls, counted: RowMask) -> "Order":
        """The active rows first, in their own order."""
        t = counted.shape[0]
        row = jnp.arange(t, dtype=jnp.int32)
        seen = jnp.cumsum(counted, dtype=jnp.int32)
        place = jnp.maximum(seen - 1, 0)
        # Past the end a scatter drops what it is given.
        to = jnp.where(counted, place, t + row)
        source = jnp.zeros((t,), jnp.int32).at[to].set(row, mode="drop", unique_indices=True)
        return cls(counted, source, place, jnp.sum(counted, dtype=jnp.int32))

    def take(self, per_row: jax.Array, fill=0) -> jax.Array:
        """The rows of ``per_row [T, ...]`` in this order; ``fill`` where there are no more."""
        active = jnp.arange(self.source.shape[0], dtype=jnp.int32) < self.num_active
        return _pick(per_row, self.source, active, fill)

    def take_each[Tree](self, tree: Tree) -> Tree:
        """``take`` of the arrays in it; scalars as they are."""
        return jax.tree.map(lambda v: self.take(v) if jnp.ndim(v) else v, tree)

    def take_operands(self, operands: LinearOperands) -> LinearOperands:
        """The operands with the active rows first, and their number."""
        tau, candidates = operands.temperature, operands.candidates
        return operands._replace(
            x=self.take(operands.x),
            labels=self.take(operands.labels),
            temperature=self.take(tau, 1) if tau is not None and jnp.ndim(tau) else tau,
            candidates=None if candidates is None else self.take(candidates),
            counted=None,
            num_active=self.num_active,
        )

    def put(self, ordered: jax.Array) -> jax.Array:
        """The rows back in their places; 0 where a row does not count."""
        return _pick(ordered, self.place, self.counted, 0)

    def put_sums(self, ordered: RowSums) -> RowSums:
        """Sums back in their places; finite where a row does not count."""
        return jax.tree.map(self.put, ordered).only(self.counted)


def _pick(v: jax.Array, rows: RowLabels, where: RowMask, fill) -> jax.Array:
    picked = v.at[rows].get(mode="promise_in_bounds")
    where = where.reshape(where.shape + (1,) * (v.ndim - 1))
    return jnp.where(where, picked, jnp.array(fill, v.dtype))


class ActiveRows:
    """Asks ``inner``, which skips rows past ``num_active``, about the rows that count."""

    skips_rows = True

    def __init__(self, inner: LinearBackend):
        self.inner = inner
        self.name = inner.name
        self.prefers_in_forward = inner.prefers_in_forward

    def unsupported(self, problem: LinearProblem, operands: LinearOperands) -> str | None:
        return self.inner.unsupported(problem, operands)

    def row_sums(self, problem: LinearProblem, operands: LinearOperands) -> RowSums:
        if operands.counted is None:
            return self.inner.row_sums(problem, operands)
        order = Order.of(operands.counted)
        return order.put_sums(self.inner.row_sums(problem, order.take_operands(operands)))

    def store(self, problem: LinearProblem, operands: LinearOperands) -> tuple[RowSums, Stored]:
        """What is stored stays in the order of the active rows, which ``gradients`` makes again."""
        if operands.counted is None:
            return self.inner.store(problem, operands)
        order = Order.of(operands.counted)
        sums, stored = self.inner.store(problem, order.take_operands(operands))
        return order.put_sums(sums), stored

    def exponentials(
        self, problem: LinearProblem, operands: LinearOperands, shift: Rows
    ) -> tuple[RowSums, Float[Array, "rows columns"]]:
        """The exponentials stay in the order of the active rows, as what is stored does."""
        if operands.counted is None:
            return self.inner.exponentials(problem, operands, shift)
        order = Order.of(operands.counted)
        ordered = order.take_operands(operands)
        sums, e = self.inner.exponentials(problem, ordered, order.take(shift))
        return order.put_sums(sums), e

    def from_exponentials(
        self,
        problem: LinearProblem,
        operands: LinearOperands,
        e: Float[Array, "rows columns"],
        coefficients: DLogits,
        wanted: Wanted,
        dw_dtype: jnp.dtype,
    ) -> LinearGradients:
        if operands.counted is None:
            args = (e, coefficients, wanted, dw_dtype)
            return self.inner.from_exponentials(problem, operands, *args)
        order = Order.of(operands.counted)
        args = (e, order.take_each(coefficients), wanted, dw_dtype)
        grads = self.inner.from_exponentials(problem, order.take_operands(operands), *args)
        return grads._replace(dx=None if grads.dx is None else order.put(grads.dx))

    def candidate_logits(self, problem: LinearProblem, operands: LinearOperands) -> Candidates:
        return self.inner.candidate_logits(problem, operands)

    def gradients(
        self, problem: LinearProblem, operands: LinearOperands, wanted: Wanted, backward: Backward
    ) -> LinearGradients:
        if operands.counted is None:
            return self.inner.gradients(problem, operands, wanted, backward)
        order = Order.of(operands.counted)
        ordered = backward._replace(
            coefficients=order.take_each(backward.coefficients),
            at_candidates=order.take_each(backward.at_candidates),
        )
        grads = self.inner.gradients(problem, order.take_operands(operands), wanted, ordered)
        return grads._replace(dx=None if grads.dx is None else order.put(grads.dx))
