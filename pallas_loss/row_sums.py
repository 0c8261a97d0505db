"""Per-row sums over the vocabulary, the only thing a forward sweep leaves behind.

Every loss of the library is a function of a few sums over columns ``v``. They are kept relative to
a shift ``m``, the largest logit seen, and merge by addition once re-based to a common shift: the
same rule serves the tiles of a kernel, the splits of a sweep and the shards of a mesh.

The label's own column is left out of the sums and kept beside them. A confident row then has a
tiny ``s`` rather than one that rounds to 1, so ``log1p(s)`` and ``p_y - 1`` keep their digits.
"""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_loss._types import RowLabels, RowMask, Rows, Tile

NEG_INF = float("-inf")
_LAST = 2**31 - 1


def rows(v: Rows, tile: Tile) -> Tile:
    """Broadcasts one value per row over the columns of ``tile``.

    The first half of a tile's axes are its rows, the others its columns: one of each, or, in a
    kernel that has a row for each thread, two.
    """
    return lax.broadcast_in_dim(v, tile.shape, tuple(range(v.ndim)))


def over_columns(reduce: Callable[..., jax.Array], v: Tile) -> Rows:
    """``reduce`` over the columns, the last axis first."""
    for _ in range(v.ndim // 2):
        v = reduce(v, axis=-1)
    return v


def shifted(z: Tile, m: Rows) -> Tile:
    """``z - m``; a row of nothing but -inf, whose ``m`` is no shift, stays -inf."""
    return z - rows(jnp.where(m == NEG_INF, 0.0, m), z)


def above_lowest(delta: Tile) -> Tile:
    """``delta``, finite where it is -inf: ``e^delta`` times a power of it is then 0, not NaN.

    float32's ``e^delta`` is 0 long before -1e4.
    """
    return jnp.maximum(delta, -1e4)


class RowSums(NamedTuple):
    """Sums over the columns ``v != y`` of one part of the vocabulary; ``None`` was not asked for.

    Fields, each ``[T]``:
        m: the shift: ``max_v z``, the label's column included, -inf where the part is empty; or
            one that was given (``of_exponentials``).
        s: ``sum e^(z-m)``.
        z_label: ``z_y``; -inf where this part does not hold the label.
        a: ``sum e^(z-m) (z-m)``.
        q: ``sum e^(z-m) (z-m)^2``.
        u: ``sum cw_v (z-m)`` over all columns, the label's included.
        c: ``sum cw_v`` over the same columns.
        argmax: the column of the maximum, the lowest one on ties.
        top: that maximum, where the shift was given.
    """

    m: Rows
    s: Rows
    z_label: Rows
    a: Rows | None = None
    q: Rows | None = None
    u: Rows | None = None
    c: Rows | None = None
    argmax: RowLabels | None = None
    top: Rows | None = None

    @classmethod
    def start(cls, num_rows: int, moments: Iterable[str], shift: Rows | None = None) -> "RowSums":
        """The sums over no column at all; relative to ``shift``, if it is given."""
        zero = jnp.zeros((num_rows,), jnp.float32)
        empty = jnp.full((num_rows,), NEG_INF, jnp.float32)
        argmax = jnp.zeros((num_rows,), jnp.int32) if "argmax" in moments else None
        extra = {name: zero for name in ("a", "q", "u", "c") if name in moments}
        if shift is not None and argmax is not None:
            extra["top"] = empty
        m = empty if shift is None else shift
        return cls(m=m, s=zero, z_label=empty, argmax=argmax, **extra)

    @classmethod
    def of_tile(
        cls,
        z: Tile,
        cols: jax.Array,
        labels: RowLabels | None,
        moments: Iterable[str],
        class_weights: Tile | None = None,
    ) -> "RowSums":
        """The sums over one tile of float32 logits.

        Args:
            z: logits; a column that is not part of the vocabulary holds -inf.
            cols: the vocabulary index of each element of ``z``, int32, ascending along a row.
            labels: the label of each row; one outside this tile matches no column. None says that
                all are outside, and spares the comparison; ``z_label`` is then None.
            moments: the optional fields wanted.
            class_weights: ``cw_v`` broadcast to ``z``; ``None`` counts every column once. Zero at
                a column that is not part of the vocabulary.
        """
        top = over_columns(jnp.max, z)
        sums, _ = cls._of_tile(z, top, top, cols, labels, moments, class_weights)
        if labels is None:
            return sums
        z_label = over_columns(jnp.max, jnp.where(cols == rows(labels, z), z, NEG_INF))
        return sums._replace(z_label=z_label)

    @classmethod
    def of_exponentials(
        cls, z: Tile, shift: Rows, cols, labels, moments, class_weights=None
    ) -> tuple["RowSums", Tile]:
        """``of_tile`` relative to a shift that is given, and ``e^(z - shift)``, the label's too.

        Any shift will do that keeps the exponentials finite. ``z_label`` is None.
        """
        top = over_columns(jnp.max, z) if "argmax" in moments else None
        sums, e = cls._of_tile(z, shift, top, cols, labels, moments, class_weights)
        return sums._replace(top=top), e

    @classmethod
    def _of_tile(
        cls, z: Tile, m: Rows, top: Rows | None, cols, labels, moments, class_weights
    ) -> tuple["RowSums", Tile]:
        delta = shifted(z, m)
        every_e = e = jnp.exp(delta)
        if labels is not None:
            e = jnp.where(cols == rows(labels, z), 0.0, e)
        extra: dict[str, jax.Array] = {}
        if "a" in moments:
            e_delta = e * above_lowest(delta)
            extra["a"] = over_columns(jnp.sum, e_delta)
            if "q" in moments:
                extra["q"] = over_columns(jnp.sum, e_delta * above_lowest(delta))
        if "u" in moments and class_weights is None:
            extra["u"] = over_columns(jnp.sum, delta)
            extra["c"] = jnp.full_like(m, float(math.prod(z.shape[m.ndim :])))
        elif "u" in moments:
            weighed = jnp.where(class_weights == 0, 0.0, class_weights * delta)
            extra["u"] = over_columns(jnp.sum, weighed)
            extra["c"] = over_columns(jnp.sum, class_weights)
        if "argmax" in moments:
            first = jnp.where(z == rows(top, z), cols, _LAST)
            extra["argmax"] = over_columns(jnp.min, first)
        return cls(m=m, s=over_columns(jnp.sum, e), z_label=None, **extra), every_e

    def fold(self, z: Tile, cols, labels, moments, class_weights=None) -> "RowSums":
        """Adds one more tile, whose columns lie past those seen."""
        return self.merge(RowSums.of_tile(z, cols, labels, moments, class_weights))

    def merge(self, other: "RowSums") -> "RowSums":
        """Adds another part of the vocabulary; on a tied maximum ``self`` keeps its argmax."""
        m = jnp.maximum(self.m, other.m)
        return self.rebase(m)._plus(other.rebase(m), self._top, other._top)

    def plus(self, other: "RowSums") -> "RowSums":
        """``merge`` where both are relative to the same shift (``of_exponentials``)."""
        return self._plus(other, self.top, other.top)

    def _plus(self, other: "RowSums", top: Rows | None, other_top: Rows | None) -> "RowSums":
        add = lambda x, y: None if x is None else x + y  # noqa: E731
        return self._replace(
            s=self.s + other.s,
            z_label=self.z_label
            if other.z_label is None
            else jnp.maximum(self.z_label, other.z_label),
            a=add(self.a, other.a),
            q=add(self.q, other.q),
            u=add(self.u, other.u),
            c=add(self.c, other.c),
            argmax=None
            if self.argmax is None
            else jnp.where(other_top > top, other.argmax, self.argmax),
            top=None if self.top is None else jnp.maximum(top, other_top),
        )

    @property
    def _top(self) -> Rows:
        return self.m if self.top is None else self.top

    def merge_parts(self) -> "RowSums":
        """Merges parts stacked along a leading axis, in the order of their columns."""
        m = jnp.max(self.m, axis=0)
        top = jnp.max(self._top, axis=0)
        of_parts = lambda v: lax.broadcast_in_dim(v, self.m.shape, (1,))  # noqa: E731
        based = self.rebase(of_parts(m))
        add = lambda v: None if v is None else jnp.sum(v, axis=0)  # noqa: E731
        return RowSums(
            m=m,
            s=jnp.sum(based.s, axis=0),
            z_label=None if self.z_label is None else jnp.max(self.z_label, axis=0),
            a=add(based.a),
            q=add(based.q),
            u=add(based.u),
            c=add(self.c),
            argmax=None
            if self.argmax is None
            else jnp.min(jnp.where(self._top == of_parts(top), self.argmax, _LAST), axis=0),
            top=None if self.top is None else top,
        )

    def only(self, rows: RowMask) -> "RowSums":
        """These sums where ``rows`` is True, elsewhere those of a row of two equal logits, 0."""
        fields = {k: v for k, v in self._asdict().items() if v is not None}
        return self._replace(
            **{k: jnp.where(rows, v, 1 if k == "s" else 0) for k, v in fields.items()}
        )

    def rebase(self, m: Rows) -> "RowSums":
        """The same sums relative to ``m >= self.m``."""
        by = jnp.where(self.m == NEG_INF, 0.0, m - self.m)
        f = jnp.exp(-by)
        # The polynomials in `by` overflow only where f is 0, and 0 * inf is to be 0.
        scaled = lambda v: jnp.where(f == 0, 0.0, f * v)  # noqa: E731
        return self._replace(
            m=m,
            s=f * self.s,
            a=None if self.a is None else scaled(self.a - by * self.s),
            q=None if self.q is None else scaled(self.q - by * (2 * self.a - by * self.s)),
            u=None if self.u is None else self.u - by * self.c,
        )
