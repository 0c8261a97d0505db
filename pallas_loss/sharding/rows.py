"""Losses from logits over a split vocabulary: backends that wrap another, as for hidden states.

A shard's gradient needs the sums of the whole row, so where the vocabulary is split it is a second
read. Nothing but sums travels.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, PartitionSpec

from pallas_loss._types import Array, Float, Rows, Scalar
from pallas_loss.backends.rows import RowBackend, RowOperands, RowProblem, Sums
from pallas_loss.losses import LabelLoss, RowLoss
from pallas_loss.sharding.merge import merge_over_axis
from pallas_loss.sharding.mesh import on_mesh
from pallas_loss.sharding.shard import Axes


@dataclass(frozen=True)
class ShardRows:
    """Answers for whole rows where this code runs on one shard of columns: in a shard_map.

    ``labels`` are ids in the whole vocabulary; shard ``i`` holds the columns from ``i size`` on.
    """

    inner: RowBackend
    axis: Axes = ()

    @property
    def name(self) -> str:
        return self.inner.name

    def unsupported(self, problem: RowProblem, operands: RowOperands) -> str | None:
        return self.inner.unsupported(problem, operands)

    def sums(self, problem: RowProblem, operands: RowOperands) -> Sums:
        part = self.inner.sums(problem, self._localized(operands))
        if not self.axis:
            return part
        if problem.argmax:
            part = part._replace(argmax=part.argmax + self._start(operands))
        return merge_over_axis(part, self.axis, False, problem.loss.merge_parts)

    def sums_and_gradient(
        self, problem: RowProblem, operands: RowOperands, g: Rows, inplace: bool
    ) -> tuple[Sums, Float[Array, "T V"]]:
        if not self.axis:
            return self.inner.sums_and_gradient(problem, operands, g, inplace)
        sums = self.sums(problem, operands)
        return sums, self.gradient(problem, operands, sums, g, inplace)

    def gradient(
        self, problem: RowProblem, operands: RowOperands, sums: Sums, g: Rows, inplace: bool
    ) -> Float[Array, "T V"]:
        return self.inner.gradient(problem, self._localized(operands), sums, g, inplace)

    def dot_z(self, problem: RowProblem, operands: RowOperands, sums: Sums, g: Rows) -> Scalar:
        part = self.inner.dot_z(problem, self._localized(operands), sums, g)
        return lax.psum(part, self.axis) if self.axis else part

    def _start(self, operands: RowOperands):
        return lax.axis_index(self.axis) * operands.logits.shape[1]

    def _localized(self, operands: RowOperands) -> RowOperands:
        if not self.axis or operands.labels is None:
            return operands
        local = operands.labels - self._start(operands)
        inside = (local >= 0) & (local < operands.logits.shape[1])
        return operands._replace(labels=jnp.where(inside, local, -1), ids=operands.labels)


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


def counting(loss: RowLoss, vocab: int) -> RowLoss:
    """The loss over ``vocab`` columns, if it is one that counts them."""
    return replace(loss, vocab=vocab) if isinstance(loss, LabelLoss) else loss
