"""The recompute plan in XLA's own operations: every device, nothing of size ``[T, V]``."""

import jax.numpy as jnp

from pallas_loss import tuning
from pallas_loss._types import Array, Candidates, Float, Rows, Scalar
from pallas_loss.backends import exponentials, row_sweep, sweep
from pallas_loss.backends.base import (
    LinearGradients,
    LinearOperands,
    LinearProblem,
    Stored,
    Wanted,
)
from pallas_loss.backends.row_sweep import row_tile
from pallas_loss.backends.rows import RowOperands, RowProblem, Sums
from pallas_loss.losses import DLogits
from pallas_loss.row_sums import RowSums


class Xla:
    """Answers ``base.LinearBackend`` with a tiled sweep."""

    name = "xla"
    prefers_in_forward = False
    skips_rows = False

    def unsupported(self, problem: LinearProblem, operands: LinearOperands) -> str | None:
        return None

    def row_sums(self, problem: LinearProblem, operands: LinearOperands) -> RowSums:
        return sweep.row_sums(problem, operands, _config())

    def store(self, problem: LinearProblem, operands: LinearOperands) -> tuple[RowSums, Stored]:
        return sweep.store(problem, operands, _config())

    def exponentials(
        self, problem: LinearProblem, operands: LinearOperands, shift: Rows
    ) -> tuple[RowSums, Float[Array, "rows columns"]]:
        return sweep.exponentials(problem, operands, shift, _config())

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
        self,
        problem: LinearProblem,
        operands: LinearOperands,
        coefficients: DLogits,
        wanted: Wanted,
        unscale: Float[Array, ""] | None,
        stored: Stored | None,
        at_candidates: Float[Array, "T K"] | None,
    ) -> LinearGradients:
        return sweep.gradients(
            problem, operands, coefficients, wanted, unscale, stored, at_candidates, _config()
        )


def _config() -> tuning.XlaConfig:
    return tuning.lookup(tuning.XlaConfig, tuning.XlaConfig)


class RowXla:
    """Answers ``rows.RowBackend`` some rows at a time, each tile of them read once.

    The gradient is written over donated logits if XLA's buffer assignment sees to it.
    """

    name = "xla"

    def unsupported(self, problem: RowProblem, operands: RowOperands) -> str | None:
        return None

    def sums(self, problem: RowProblem, operands: RowOperands) -> Sums:
        return row_sweep.sums(problem, operands, row_tile(operands))

    def sums_and_gradient(
        self, problem: RowProblem, operands: RowOperands, g: Rows, inplace: bool
    ) -> tuple[Sums, Float[Array, "T V"]]:
        return row_sweep.sums_and_gradient(problem, operands, g, inplace, row_tile(operands))

    def gradient(
        self, problem: RowProblem, operands: RowOperands, sums: Sums, g: Rows, inplace: bool
    ) -> Float[Array, "T V"]:
        return row_sweep.gradient(problem, operands, sums, g, inplace, row_tile(operands))

    def dot_z(self, problem: RowProblem, operands: RowOperands, sums: Sums, g: Rows) -> Scalar:
        return row_sweep.dot_z(problem, operands, sums, g)
