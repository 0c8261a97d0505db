"""Tile sizes: frozen configs, and who decides them."""

from pallas_loss.tuning import blackwell, heuristics
from pallas_loss.tuning.configs import (
    SMEM_BYTES,
    TMEM_COLUMNS,
    BlackwellConfig,
    HopperConfig,
    RowConfig,
    TritonRowConfig,
    XlaConfig,
)
from pallas_loss.tuning.lookup import lookup, override

__all__ = [
    "SMEM_BYTES",
    "HopperConfig",
    "RowConfig",
    "TritonRowConfig",
    "TMEM_COLUMNS",
    "BlackwellConfig",
    "XlaConfig",
    "blackwell",
    "heuristics",
    "lookup",
    "override",
]
