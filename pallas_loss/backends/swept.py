"""Backends in XLA's own operations, up to the size of the tile that is live."""

import abc
from typing import ClassVar

import jax.numpy as jnp

from pallas_loss import tuning
from pallas_loss._types import Array, Candidates, Float, Rows, Scalar
from pallas_loss.backends import exponentials, row_sweep, sweep
from pallas_loss.backends.base import (
    Backward,
    LinearGradients,
    LinearOperands,
    LinearProblem,
    Stored,
    Wanted,
)
from pallas_loss.backends.rows import RowOperands, RowProblem, Sums
from pallas_loss.losses import DLogits
from pallas_loss.row_sums import RowSums


class SweptLinear(abc.ABC):
    """Answers ``base.LinearBackend`` with a sweep over tiles of the size that ``tile`` says."""

    name: ClassVar[str]
    prefers_in_forward = False
    skips_rows = False

    @staticmethod
    @abc.abstractmethod
    def tile(problem: LinearProblem, operands: LinearOperands) -> tuning.XlaConfig:
        """The tile of logits that is live."""

    def unsupported(self, problem: LinearProblem, operands: LinearOperands) -> str | None:
        return None

    def row_sums(self, problem: LinearProblem, operands: LinearOperands) -> RowSums:
        return sweep.row_sums(problem, operands, self.tile(problem, operands))

    def store(self, problem: LinearProblem, operands: LinearOperands) -> tuple[RowSums, Stored]:
        return sweep.store(problem, operands, self.tile(problem, operands))

    def exponentials(
        self, problem: LinearProblem, operands: LinearOperands, shift: Rows
    ) -> tuple[RowSums, Float[Array, "rows columns"]]:
        return sweep.exponentials(problem, operands, shift, self.tile(problem, operands))

    def from_exponentials(
        self,
        problem: LinearProblem,
        operands: LinearOperands,
        e: Float[Array, "rows columns"],
        coefficients: DLogits,
        wanted: Wanted,
        dw_dtype: jnp.dtype,
    ) -> LinearGradients:
        return exponentials.gradients(problem, operands, e, coefficients, wanted, dw_dtype)

    def candidate_logits(self, problem: LinearProblem, operands: LinearOperands) -> Candidates:
        return sweep.candidate_logits(problem, operands)

    def gradients(
        self, problem: LinearProblem, operands: LinearOperands, wanted: Wanted, backward: Backward
    ) -> LinearGradients:
        tile = self.tile(problem, operands)
        return sweep.gradients(problem, operands, wanted, backward, tile)


class SweptRows(abc.ABC):
    """Answers ``rows.RowBackend`` as many rows at a time as ``rows`` says.

    The gradient is written over donated logits if XLA's buffer assignment sees to it.
    """

    name: ClassVar[str]

    @staticmethod
    @abc.abstractmethod
    def rows(operands: RowOperands) -> int:
        """How many rows are live in float32."""

    def unsupported(self, problem: RowProblem, operands: RowOperands) -> str | None:
        return None

    def sums(self, problem: RowProblem, operands: RowOperands) -> Sums:
        return row_sweep.sums(problem, operands, self.rows(operands))

    def sums_and_gradient(
        self, problem: RowProblem, operands: RowOperands, g: Rows, inplace: bool
    ) -> tuple[Sums, Float[Array, "T V"]]:
        return row_sweep.sums_and_gradient(problem, operands, g, inplace, self.rows(operands))

    def gradient(
        self, problem: RowProblem, operands: RowOperands, sums: Sums, g: Rows, inplace: bool
    ) -> Float[Array, "T V"]:
        return row_sweep.gradient(problem, operands, sums, g, inplace, self.rows(operands))

    def dot_z(self, problem: RowProblem, operands: RowOperands, sums: Sums, g: Rows) -> Scalar:
        return row_sweep.dot_z(problem, operands, sums, g)
