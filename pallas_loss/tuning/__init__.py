"""Tile sizes: frozen configs, and who decides them."""

from pallas_loss.tuning.configs import XlaConfig
from pallas_loss.tuning.lookup import lookup, override

__all__ = ["XlaConfig", "lookup", "override"]
