"""The public losses: checks, reduction, docstrings. Kernels return per-token values."""

from pallas_loss.api.divergences import fused_forward_kl, fused_reverse_kl, fused_soft_ce
from pallas_loss.api.linear_ce import fused_linear_ce
from pallas_loss.api.linear_logprob import LogProbs, fused_linear_logprob
from pallas_loss.api.logits_ce import fused_ce
from pallas_loss.api.metrics import Metrics

__all__ = [
    "LogProbs",
    "Metrics",
    "fused_ce",
    "fused_forward_kl",
    "fused_linear_ce",
    "fused_linear_logprob",
    "fused_reverse_kl",
    "fused_soft_ce",
]
