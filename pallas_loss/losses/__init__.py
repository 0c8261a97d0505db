"""The mathematics, written once: logits, row statistics, their derivatives, and the losses.

A *statistic* is a per-row number ``f(z)`` that is a function of a few sums over the vocabulary
(``row_sums``). Each is one small object with three answers: its value, its derivative in the
logits and its derivative in the temperature. Every hard-label loss is plain arithmetic on
statistics, so its own derivative is left to JAX, and one form of d-logits serves them all:

    dL/dz_v = e^(z_v - m) (alpha + beta (z_v - m)) + delta cw_v,    v != y

with one ``alpha, beta, delta`` per row. The label's column holds ``at_label`` in place of the
first term, computed per row where ``p_y - 1`` does not cancel. Kernels evaluate this and nothing
else.

Letters: ``z`` logits, ``p`` softmax(z), ``y`` the label, ``m`` the shift (the row's maximum),
``cw`` class weights, ``g`` an incoming cotangent.
"""

from pallas_loss.losses.cross_entropy import CrossEntropy, TokenLoss, divided
from pallas_loss.losses.divergences import (
    FORWARD_KL,
    REVERSE_KL,
    SOFT_CROSS_ENTROPY,
    Divergence,
    PairSums,
    SoftTarget,
)
from pallas_loss.losses.logits import LogitFactors, LogitTransform
from pallas_loss.losses.row_loss import LabelLoss, RowFacts, RowLoss
from pallas_loss.losses.statistics import (
    NLL,
    CandidateLogProb,
    DLogits,
    Entropy,
    LogSumExp,
    Softmax,
    Statistic,
    UniformNLL,
    combined_dlogits,
)

__all__ = [
    "FORWARD_KL",
    "NLL",
    "REVERSE_KL",
    "SOFT_CROSS_ENTROPY",
    "CandidateLogProb",
    "CrossEntropy",
    "DLogits",
    "Divergence",
    "Entropy",
    "LabelLoss",
    "LogSumExp",
    "LogitFactors",
    "LogitTransform",
    "PairSums",
    "RowFacts",
    "RowLoss",
    "SoftTarget",
    "Softmax",
    "Statistic",
    "TokenLoss",
    "UniformNLL",
    "combined_dlogits",
    "divided",
]
