"""The recompute plan in XLA's own operations: every device, nothing of size ``[T, V]``."""

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


class Xla:
    """Answers ``base.LinearBackend`` with a tiled sweep."""

    name = "xla"
    prefers_in_forward = False

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
