"""The recompute plan in XLA's own operations: every device, nothing of size ``[T, V]``."""

from pallas_loss import tuning
from pallas_loss.backends import row_sweep
from pallas_loss.backends.base import LinearOperands, LinearProblem
from pallas_loss.backends.rows import RowOperands
from pallas_loss.backends.swept import SweptLinear, SweptRows


class Xla(SweptLinear):
    """Tiles of tokens and vocabulary."""

    name = "xla"

    @staticmethod
    def tile(problem: LinearProblem, operands: LinearOperands) -> tuning.XlaConfig:
        return tuning.lookup(tuning.XlaConfig, tuning.XlaConfig)


class RowXla(SweptRows):
    """Some rows at a time, each tile of them read once."""

    name = "xla"

    @staticmethod
    def rows(operands: RowOperands) -> int:
        return row_sweep.row_tile(operands)
