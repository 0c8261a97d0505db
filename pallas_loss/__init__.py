"""Language-model losses in JAX whose logits never reach memory."""

from pallas_loss._errors import UnsupportedError
from pallas_loss.api import (
    LogProbs,
    Metrics,
    fused_ce,
    fused_forward_kl,
    fused_linear_ce,
    fused_linear_logprob,
    fused_reverse_kl,
    fused_soft_ce,
)
from pallas_loss.padding import pad_to_bucket
from pallas_loss.validation import check_labels

__all__ = [
    "LogProbs",
    "Metrics",
    "UnsupportedError",
    "check_labels",
    "fused_ce",
    "fused_forward_kl",
    "fused_linear_ce",
    "fused_linear_logprob",
    "fused_reverse_kl",
    "fused_soft_ce",
    "pad_to_bucket",
]
__version__ = "0.1.0"
