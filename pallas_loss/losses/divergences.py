"""Losses against a target distribution: soft-target cross-entropy and the two KL divergences.

Letters: ``z`` logits with softmax ``p``; the target is given by probabilities ``q`` or by logits
``t`` with ``q = softmax(t)``; ``m``, ``mt`` are the maxima of a row, ``dz = z - m`` and
``dt = t - mt``. Every target is a constant.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_loss._types import Rows, Tile
from pallas_loss.losses.row_loss import MergesRowSums, RowFacts
from pallas_loss.losses.statistics import DLogits
from pallas_loss.row_sums import RowSums, over_columns, rows


@dataclass(frozen=True)
class SoftTarget(MergesRowSums):
    """``-sum q log p = mass lse - sum q z``;  ``d/dz = mass p - q``, with ``mass = sum q``.

    The sums are those of label smoothing, ``RowSums.u`` and ``c``, with ``q`` in the place of the
    class weights; so a column of ``q = 0`` adds 0 whatever its logit.
    """

    has_target: ClassVar[bool] = True
    moments: ClassVar[frozenset[str]] = frozenset({"u", "c"})

    def start(self, num_rows: int, moments: frozenset[str]) -> RowSums:
        return RowSums.start(num_rows, moments)._replace(z_label=None)

    def fold(self, sums, z, t, cols, labels, moments, class_weights) -> RowSums:
        return sums.fold(z, cols, None, moments, class_weights=t)

    def value(self, sums: RowSums, facts: RowFacts) -> Rows:
        return sums.c * jnp.log(sums.s) - sums.u

    def dlogits(self, sums: RowSums, facts: RowFacts, g: Rows) -> DLogits:
        return DLogits(sums.m, alpha=g * sums.c / sums.s, at_label=None, delta=-g)

    def tile(self, d: DLogits, z, t, cols, labels, class_weights) -> Tile:
        return d.tile(z, cols, None, class_weights=t)


class PairSums(NamedTuple):
    """Sums of two rows of logits compared column by column, each ``[T]``.

    Fields:
        m, s: the maximum of ``z``, finite where that is -inf, and ``sum e^dz``.
        mt, st: likewise of ``t``.
        d: ``sum_v w_v (a dz_v + b dt_v)``, with the weights and coefficients of a ``Divergence``.
    """

    m: Rows
    s: Rows
    mt: Rows
    st: Rows
    d: Rows


class PairDLogits(NamedTuple):
    """Of ``e^dz (at_z + slope (a dz + b dt)) + at_t e^dt``; ``None`` stands for 0, at no cost."""

    m: Rows
    mt: Rows
    at_z: Rows
    slope: Rows | None = None
    at_t: Rows | None = None


@dataclass(frozen=True)
class Divergence:
    """``E_w[a log p + b log q]``, with ``w = p`` (``over="p"``, a = 1) or ``w = q``.

    With ``sw`` the sum of the weights ``e^dz`` or ``e^dt``::

        value  = d / sw - a log s - b log st
        d/dz_v = a (q_v - p_v)                            over q
        d/dz_v = p_v (a log p_v + b log q_v - value)      over p

    A column of weight 0 adds 0, so one at -inf in both adds nothing. One at -inf in ``t`` alone
    makes ``log q`` infinite.
    """

    over: Literal["p", "q"]
    a: float
    b: float

    has_target: ClassVar[bool] = True
    moments: ClassVar[frozenset[str]] = frozenset[str]()

    def start(self, num_rows: int, moments: frozenset[str]) -> PairSums:
        zero = jnp.zeros((num_rows,), jnp.float32)
        lowest = jnp.full((num_rows,), jnp.finfo(jnp.float32).min)
        return PairSums(lowest, zero, lowest, zero, zero)

    def fold(self, sums: PairSums, z, t, cols, labels, moments, class_weights) -> PairSums:
        # Relative to the new maxima at once: of what a merge rebases, the tile's part is spared.
        m = jnp.maximum(sums.m, over_columns(jnp.max, z))
        mt = jnp.maximum(sums.mt, over_columns(jnp.max, t))
        dz, dt = z - rows(m, z), t - rows(mt, t)
        e, et = jnp.exp(dz), jnp.exp(dt)
        w = e if self.over == "p" else et
        # The product comes last: on a GPU it is then one instruction with its sum.
        d = w * jnp.where(w > 0, self._mixed(dz, dt), 0.0)
        of_tile = (over_columns(jnp.sum, v) for v in (e, et, d))
        s, st, d = (x + y for x, y in zip(self._rebase(sums, m, mt), of_tile, strict=True))
        return PairSums(m, s, mt, st, d)

    def merge_parts(self, parts: PairSums) -> PairSums:
        m, mt = jnp.max(parts.m, axis=0), jnp.max(parts.mt, axis=0)
        of_parts = (lax.broadcast_in_dim(v, parts.m.shape, (1,)) for v in (m, mt))
        s, st, d = (jnp.sum(v, axis=0) for v in self._rebase(parts, *of_parts))
        return PairSums(m, s, mt, st, d)

    def _rebase(self, sums: PairSums, m: Rows, mt: Rows) -> tuple[Rows, Rows, Rows]:
        """``s, st, d`` relative to ``m >= sums.m`` and ``mt >= sums.mt``."""
        by, by_t = sums.m - m, sums.mt - mt
        f, ft = jnp.exp(by), jnp.exp(by_t)
        fw, sw = (f, sums.s) if self.over == "p" else (ft, sums.st)
        d = jnp.where(fw == 0, 0.0, fw * (sums.d + sw * self._mixed(by, by_t)))
        return f * sums.s, ft * sums.st, d

    def value(self, sums: PairSums, facts: RowFacts) -> Rows:
        sw = sums.s if self.over == "p" else sums.st
        return sums.d / sw - self._mixed(jnp.log(sums.s), jnp.log(sums.st))

    def dlogits(self, sums: PairSums, facts: RowFacts, g: Rows) -> PairDLogits:
        p = g / sums.s
        if self.over == "q":
            return PairDLogits(sums.m, sums.mt, at_z=-self.a * p, at_t=self.a * g / sums.st)
        # log p and log q less their mean: the normalisers cancel.
        return PairDLogits(sums.m, sums.mt, at_z=-p * (sums.d / sums.s), slope=p)

    def tile(self, d: PairDLogits, z, t, cols, labels, class_weights) -> Tile:
        dz, dt = z - rows(d.m, z), t - rows(d.mt, t)
        e, factor = jnp.exp(dz), rows(d.at_z, z)
        if d.slope is not None:
            factor = factor + rows(d.slope, z) * self._mixed(dz, dt)
            return jnp.where(e > 0, e * factor, 0.0)
        return e * factor + rows(d.at_t, t) * jnp.exp(dt)

    def _mixed(self, on_z, on_t):
        """``a on_z + b on_t``; the second is not touched where it has no part."""
        return self.a * on_z if self.b == 0 else self.a * on_z + self.b * on_t


SOFT_CROSS_ENTROPY = Divergence(over="q", a=-1.0, b=0.0)
FORWARD_KL = Divergence(over="q", a=-1.0, b=1.0)
REVERSE_KL = Divergence(over="p", a=1.0, b=-1.0)
