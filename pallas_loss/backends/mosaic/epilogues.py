"""What the kernels do to a tile of logits that sits in registers; the mathematics is ``losses``'.

An epilogue is given global memory by name: ``per_row`` and ``per_col`` inputs padded to whole
tiles, and its outputs. An input that is absent costs nothing.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_loss.backends.base import LinearProblem
from pallas_loss.backends.mosaic.common import (
    ROW,
    Place,
    Ref,
    Refs,
    TileStores,
    cols_of,
    finish_stores,
    load_cols,
    load_rows,
    over_rows,
    store_buffer,
    tanh,
)
from pallas_loss.losses import DLogits, LogitFactors
from pallas_loss.row_sums import NEG_INF, RowSums, shifted
from pallas_loss.tuning import HopperConfig

FACTORS = ("inner", "outer")


@dataclass(frozen=True)
class LogitTiles:
    """Turns slices of an accumulator into logits.

    ``vocab`` is given where columns past the vocabulary can occur: they become -inf.
    """

    problem: LinearProblem
    config: HopperConfig
    factors: LogitFactors
    vocab: int | None
    per_row: Refs
    per_col: Refs
    label_tiles: Ref

    def rows(self, place: Place, *names: str) -> dict[str, jax.Array]:
        """The per-row inputs of these names, of those there are, for one warpgroup's rows."""
        return {
            name: load_rows(self.per_row[name], place.row, self.config.tile_m)
            for name in (*names, *FACTORS)
            if name in self.per_row
        }

    def has_label(self, place: Place) -> jax.Array:
        """Whether the label of any row lies in a warpgroup's tile: most tiles hold none."""
        row, col = lax.div(place.row, self.config.tile_m), lax.div(place.col, self.config.tile_n)
        return self.label_tiles[row, col] > 0

    def slices(self, acc: jax.Array, place: Place, rows: dict[str, jax.Array]):
        """Yields ``(first column in the tile, z, tanh, cols, class weights)`` slice by slice."""
        width = self.config.epilogue_n
        shape = (self.config.tile_m, width)
        by = LogitFactors(*(rows.get(n, f) for n, f in zip(FACTORS, self.factors, strict=True)))
        for start in range(0, self.config.tile_n, width):
            raw = acc[:, start : start + width]
            first = place.col + start
            if "bias" in self.per_col:
                raw = raw + over_rows(load_cols(self.per_col["bias"], first, width), shape)
            z, t = self.problem.transform(raw, by, tanh)
            cols = cols_of(shape, first)
            if self.vocab is not None:
                z = jnp.where(cols < self.vocab, z, NEG_INF)
            cw = None
            if "class_weights" in self.per_col:
                cw = over_rows(load_cols(self.per_col["class_weights"], first, width), shape)
            yield start, z, t, cols, cw


@dataclass(frozen=True)
class RowSumsEpilogue:
    """Folds a group of tiles into ``RowSums`` and writes them at ``[group, row]``."""

    tiles: LogitTiles
    out: RowSums  # of refs [parts, T]
    scratch: Any = ()

    def start(self, place: Place):
        rows = self.tiles.rows(place, "labels")
        sums = RowSums.start(self.tiles.config.tile_m, self.tiles.problem.moments)
        return rows, jax.tree.map(_as_rows, sums)

    def before(self, place: Place) -> jax.Array:
        return self.tiles.has_label(place)

    def fold(self, state, has_label, acc, place: Place, scratch):
        rows, sums = state

        def folded(labels, sums):
            for _, z, _, cols, cw in self.tiles.slices(acc, place, rows):
                sums = sums.fold(z, cols, labels, self.tiles.problem.moments, cw)
            return sums

        with_labels, without = partial(folded, rows["labels"]), partial(folded, None)
        return rows, lax.cond(has_label, with_labels, without, sums)

    def finish(self, state, place: Place, scratch) -> None:
        config = self.tiles.config
        part = place.group * 2 + place.wg if config.split == "n" else place.group
        for ref, value in zip(jax.tree.leaves(self.out), jax.tree.leaves(state[1]), strict=True):
            ref.at[part, pl.ds(place.row, config.tile_m)][...] = value


@dataclass(frozen=True)
class StoringEpilogue:
    """``RowSumsEpilogue`` that also keeps ``e^(z - m)``, with one ``m`` per row and slice."""

    sums: RowSumsEpilogue
    e_out: Ref  # [T, columns]
    m_out: Ref  # [slices, T]
    scratch: Any = field(init=False)

    def __post_init__(self):
        buffer = store_buffer(self.sums.tiles.config.epilogue_n, self.e_out.dtype)
        object.__setattr__(self, "scratch", buffer)

    def start(self, place: Place):
        return self.sums.start(place)

    def before(self, place: Place) -> jax.Array:
        return self.sums.before(place)

    def fold(self, state, has_label, acc, place: Place, smem):
        rows, sums = state
        tiles, config = self.sums.tiles, self.sums.tiles.config

        def folded(labels, sums):
            stores = TileStores(smem, self.e_out, config, config.epilogue_n)
            for start, z, _, cols, cw in tiles.slices(acc, place, rows):
                part = RowSums.of_tile(z, cols, labels, tiles.problem.moments, cw)
                sums = sums.merge(part)
                stores(jnp.exp(shifted(z, part.m)), place.row, place.col + start, place.wg)
                slice_ = lax.div(place.col + start, config.epilogue_n)
                self.m_out.at[slice_, pl.ds(place.row, config.tile_m)][...] = part.m
            return sums

        with_labels, without = partial(folded, rows["labels"]), partial(folded, None)
        return rows, lax.cond(has_label, with_labels, without, sums)

    def finish(self, state, place: Place, scratch) -> None:
        self.sums.finish(state, place, scratch)
        finish_stores()


@dataclass(frozen=True)
class DLogitsEpilogue:
    """Writes d-logits of one split of the vocabulary, whose first column is ``first``."""

    tiles: LogitTiles
    first: jax.Array
    out: Ref  # [T, split]
    scratch: Any = field(init=False)

    def __post_init__(self):
        config = self.tiles.config
        buffer = store_buffer(config.epilogue_n, self.out.dtype)
        object.__setattr__(self, "scratch", buffer)

    def start(self, place: Place):
        return self.tiles.rows(place, "labels", *DLogits._fields)

    def before(self, place: Place) -> jax.Array:
        return self.tiles.has_label(self._in_vocab(place))

    def fold(self, rows, has_label, acc, place: Place, d_smem):
        store = partial(self._store, rows, acc, place, d_smem)
        pl.when(has_label)(lambda: store(rows["labels"]))
        pl.when(~has_label)(lambda: store(None))
        return rows

    def _in_vocab(self, place: Place) -> Place:
        return place._replace(col=self.first + place.col)

    def _store(self, rows, acc, place: Place, d_smem, labels) -> None:
        config = self.tiles.config
        c = DLogits(**{name: rows.get(name) for name in DLogits._fields})
        stores = TileStores(d_smem, self.out, config, config.epilogue_n)
        for start, z, t, cols, cw in self.tiles.slices(acc, self._in_vocab(place), rows):
            d = self.tiles.problem.transform.chain(c.tile(z, cols, labels, cw), t)
            stores(d, place.row, place.col + start, place.wg)

    def finish(self, state, place: Place, scratch) -> None:
        finish_stores()


def _as_rows(v: jax.Array) -> jax.Array:
    return plgpu.layout_cast(v, ROW)
