"""What a warpgroup does to a stretch of a row that lies in shared memory.

A row is seen as lines of at most 256 columns, and these as stretches of a few lines, which are
dealt to the warpgroups of a block in turn. To the mathematics (``losses``) a warpgroup's tile has
128 rows, one a thread: nothing that is done to a stretch then leaves its thread, and the sums of
threads are merged once a row. With a row for each warp instead, the shuffles were a tenth of all
instructions, which are what bounds losses with a target.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_loss.backends.mosaic import compat
from pallas_loss.backends.mosaic.common import Ref, Refs, tanh
from pallas_loss.backends.mosaic.widen import widened
from pallas_loss.backends.rows import RowProblem, Tiles, tiles_of
from pallas_loss.losses import LogitFactors
from pallas_loss.tuning import RowConfig

WARPS, LANES = 4, 32  # of a warpgroup
PER_THREAD = plgpu.Layout.TILED(
    plgpu.Tiling(((LANES, WARPS), (1,))), warp_dims=(-2,), lane_dims=(-3,), vector_dim=-1
)
PER_WARP = PER_THREAD.reduce((0,))


@dataclass(frozen=True)
class Lines:
    """How rows ``[T, count, width]`` are dealt; ``vocab`` columns of each are real."""

    rows: int
    count: int
    width: int
    vocab: int
    config: RowConfig

    @property
    def in_stretch(self) -> int:
        """Lines of a stretch: ``config.lines`` of each warp, which take turns."""
        return WARPS * self.config.lines

    @property
    def stretches(self) -> int:
        """Stretches of a row that each warpgroup gets; the last may be short, or beyond the row."""
        return -(-self.count // (self.config.warpgroups * self.in_stretch))

    @property
    def dealt(self) -> int:
        """Lines of all stretches of a row."""
        return self.stretches * self.config.warpgroups * self.in_stretch

    @property
    def masked(self) -> bool:
        """Whether some stretches hold columns that are not real."""
        return self.dealt * self.width != self.vocab

    @property
    def ragged(self) -> bool:
        """Whether some stretches reach past the row's last line."""
        return self.dealt != self.count

    @property
    def step(self) -> int:
        """Lines that a warp has in registers."""
        return self.config.lines // self.config.steps

    @property
    def vector(self) -> int:
        """Columns of a line that a lane has, side by side: 16 bytes or less."""
        return self.width // LANES

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of a warpgroup's tile: lanes, warps, lines, columns of a lane."""
        return (LANES, WARPS, self.step, self.vector)

    @property
    def layout(self):
        """A thread for each lane of each warp."""
        return plgpu.Layout.TILED(
            plgpu.Tiling(((LANES, WARPS, 1, self.vector),)),
            warp_dims=(-3,),
            lane_dims=(-4,),
            vector_dim=-1,
        )

    def by_thread(self, lines):
        """A view of shape ``shape`` of some lines, an array or, not in the interpreter, a ref."""
        return lines.reshape(self.step, WARPS, LANES, self.vector).transpose((2, 1, 0, 3))

    def first_line(self, nth, wg):
        """The first line of a warpgroup's ``nth`` stretch."""
        return (nth * self.config.warpgroups + wg) * self.in_stretch

    def real(self, first_line):
        """How many lines of the stretch that begins there are the row's."""
        if not self.ragged:
            return self.in_stretch
        return jnp.clip(self.count - first_line, 0, self.in_stretch)

    def cols(self, first_line, step) -> jax.Array:
        """The column of each element of a tile."""
        iota = lambda axis: plgpu.broadcasted_iota(  # noqa: E731
            jnp.int32, self.shape, axis, layout=self.layout
        )
        lane, warp, line, col = (iota(axis) for axis in range(4))
        line = (step * self.step + line) * WARPS + warp + first_line
        return line * self.width + lane * self.vector + col


@dataclass(frozen=True)
class Sweeps:
    """What is done to a stretch that lies in ``smem``: its sums are taken, or its gradient.

    ``per_row`` are refs ``[T]``; ``factors`` are static, or were read from memory.
    """

    problem: RowProblem
    lines: Lines
    factors: tuple[LogitFactors, LogitFactors]
    per_row: Refs
    class_weights: Ref | None  # [lanes, warps, lines of a warp, columns of a lane]

    def facts(self, row) -> dict[str, jax.Array]:
        """What is known of a row, by name."""
        return {name: ref[row] for name, ref in self.per_row.items()}

    def nothing(self):
        """The sums over no column, one value a thread."""
        return every_thread(self.problem.loss.start(WARPS, self.problem.moments))

    def add(self, sums, smem: list[Ref], facts, first_line):
        """Adds the sums of each thread's part of a stretch."""

        def sweep(exact: bool):
            def step(i, sums):
                tiles, cols, cw = self._tile(smem, first_line, i, exact)
                labels = self._labels(facts) if exact else None
                loss, moments = self.problem.loss, self.problem.moments
                sums = loss.fold(sums, tiles.z, tiles.t, cols, labels, moments, cw)
                return _cast(sums, PER_THREAD)

            steps = self.lines.config.steps
            return step(0, sums) if steps == 1 else lax.fori_loop(0, steps, step, sums)

        special = self._special(facts, first_line)
        if special is None:
            return sweep(False)
        return lax.cond(special, lambda: sweep(True), lambda: sweep(False))

    def gradient(self, smem: list[Ref], facts, first_line, coefficients) -> None:
        """Writes the gradient over the logits; zeros in a row that has no part in the loss."""
        special, target = self._special(facts, first_line), smem[0]

        def sweep(exact: bool):
            labels = self._labels(facts) if exact else None

            @self._steps
            def _step(i):
                tiles, cols, cw = self._tile(smem, first_line, i, exact)
                dz = self.problem.loss.tile(coefficients, tiles.z, tiles.t, cols, labels, cw)
                dz = self.problem.transform.chain(dz, tiles.tanh)
                self._store(target, i, dz.astype(target.dtype))

        @pl.when(facts["g"] != 0)
        def _counts():
            if special is None:
                sweep(False)
            else:
                pl.when(special)(lambda: sweep(True))
                pl.when(~special)(lambda: sweep(False))

        @pl.when(facts["g"] == 0)
        def _does_not():
            @self._steps
            def _step(i):
                zeros = jnp.zeros(self.lines.shape, target.dtype)
                self._store(target, i, plgpu.layout_cast(zeros, self.lines.layout))

    def of_warps(self, sums):
        """The sums of all lanes, one value a warp."""
        return _cast(self.problem.loss.merge_parts(sums), PER_WARP)

    def _labels(self, facts):
        return every_thread(every_warp(facts["labels"])) if "labels" in facts else None

    def _steps(self, body: Callable[[Any], None]) -> None:
        steps = self.lines.config.steps
        body(0) if steps == 1 else pl.loop(0, steps)(body)

    def _special(self, facts, first_line):
        """Whether a stretch holds the label or columns that are not real: few do."""
        lines, special = self.lines, None
        first = first_line * lines.width
        end = first + lines.in_stretch * lines.width
        if "labels" in facts:
            special = (facts["labels"] >= first) & (facts["labels"] < end)
        if lines.masked:
            special = (end > lines.vocab) if special is None else special | (end > lines.vocab)
        return special

    def _at(self, smem: Ref, step) -> Ref:
        """What a tile holds of a stretch ``[lines, width]``."""
        size = WARPS * self.lines.step
        return smem.at[pl.ds(step * size, size)]

    def _load(self, smem: Ref, step):
        lines, here = self.lines, self._at(smem, step)
        if compat.interpreting():
            return lines.by_thread(here[...])
        v = plgpu.load(lines.by_thread(here), layout=lines.layout, optimized=False)
        return widened(v, lines.layout) if v.dtype == jnp.bfloat16 else v

    def _store(self, smem: Ref, step, tile) -> None:
        lines, here = self.lines, self._at(smem, step)
        if compat.interpreting():
            here[...] = tile.transpose(2, 1, 0, 3).reshape(here.shape)
        else:
            lines.by_thread(here)[...] = tile

    def _tile(self, smem: list[Ref], first_line, step, exact: bool) -> tuple[Tiles, Any, Any]:
        """``(tiles, columns, class weights)``; ``exact`` tells real columns from others."""
        lines = self.lines
        raw = [self._load(ref, step) for ref in smem]
        cols = lines.cols(first_line, step)
        live = cols < lines.vocab if exact and lines.masked else None
        tiles = tiles_of(
            self.problem, raw[0], raw[1] if raw[1:] else None, self.factors, tanh, live
        )
        cw = None
        if self.class_weights is not None:
            line = lax.div(first_line, WARPS) + step * lines.step
            here = self.class_weights.at[:, :, pl.ds(line, lines.step)]
            cw = plgpu.load(here, layout=lines.layout, optimized=False)
        elif live is not None and "u" in self.problem.moments:
            cw = jnp.where(live, 1.0, 0.0)
        return tiles, cols, cw


def every_warp(v):
    """A row's value as that of each warp."""
    return None if v is None else _cast(jnp.full((WARPS,), v), PER_WARP)


def every_thread(tree):
    """Values of each warp as those of each of its threads."""
    shape = (LANES, WARPS)
    return jax.tree.map(lambda v: _cast(lax.broadcast_in_dim(v, shape, (1,)), PER_THREAD), tree)


def _cast(tree, layout):
    return jax.tree.map(lambda v: plgpu.layout_cast(v, layout), tree)
