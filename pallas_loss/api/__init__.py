"""The public losses: checks, reduction, docstrings. Kernels return per-token values."""

from pallas_loss.api.linear_ce import Metrics, fused_linear_ce
from pallas_loss.api.linear_logprob import LogProbs, fused_linear_logprob

__all__ = ["LogProbs", "Metrics", "fused_linear_ce", "fused_linear_logprob"]
