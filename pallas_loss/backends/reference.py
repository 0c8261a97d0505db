"""The whole ``[T, V]`` array of logits in float32 at once: the plan to compare the others to."""

from pallas_loss import tuning
from pallas_loss._types import Array, Float, Rows
from pallas_loss.backends import sweep
from pallas_loss.backends.base import (
    LinearGradients,
    LinearOperands,
    LinearProblem,
    Stored,
    Wanted,
)
from pallas_loss.losses import DLogits
from pallas_loss.row_sums import RowSums


class Reference:
    """Answers ``base.LinearBackend`` with one tile that is as large as the problem."""

    name = "reference"
    prefers_in_forward = False

    def unsupported(self, problem: LinearProblem, operands: LinearOperands) -> str | None:
        return None

    def row_sums(self, problem: LinearProblem, operands: LinearOperands) -> RowSums:
        return sweep.row_sums(problem, operands, _one_tile(problem, operands))

    def store(self, problem: LinearProblem, operands: LinearOperands) -> tuple[RowSums, Stored]:
        return sweep.store(problem, operands, _one_tile(problem, operands))

    def exponentials(
        self, problem: LinearProblem, operands: LinearOperands, shift: Rows
    ) -> tuple[RowSums, Float[Array, "rows columns"]]:
        return sweep.exponentials(problem, operands, shift, _one_tile(problem, operands))

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
        tile = _one_tile(problem, operands)
        return sweep.gradients(
            problem, operands, coefficients, wanted, unscale, stored, at_candidates, tile
        )


def _one_tile(problem: LinearProblem, operands: LinearOperands) -> tuning.XlaConfig:
    t, _, v = operands.sizes(problem.layout)
    return tuning.XlaConfig(token_tile=max(t, 1), vocab_tile=v)
