"""Cross-entropy and its options, as arithmetic on row statistics."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_loss._types import Rows
from pallas_loss.losses.statistics import NLL, LogSumExp, Statistic, UniformNLL


@dataclass(frozen=True)
class CrossEntropy:
    """``(1-e) cw_y nll + e uniform_nll + c lse^2``, times a detached ``p_y`` with token scaling.

    ``e`` is ``label_smoothing`` in the e/V convention, ``c`` is ``z_loss``.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    token_scaling: bool = False

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        smoothing = (UniformNLL(),) if self.label_smoothing else ()
        return (NLL(), LogSumExp(), *smoothing)

    def __call__(self, stats: Mapping[str, Rows], label_weight: Rows | float) -> "TokenLoss":
        """Per-token terms from the row statistics; ``label_weight`` is ``cw_y``."""
        nll = label_weight * stats["nll"]
        if self.label_smoothing:
            e = self.label_smoothing
            nll = (1 - e) * nll + e * stats["uniform_nll"]
        z_loss = self.z_loss * stats["lse"] ** 2 if self.z_loss else jnp.zeros_like(nll)
        if self.token_scaling:
            p_label = jax.lax.stop_gradient(jnp.exp(-stats["nll"]))
            nll, z_loss = p_label * nll, p_label * z_loss
        return TokenLoss(nll, z_loss)


class TokenLoss(NamedTuple):
    """The two terms of a token's loss, each ``[T]``; the loss is their sum."""

    nll: Rows
    z_loss: Rows


def divided(total: jax.Array, normalizer: jax.Array | None) -> jax.Array:
    """``total / normalizer``, 0 where that is 0."""
    if normalizer is None:
        return total
    empty = normalizer == 0
    return jnp.where(empty, 0.0, total / jnp.where(empty, 1.0, normalizer))
