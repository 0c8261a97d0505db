"""From per-token values to what the caller wants."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_loss._types import Reduction, RowMask, Rows, Scalar
from pallas_loss.losses import CrossEntropy, TokenLoss, divided
from pallas_loss.sharding import LOCAL, Placement


def reduce(
    per_token,
    reduction: Reduction,
    normalizer,
    batch: tuple[int, ...],
    placement: Placement = LOCAL,
):
    """``per_token [T]`` as the caller wants it; a mean over nothing is 0."""
    if reduction == "none":
        return placement.unflatten(per_token, batch)
    return divided(placement.total(per_token), normalizer if reduction == "mean" else None)


class TokenFactors(NamedTuple):
    """What meets the statistics of a token in its loss; None is 1.

    Attributes:
        counted: which tokens do.
        weight: the caller's factor of each.
        label_weight: ``cw_y``.
        normalizer: what the sum of their losses is divided by.
    """

    counted: RowMask
    weight: Rows | None
    label_weight: Rows | None
    normalizer: Scalar | None

    def weights(self) -> Rows:
        """``weight_t cw_y`` of the tokens that count."""
        weight = jnp.float32(_product(self.weight, self.label_weight))
        return jnp.where(self.counted, weight, jnp.float32(0))


@dataclass(frozen=True)
class ReducedCrossEntropy:
    """``sum_t weight_t loss_t / normalizer``; hashable, for the rule of losses in one number."""

    loss: CrossEntropy

    def per_token(self, stats: Mapping[str, Rows], factors: TokenFactors) -> TokenLoss:
        """The weighted terms of each token, before the division."""
        label_weight = 1.0 if factors.label_weight is None else factors.label_weight
        weighted = lambda term: jnp.where(  # noqa: E731
            factors.counted, _product(factors.weight, None) * term, 0.0
        )
        return jax.tree.map(weighted, self.loss(stats, label_weight))

    def value(self, stats: Mapping[str, Rows], factors: TokenFactors) -> Scalar:
        """The loss, a number."""
        return self.total(self.per_token(stats, factors), factors)

    def total(self, terms: TokenLoss, factors: TokenFactors) -> Scalar:
        """The sum of both terms, each reduced as ``value`` is."""
        nll = divided(jnp.sum(terms.nll), factors.normalizer)
        return nll + divided(jnp.sum(terms.z_loss), factors.normalizer) if self.loss.z_loss else nll

    def shares(self, stats: Mapping[str, Rows], factors: TokenFactors) -> Rows:
        """Each token's part of ``value``."""
        terms = self.per_token(stats, factors)
        return divided(terms.nll + terms.z_loss, factors.normalizer)


def _product(a: Rows | None, b: Rows | None) -> Rows | float:
    return (1.0 if a is None else a) * (1.0 if b is None else b)
