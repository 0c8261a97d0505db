"""The derivative rules, one per family. A backend never mentions autodiff.

The rules are first order: differentiating them again raises TypeError.
"""

from pallas_loss.autodiff.copies import of_all_copies, one_of_copies
from pallas_loss.autodiff.in_forward import InForwardPlan, ReducedLoss, reduced_loss
from pallas_loss.autodiff.linear import LinearPlan, RowStatistics, row_statistics
from pallas_loss.autodiff.rows import RowPlan, token_losses, weighted_total

__all__ = [
    "InForwardPlan",
    "LinearPlan",
    "ReducedLoss",
    "RowPlan",
    "RowStatistics",
    "of_all_copies",
    "one_of_copies",
    "reduced_loss",
    "row_statistics",
    "token_losses",
    "weighted_total",
]
