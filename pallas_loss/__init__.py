"""Language-model losses in JAX whose logits never reach memory."""

from pallas_loss._errors import UnsupportedError
from pallas_loss.api import Metrics, fused_linear_ce
from pallas_loss.validation import check_labels

__all__ = ["Metrics", "UnsupportedError", "check_labels", "fused_linear_ce"]
__version__ = "0.1.0"
