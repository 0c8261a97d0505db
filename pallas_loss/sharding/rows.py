"""Losses from logits over a split vocabulary: backends that wrap another, as for hidden states.

A shard's gradient needs the sums of the whole row, so where the vocabulary is split it is a second
read. Nothing but sums travels.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, PartitionSpec

from pallas_loss._types import Array, Float, Rows, Scalar
from pallas_loss.backends.rows import RowBackend, RowOperands, RowProblem, Sums
from pallas_loss.losses import LabelLoss, RowLoss
from pallas_loss.sharding.merge import merge_over_axis
from pallas_loss.sharding.mesh import on_mesh
from pallas_loss.sharding.widths import Axes, localized, on_live_columns


@dataclass(frozen=True)
class ShardRows:
    """Answers for whole rows where this code runs on one shard of columns: in a shard_map.

    ``labels`` are ids in ``[0, vocab)``; shard ``i`` of ``n`` holds the columns from ``i size`` on,
    those past ``vocab`` being padding that no sum sees and that gets a gradient of 0.
    """

    inner: RowBackend
    vocab: int
    axis: Axes = ()
    num_shards: int = 1

    @property
    def name(self) -> str:
        return self.inner.name

    def unsupported(self, problem: RowProblem, operands: RowOperands) -> str | None:
        return self.inner.unsupported(problem, operands)

    def sums(self, problem: RowProblem, operands: RowOperands) -> Sums:
        nothing = lambda _: problem.loss.start(operands.logits.shape[0], problem.moments)  # noqa: E731
        part = self._on_columns(partial(self.inner.sums, problem), nothing, operands)
        if not self.axis:
            return part
        if problem.argmax:
            start = lax.axis_index(self.axis) * operands.logits.shape[1]
            part = part._replace(argmax=part.argmax + start)
        return merge_over_axis(part, self.axis, False, problem.loss.merge_parts)

    def sums_and_gradient(
        self, problem: RowProblem, operands: RowOperands, g: Rows, inplace: bool
    ) -> tuple[Sums, Float[Array, "T V"]]:
        if not self.axis:
            run = lambda o, g: self.inner.sums_and_gradient(problem, o, g, inplace)  # noqa: E731
            return self._on_columns(run, _zeros, operands, g)
        sums = self.sums(problem, operands)
        return sums, self.gradient(problem, operands, sums, g, inplace)

    def gradient(
        self, problem: RowProblem, operands: RowOperands, sums: Sums, g: Rows, inplace: bool
    ) -> Float[Array, "T V"]:
        run = lambda o, s, g: self.inner.gradient(problem, o, s, g, inplace)  # noqa: E731
        return self._on_columns(run, _zeros, operands, sums, g)

    def dot_z(self, problem: RowProblem, operands: RowOperands, sums: Sums, g: Rows) -> Scalar:
        run = partial(self.inner.dot_z, problem)
        part = self._on_columns(run, _zeros, operands, sums, g)
        return lax.psum(part, self.axis) if self.axis else part

    def _on_columns(self, call: Callable, nothing: Callable, operands: RowOperands, *args):
        """``call(operands, *args)`` on the live columns of this shard."""
        size = operands.logits.shape[1]
        if self.axis and operands.labels is not None:
            labels = localized(operands.labels, size, self.axis)
            operands = operands._replace(labels=labels, ids=operands.labels)

        def run(width: int, operands: RowOperands, *args):
            return call(_live(operands, width), *args)

        shape = size, self.vocab, self.axis, self.num_shards
        return on_live_columns(run, nothing, *shape, operands, *args)


@dataclass(frozen=True)
class MeshRows:
    """Answers on whole arrays under ``jit``: each method is a ``shard_map`` of a ``ShardRows``."""

    shard: ShardRows
    mesh: AbstractMesh
    tokens: Axes = ()

    @property
    def name(self) -> str:
        return self.shard.name

    def unsupported(self, problem: RowProblem, operands: RowOperands) -> str | None:
        return self.shard.unsupported(problem, operands)

    def sums(self, problem: RowProblem, operands: RowOperands) -> Sums:
        return self._spread(partial(self.shard.sums, problem), self._rows, operands)

    def sums_and_gradient(
        self, problem: RowProblem, operands: RowOperands, g: Rows, inplace: bool
    ) -> tuple[Sums, Float[Array, "T V"]]:
        run = lambda o, g: self.shard.sums_and_gradient(problem, o, g, inplace)  # noqa: E731
        return self._spread(run, (self._rows, self._columns), operands, g)

    def gradient(
        self, problem: RowProblem, operands: RowOperands, sums: Sums, g: Rows, inplace: bool
    ) -> Float[Array, "T V"]:
        run = lambda o, s, g: self.shard.gradient(problem, o, s, g, inplace)  # noqa: E731
        return self._spread(run, self._columns, operands, sums, g)

    def dot_z(self, problem: RowProblem, operands: RowOperands, sums: Sums, g: Rows) -> Scalar:
        def run(operands, sums, g):
            part = self.shard.dot_z(problem, operands, sums, g)
            return lax.psum(part, self.tokens) if self.tokens else part

        return self._spread(run, PartitionSpec(), operands, sums, g)

    @property
    def _rows(self) -> PartitionSpec:
        return PartitionSpec(self.tokens or None)

    @property
    def _columns(self) -> PartitionSpec:
        return PartitionSpec(self.tokens or None, self.shard.axis or None)

    def _spread(self, run: Callable, out_specs: Any, operands: RowOperands, *per_row):
        scalar = PartitionSpec()
        specs: dict[str, Any] = dict(
            logits=self._columns,
            target=self._columns,
            labels=self._rows,
            label_weight=self._rows,
            class_weights=PartitionSpec(self.shard.axis or None),
            temperature=scalar,
            target_temperature=scalar,
        )
        absent = {k: None for k in specs if getattr(operands, k) is None}
        in_specs = (RowOperands(**(specs | absent)), *(self._rows for _ in per_row))
        return on_mesh(self.mesh, run, in_specs, out_specs)(operands, *per_row)


def _live(operands: RowOperands, width: int) -> RowOperands:
    """The first ``width`` columns."""
    if width == operands.logits.shape[1]:
        return operands
    by_column = ("logits", "target", "class_weights")
    given = {n: v for n in by_column if (v := getattr(operands, n)) is not None}
    return operands._replace(**{n: v[..., :width] for n, v in given.items()})


def _zeros(like):
    """The gradient of a shard without a column."""
    return jax.tree.map(lambda v: jnp.zeros(v.shape, v.dtype), like)


def counting(loss: RowLoss, vocab: int) -> RowLoss:
    """The loss over ``vocab`` columns, if it is one that counts them."""
    return replace(loss, vocab=vocab) if isinstance(loss, LabelLoss) else loss
