"""Losses of one row of logits, as a backend that holds the logits sees them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from pallas_loss._types import RowLabels, Rows, Tile
from pallas_loss.losses.cross_entropy import CrossEntropy
from pallas_loss.losses.statistics import DLogits, Softmax, combined_dlogits
from pallas_loss.row_sums import RowSums


class RowFacts(NamedTuple):
    """What is known of each row beside its logits: the label and its class weight."""

    labels: RowLabels | None = None
    label_weight: Rows | None = None


class RowLoss[Sums, Coefficients](Protocol):
    """A per-row loss from sums over the columns, and its derivative tile by tile.

    ``has_target`` says that there is a second array ``t`` as large as the logits, ``moments`` which
    optional ``RowSums`` it needs. ``g`` is the cotangent of a row's loss.
    """

    has_target: ClassVar[bool]

    @property
    def moments(self) -> frozenset[str]: ...

    def start(self, num_rows: int, moments: frozenset[str]) -> Sums:
        """The sums over no column at all."""
        ...

    def fold(
        self,
        sums: Sums,
        z: Tile,
        t: Tile | None,
        cols,
        labels: RowLabels | None,
        moments: frozenset[str],
        class_weights: Tile | None,
    ) -> Sums:
        """Adds a tile of the columns that follow; one that is not part of the vocabulary holds -inf
        in ``z``, -inf in logits ``t`` and 0 in probabilities ``t``. Else as ``RowSums.of_tile``."""
        ...

    def merge_parts(self, parts: Sums) -> Sums:
        """Merges parts stacked along a leading axis, in the order of their columns."""
        ...

    def value(self, sums: Sums, facts: RowFacts) -> Rows:
        """The loss of each row."""
        ...

    def dlogits(self, sums: Sums, facts: RowFacts, g: Rows) -> Coefficients:
        """The coefficients of ``g dL/dz``."""
        ...

    def tile(self, d: Coefficients, z: Tile, t: Tile | None, cols, labels, class_weights) -> Tile:
        """``g dL/dz`` of one tile."""
        ...


class MergesRowSums:
    """The merges of a loss whose sums are ``RowSums``."""

    def start(self, num_rows: int, moments: frozenset[str]) -> RowSums:
        return RowSums.start(num_rows, moments)

    def merge_parts(self, parts: RowSums) -> RowSums:
        return parts.merge_parts()


@dataclass(frozen=True)
class LabelLoss(MergesRowSums):
    """Cross-entropy with its options; JAX differentiates the arithmetic on the statistics.

    ``log1p`` is replaced where the platform has none.
    """

    loss: CrossEntropy
    vocab: int
    log1p: Callable[[Any], Any] = jnp.log1p

    has_target: ClassVar[bool] = False

    @property
    def moments(self) -> frozenset[str]:
        return frozenset().union(*(f.moments for f in self.loss.statistics))

    def fold(self, sums, z, t, cols, labels, moments, class_weights) -> RowSums:
        return sums.fold(z, cols, labels, moments, class_weights)

    def statistics(self, sums: RowSums, facts: RowFacts) -> dict[str, Rows]:
        """The statistics of each row by name."""
        p = Softmax(sums, facts.labels, self.vocab, self.log1p)
        return {f.name: f.value(p) for f in self.loss.statistics}

    def value(self, sums: RowSums, facts: RowFacts) -> Rows:
        return sum(self.terms(self.statistics(sums, facts), facts))

    def terms(self, stats: dict[str, Rows], facts: RowFacts):
        """The loss of each row as ``TokenLoss``."""
        return self.loss(stats, 1.0 if facts.label_weight is None else facts.label_weight)

    def dlogits(self, sums: RowSums, facts: RowFacts, g: Rows) -> DLogits:
        p = Softmax(sums, facts.labels, self.vocab, self.log1p)
        statistics = self.loss.statistics
        if not (self.loss.z_loss or self.loss.token_scaling):
            # Linear in the statistics: their values are not needed.
            stats = {f.name: jnp.zeros_like(g) for f in statistics}
        else:
            stats = {f.name: f.value(p) for f in statistics}
        _, pull = jax.vjp(lambda stats: sum(self.terms(stats, facts)), stats)
        return combined_dlogits(statistics, p, pull(g)[0])

    def tile(self, d: DLogits, z, t, cols, labels, class_weights) -> Tile:
        return d.tile(z, cols, labels, class_weights)
