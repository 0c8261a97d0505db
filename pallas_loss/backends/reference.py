"""The whole ``[T, V]`` array of logits in float32 at once: the plan to compare the others to."""

from pallas_loss import tuning
from pallas_loss.backends.base import LinearOperands, LinearProblem
from pallas_loss.backends.rows import RowOperands
from pallas_loss.backends.swept import SweptLinear, SweptRows


class Reference(SweptLinear):
    """One tile that is as large as the problem."""

    name = "reference"

    @staticmethod
    def tile(problem: LinearProblem, operands: LinearOperands) -> tuning.XlaConfig:
        t, _, v = operands.sizes(problem.layout)
        return tuning.XlaConfig(token_tile=max(t, 1), vocab_tile=v)


class RowReference(SweptRows):
    """All rows at once."""

    name = "reference"

    @staticmethod
    def rows(operands: RowOperands) -> int:
        return max(operands.logits.shape[0], 1)
