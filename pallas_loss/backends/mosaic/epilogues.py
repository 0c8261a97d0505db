"""What the kernels do to a tile of logits that sits in registers; the mathematics is ``losses``'.

An epilogue is given global memory by name: ``per_row`` and ``per_col`` inputs padded to whole
tiles, and its outputs. An input that is absent costs nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_loss.backends.base import LinearProblem
from pallas_loss.backends.mosaic.common import (
    Accumulator,
    Config,
    Place,
    Ref,
    Refs,
    Registers,
    TileStores,
    finish_stores,
    over_rows,
    registers,
    store_buffer,
    tanh,
)
from pallas_loss.losses import DLogits, LogitFactors
from pallas_loss.row_sums import NEG_INF, RowSums, shifted

FACTORS = ("inner", "outer")


@dataclass(frozen=True)
class LogitTiles:
    """Turns slices of an accumulator into logits.

    ``vocab`` is given where columns past the vocabulary can occur: they become -inf. Only in slices
    that are marked are there such columns, or labels: most have neither, and need no comparison.
    """

    problem: LinearProblem
    config: Config
    factors: LogitFactors
    vocab: int | None
    per_row: Refs
    per_col: Refs
    marks: Ref

    @property
    def registers(self) -> Registers:
        """How a tile lies in registers."""
        return registers(self.config)

    def rows(self, place: Place, *names: str) -> dict[str, jax.Array]:
        """The per-row inputs of these names, of those there are, for one warpgroup's rows."""
        return {
            name: self.registers.load_rows(self.per_row[name], place.row, self.config.tile_m)
            for name in (*names, *FACTORS)
            if name in self.per_row
        }

    def marked(self, place: Place) -> tuple[jax.Array, ...]:
        """For each slice of a tile, whether it holds a label or passes the vocabulary's end."""
        width = self.config.epilogue_n
        row, first = lax.div(place.row, self.config.tile_m), lax.div(place.col, width)
        return tuple(self.marks[row, first + i] > 0 for i in range(len(self.starts)))

    @property
    def starts(self) -> range:
        """The first column of each slice, in its tile."""
        return range(0, self.config.tile_n, self.config.epilogue_n)

    def over_slices(self, marked: tuple[jax.Array, ...], body: Callable, carry=()):
        """``carry`` after ``body(start, marked, carry)`` of each slice.

        A branch a slice also keeps the assembler from interleaving slices, which spilled.
        """
        for start, flag in zip(self.starts, marked, strict=True):
            branches = (partial(body, start, is_marked) for is_marked in (True, False))
            carry = lax.cond(flag, *branches, carry)
        return carry

    def logits(
        self, acc: Accumulator, place: Place, rows: dict[str, jax.Array], start: int, marked: bool
    ):
        """``(z, tanh, cols, labels, class weights)`` of one slice."""
        width = self.config.epilogue_n
        shape = (self.config.tile_m, width)
        by = LogitFactors(*(rows.get(n, f) for n, f in zip(FACTORS, self.factors, strict=True)))
        raw = acc[:, start : start + width]
        first = place.col + start
        if "bias" in self.per_col:
            raw = raw + self._over_rows("bias", first, shape)
        z, t = self.problem.transform(raw, by, tanh)
        cols = self.registers.cols_of(shape, first)
        if marked and self.vocab is not None:
            z = jnp.where(cols < self.vocab, z, NEG_INF)
        weights = ("class_weights", "present") if marked else ("class_weights",)
        given = [name for name in weights if name in self.per_col]
        cw = self._over_rows(given[0], first, shape) if given else None
        return z, t, cols, rows["labels"] if marked else None, cw

    def _over_rows(self, name: str, first, shape: tuple[int, int]) -> jax.Array:
        """A per-column input, from the column ``first`` on."""
        return over_rows(self.registers.load_cols(self.per_col[name], first, shape[1]), shape)


@dataclass(frozen=True)
class RowSumsEpilogue:
    """Folds a group of tiles into ``RowSums`` and writes them at ``[group, row]``."""

    tiles: LogitTiles
    out: RowSums  # of refs [parts, T]

    scratch: ClassVar[Any] = ()

    def start(self, place: Place):
        rows = self.tiles.rows(place, "labels")
        sums = RowSums.start(self.tiles.config.tile_m, self.tiles.problem.moments)
        return rows, jax.tree.map(self.tiles.registers.as_rows, sums)

    def before(self, place: Place):
        return self.tiles.marked(place)

    def fold(self, state, marked, acc, place: Place, scratch):
        return self.fold_slices(state, marked, acc, place, lambda *_: None)

    def fold_slices(self, state, marked, acc, place: Place, keep):
        """Folds slice by slice; ``keep(start, z, sums of the slice)`` is shown each."""
        rows, sums = state

        def folded(start, marked, sums):
            z, _, cols, labels, cw = self.tiles.logits(acc, place, rows, start, marked)
            part = RowSums.of_tile(z, cols, labels, self.tiles.problem.moments, cw)
            keep(start, z, part)
            return sums.merge(part)

        return rows, self.tiles.over_slices(marked, folded, sums)

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

    @property
    def scratch(self):
        config = self.sums.tiles.config
        return store_buffer(config, config.epilogue_n, self.e_out.dtype)

    def start(self, place: Place):
        return self.sums.start(place)

    def before(self, place: Place):
        return self.sums.before(place)

    def fold(self, state, marked, acc, place: Place, smem):
        config = self.sums.tiles.config
        stores = TileStores(smem, self.e_out, config, config.epilogue_n)

        def keep(start, z, part):
            stores(jnp.exp(shifted(z, part.m)), place, start)
            nth = lax.div(place.col, config.epilogue_n) + start // config.epilogue_n
            self.m_out.at[nth, pl.ds(place.row, config.tile_m)][...] = part.m

        return self.sums.fold_slices(state, marked, acc, place, keep)

    def finish(self, state, place: Place, scratch) -> None:
        self.sums.finish(state, place, scratch)
        finish_stores()


@dataclass(frozen=True)
class ExponentialsEpilogue:
    """Folds row sums relative to a given shift, and keeps ``e^(z - shift)``.

    Of the sums, ``m`` and ``z_label`` are known and not written.
    """

    sums: RowSumsEpilogue
    out: Ref  # [T, columns]

    @property
    def scratch(self):
        config = self.sums.tiles.config
        return store_buffer(config, config.epilogue_n, self.out.dtype)

    def start(self, place: Place):
        tiles = self.sums.tiles
        rows = tiles.rows(place, "labels", "shift")
        sums = RowSums.start(tiles.config.tile_m, tiles.problem.moments, rows["shift"])
        return rows, jax.tree.map(tiles.registers.as_rows, sums)

    def before(self, place: Place):
        return self.sums.before(place)

    def fold(self, state, marked, acc, place: Place, smem):
        tiles, (rows, sums) = self.sums.tiles, state
        problem, config = tiles.problem, tiles.config
        stores = TileStores(smem, self.out, config, config.epilogue_n)

        def folded(start, marked, sums):
            z, t, cols, labels, cw = tiles.logits(acc, place, rows, start, marked)
            part, e = RowSums.of_exponentials(z, rows["shift"], cols, labels, problem.moments, cw)
            stores(problem.transform.chain(e, t), place, start)
            return sums.plus(part)

        return rows, tiles.over_slices(marked, folded, sums)

    def finish(self, state, place: Place, scratch) -> None:
        rows, sums = state
        self.sums.finish((rows, sums._replace(m=None, z_label=None)), place, scratch)
        finish_stores()


@dataclass(frozen=True)
class DLogitsEpilogue:
    """Writes d-logits of one split of the vocabulary, whose first column is ``first``."""

    tiles: LogitTiles
    first: jax.Array
    out: Ref  # [T, split]

    @property
    def scratch(self):
        config = self.tiles.config
        return store_buffer(config, config.epilogue_n, self.out.dtype)

    def start(self, place: Place):
        return self.tiles.rows(place, "labels", *DLogits._fields)

    def before(self, place: Place):
        return self.tiles.marked(self._in_vocab(place))

    def fold(self, rows, marked, acc, place: Place, d_smem):
        config = self.tiles.config
        c = DLogits(**{name: rows.get(name) for name in DLogits._fields})
        stores = TileStores(d_smem, self.out, config, config.epilogue_n)

        def store(start, marked, nothing):
            z, t, cols, labels, cw = self.tiles.logits(
                acc, self._in_vocab(place), rows, start, marked
            )
            d = self.tiles.problem.transform.chain(c.tile(z, cols, labels, cw), t)
            stores(d, place, start)
            return nothing

        self.tiles.over_slices(marked, store)
        return rows

    def _in_vocab(self, place: Place) -> Place:
        return place._replace(col=self.first + place.col)

    def finish(self, state, place: Place, scratch) -> None:
        finish_stores()
