"""Row statistics: functions of the sums over a row, with their derivatives."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple, Protocol

import jax.numpy as jnp

from pallas_loss._types import Candidates, RowLabels, Rows, Tile
from pallas_loss.losses.logits import LogitFactors
from pallas_loss.row_sums import NEG_INF, RowSums, above_lowest, rows


class Softmax:
    """What the statistics share: per-row softmax quantities, from the sums of a whole row."""

    def __init__(self, sums: RowSums, labels: RowLabels, vocab: int, log1p: Callable = jnp.log1p):
        self.sums = sums
        self.vocab = vocab
        self.log1p = log1p
        self.bad_label = labels < 0
        self.gap = sums.z_label - sums.m  # <= 0
        self.e_label = jnp.exp(self.gap)
        self.total = sums.s + self.e_label
        self.p_label = self.e_label / self.total
        self.not_label = sums.s / self.total  # 1 - p_y, without the cancellation

    @cached_property
    def log_total(self) -> Rows:
        # Where the label is the maximum, e_label = 1 and log(1 + s) must not round 1 + s first.
        return jnp.where(self.gap >= 0, self.log1p(self.sums.s), jnp.log(self.total))

    def mean(self) -> Rows:
        """``E_p[z - m]``."""
        return (self.sums.a + self._at_label(self.gap)) / self.total

    def variance(self) -> Rows:
        """``Var_p[z]``."""
        second = (self.sums.q + self._at_label(self.gap * self.gap)) / self.total
        return second - self.mean() ** 2

    def _at_label(self, v: Rows) -> Rows:
        return jnp.where(self.e_label > 0, self.e_label * v, 0.0)


class DLogits(NamedTuple):
    """The coefficients of d-logits, each ``[T]``; ``None`` stands for 0 and costs nothing."""

    shift: Rows
    alpha: Rows
    at_label: Rows | None
    beta: Rows | None = None
    delta: Rows | None = None

    def __add__(self, other: "DLogits") -> "DLogits":  # type: ignore[override]
        add = lambda x, y: y if x is None else x if y is None else x + y  # noqa: E731
        return DLogits(self.shift, *(add(x, y) for x, y in zip(self[1:], other[1:], strict=True)))

    def scaled(self, k) -> "DLogits":
        """Every coefficient times ``k``."""
        return DLogits(self.shift, *(None if x is None else x * k for x in self[1:]))

    def tile(
        self, z: Tile, cols, labels: RowLabels | None, class_weights: Tile | None = None
    ) -> Tile:
        """``dL/dz`` of one tile of logits; arguments as for ``RowSums.of_tile``.

        A column that is not part of the vocabulary holds -inf in ``z`` and gets 0.
        """
        delta_z = z - rows(self.shift, z)
        factor = rows(self.alpha, z)
        if self.beta is not None:
            factor = factor + rows(self.beta, z) * above_lowest(delta_z)
        return self._finish(jnp.exp(delta_z) * factor, z > NEG_INF, cols, labels, class_weights)

    def of_exponentials(
        self, e: Tile, cols, labels: RowLabels, present: Tile, class_weights: Tile | None = None
    ) -> Tile:
        """``tile`` from ``e = e^(z - shift)``, where ``beta`` is None.

        ``present`` is True at the columns that are part of the vocabulary.
        """
        return self._finish(e * rows(self.alpha, e), present, cols, labels, class_weights)

    def _finish(self, d: Tile, present: Tile, cols, labels, class_weights) -> Tile:
        if labels is not None:
            d = jnp.where(cols == rows(labels, d), rows(self.at_label, d), d)
        if self.delta is not None:
            cw = 1.0 if class_weights is None else class_weights
            d = d + jnp.where(present, rows(self.delta, d) * cw, 0.0)
        return d

    @property
    def scales_rows(self) -> bool:
        """Whether d-logits are ``alpha e^(z - shift)`` everywhere but at the label."""
        return self.beta is None and self.delta is None


class Statistic(Protocol):
    """A per-row function of the logits. ``moments`` names the optional sums it needs."""

    name: ClassVar[str]
    moments: ClassVar[frozenset[str]]
    temperature_moments: ClassVar[frozenset[str]]

    def value(self, p: Softmax) -> Rows:
        """``f(z)``."""
        ...

    def dlogits(self, p: Softmax, g: Rows) -> DLogits:
        """``g df/dz``."""
        ...

    def dot_z(self, p: Softmax) -> Rows:
        """``sum_v z_v df/dz_v``, so that ``df/dtemperature = -dot_z / temperature``."""
        ...


@dataclass(frozen=True)
class NLL:
    """``lse - z_y``;  ``d/dz = p - 1_y``;  ``sum z d/dz = E z - z_y``."""

    name: ClassVar[str] = "nll"
    moments: ClassVar[frozenset[str]] = frozenset[str]()
    temperature_moments: ClassVar[frozenset[str]] = frozenset({"a"})

    def value(self, p: Softmax) -> Rows:
        return jnp.where(p.bad_label, jnp.nan, p.log_total - p.gap)

    def dlogits(self, p: Softmax, g: Rows) -> DLogits:
        g = jnp.where(p.bad_label & (g != 0), jnp.nan, g)
        return DLogits(p.sums.m, alpha=g / p.total, at_label=-g * p.not_label)

    def dot_z(self, p: Softmax) -> Rows:
        return p.mean() - p.gap


@dataclass(frozen=True)
class LogSumExp:
    """``lse = log sum e^z``;  ``d/dz = p``;  ``sum z d/dz = E z``."""

    name: ClassVar[str] = "lse"
    moments: ClassVar[frozenset[str]] = frozenset[str]()
    temperature_moments: ClassVar[frozenset[str]] = frozenset({"a"})

    def value(self, p: Softmax) -> Rows:
        return p.sums.m + p.log_total

    def dlogits(self, p: Softmax, g: Rows) -> DLogits:
        return DLogits(p.sums.m, alpha=g / p.total, at_label=g * p.p_label)

    def dot_z(self, p: Softmax) -> Rows:
        return p.sums.m + p.mean()


@dataclass(frozen=True)
class UniformNLL:
    """``(1/V) sum_v cw_v (lse - z_v)``, what label smoothing adds;  ``d/dz = (c p - cw) / V``.

    ``c`` is ``sum_v cw_v``.
    """

    name: ClassVar[str] = "uniform_nll"
    moments: ClassVar[frozenset[str]] = frozenset({"u", "c"})
    temperature_moments: ClassVar[frozenset[str]] = frozenset({"a"})

    def value(self, p: Softmax) -> Rows:
        return (p.sums.c * p.log_total - p.sums.u) / p.vocab

    def dlogits(self, p: Softmax, g: Rows) -> DLogits:
        g = g / p.vocab
        c = g * p.sums.c
        return DLogits(p.sums.m, alpha=c / p.total, at_label=c * p.p_label, delta=-g)

    def dot_z(self, p: Softmax) -> Rows:
        return (p.sums.c * p.mean() - p.sums.u) / p.vocab


@dataclass(frozen=True)
class Entropy:
    """``H = lse - E z``, in nats;  ``d/dz = -p (z - E z)``;  ``sum z d/dz = -Var z``.

    The derivative is the familiar ``-p (log p + H)``, since ``log p + H = z - E z``.
    """

    name: ClassVar[str] = "entropy"
    moments: ClassVar[frozenset[str]] = frozenset({"a"})
    temperature_moments: ClassVar[frozenset[str]] = frozenset({"a", "q"})

    def value(self, p: Softmax) -> Rows:
        return jnp.maximum(p.log_total - p.mean(), 0.0)

    def dlogits(self, p: Softmax, g: Rows) -> DLogits:
        per_e, mean = g / p.total, p.mean()
        at_label = jnp.where(p.e_label > 0, -per_e * p.e_label * (p.gap - mean), 0.0)
        return DLogits(p.sums.m, alpha=per_e * mean, beta=-per_e, at_label=at_label)

    def dot_z(self, p: Softmax) -> Rows:
        return -p.variance()


@dataclass(frozen=True)
class CandidateLogProb:
    """``z_k - lse`` at K columns a row, given by their logits;  ``d/dz = 1_k - p``.

    The part in ``p`` is that of ``-lse``; the rest is ``g`` at the candidates' own columns.
    """

    name: ClassVar[str] = "candidate_logprob"

    def value(self, p: Softmax, z: Candidates, candidates) -> Candidates:
        # The candidates' products round apart from the sweep's, so p could pass 1 by an ulp.
        logprob = jnp.minimum(z - p.sums.m[:, None] - p.log_total[:, None], 0.0)
        return jnp.where(candidates < 0, jnp.nan, logprob)

    def cotangent(self, g: Candidates, candidates) -> Candidates:
        """``g``, NaN at a bad candidate that takes part."""
        return jnp.where((candidates < 0) & (g != 0), jnp.nan, g)

    def dlogits(self, p: Softmax, g: Candidates) -> DLogits:
        return LogSumExp().dlogits(p, -jnp.sum(g, axis=1))

    def at_candidates(self, g: Candidates, z: Candidates, by: LogitFactors) -> Candidates:
        """``dL/dz`` at the candidates' columns, through the soft cap."""
        if by.outer is None:
            return g
        tanh = z / jnp.broadcast_to(by.outer, z.shape[:1])[:, None]
        return g * (1.0 - tanh * tanh)

    def dot_z(self, p: Softmax, z: Candidates, g: Candidates) -> Rows:
        """``sum_k g_k (z_k - E z)``."""
        gap = z - p.sums.m[:, None] - p.mean()[:, None]
        return jnp.sum(jnp.where(g == 0, 0.0, g * gap), axis=1)


def combined_dlogits(
    statistics: Sequence[Statistic], p: Softmax, cotangents: Mapping[str, Rows]
) -> DLogits:
    """The coefficients of ``sum_f g_f df/dz``; a statistic without a cotangent adds nothing."""
    zero = jnp.zeros_like(p.sums.m)
    total = DLogits(p.sums.m, alpha=zero, at_label=zero)
    for f in statistics:
        if f.name in cotangents:
            total = total + f.dlogits(p, cotangents[f.name])
    return total
