"""The derivative rules, one per family. A backend never mentions autodiff.

The rules are first order: differentiating them again raises TypeError.
"""

from pallas_loss.autodiff.in_forward import InForwardPlan, ReducedLoss, reduced_loss
from pallas_loss.autodiff.linear import LinearPlan, RowStatistics, row_statistics

__all__ = [
    "InForwardPlan",
    "LinearPlan",
    "ReducedLoss",
    "RowStatistics",
    "reduced_loss",
    "row_statistics",
]
