"""From a raw product to a logit: scale, soft cap, temperature."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp

from pallas_loss._types import Rows, Tile
from pallas_loss.row_sums import rows


class LogitFactors(NamedTuple):
    """``z = inner * raw``, or with a soft cap ``z = outer * tanh(inner * raw)``.

    Each is a number, or one per row.
    """

    inner: float | Rows
    outer: float | Rows | None = None


@dataclass(frozen=True)
class LogitTransform:
    """``z = softcap(scale * raw) / temperature``, with ``softcap(s) = cap * tanh(s / cap)``.

    ``scale`` and ``temperature`` given to the methods, scalars or one number per row, take the
    place of the static ones. The last step of ``dL/draw = scale/temperature (1 - tanh^2) dL/dz``
    is ``chain``; ``slope`` is the rest, a factor of the coefficients of d-logits.
    """

    scale: float = 1.0
    temperature: float = 1.0
    soft_cap: float | None = None

    def slope(self, scale=None, temperature=None) -> float | Rows:
        """``scale / temperature``."""
        scale = self.scale if scale is None else scale
        return scale / (self.temperature if temperature is None else temperature)

    def factors(self, scale=None, temperature=None) -> LogitFactors:
        """What a tile is multiplied by; worked out once, not per logit."""
        if self.soft_cap is None:
            return LogitFactors(self.slope(scale, temperature))
        scale = self.scale if scale is None else scale
        temperature = self.temperature if temperature is None else temperature
        return LogitFactors(scale / self.soft_cap, self.soft_cap / temperature)

    def __call__(
        self, raw: Tile, by: LogitFactors, tanh: Callable = jnp.tanh
    ) -> tuple[Tile, Tile | None]:
        """The logits ``z`` of a tile of ``raw = x @ w + b``, float32, and their ``tanh``."""
        z = _times(raw, by.inner)
        if self.soft_cap is None:
            return z, None
        t = tanh(z)
        return _times(t, by.outer), t

    def chain(self, d: Tile, t: Tile | None) -> Tile:
        """``(1 - tanh^2) d``, exactly 0 where the cap saturates."""
        return d if t is None else d * (1.0 - t * t)


def _times(tile: Tile, v) -> Tile:
    if isinstance(v, float):
        return tile if v == 1.0 else tile * v
    return tile * (v if jnp.ndim(v) == 0 else rows(v, tile))
