"""The row kernel: logits that are in memory, each byte moved once.

A row is seen as lines of at most 256 columns and dealt to the warps of a block, or of a cluster of
blocks, a stretch of lines each. A warpgroup loads (TMA) and stores its own part. While a row is on
the chip it is swept twice: for its sums, which the warps exchange, and for its gradient, which is
written into shared memory over the logits and stored from there. The sums of the next row are taken
before the gradient of this one, so nobody waits for the exchange, and a third row is on its way in
or out.

To the mathematics (``losses``) a warpgroup's tile has four rows, one a warp: its reductions are
then those of single warps, which need no shared memory.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_loss.backends.mosaic.common import Ref, Refs, tanh
from pallas_loss.backends.mosaic.exchange import Exchange
from pallas_loss.backends.rows import RowProblem, Tiles, tiles_of
from pallas_loss.losses import LogitFactors, RowFacts
from pallas_loss.tuning import RowConfig

WARPS = 4  # of a warpgroup: the rows of its tile
PER_WARP = plgpu.Layout.TILED(
    plgpu.Tiling(((WARPS,), (1,))),
    warp_dims=(-2,),
    lane_dims=(plgpu.Replicated(32),),
    vector_dim=-1,
)
Mode = Literal["sums", "gradient", "both"]


@dataclass(frozen=True)
class Lines:
    """How rows ``[T, lines, width]`` are dealt to warps; ``vocab`` columns of each are real."""

    rows: int
    count: int
    width: int
    vocab: int
    config: RowConfig

    @property
    def parts(self) -> int:
        """The parts of a row, each held by one block."""
        return max(-(-self.count // self.config.block_lines), self.config.cluster)

    @property
    def masked(self) -> bool:
        """Whether some warps hold columns that are not real."""
        return self.parts * self.config.block_lines * self.width != self.vocab

    @property
    def step(self) -> int:
        """Lines that a warp has in registers."""
        return self.config.lines // self.config.steps

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of a warpgroup's tile."""
        return (WARPS, self.step, self.width)

    @property
    def layout(self):
        """A line is spread over its warp, 16 bytes a lane or less."""
        vector = self.width // 32
        return plgpu.Layout.TILED(
            plgpu.Tiling(((WARPS, 1, self.width), (vector,))),
            warp_dims=(-4,),
            lane_dims=(-2,),
            vector_dim=-1,
        )

    def first_line(self, part, wg):
        """The first line of a warpgroup."""
        return (part * self.config.warpgroups + wg) * WARPS * self.config.lines

    def cols(self, first_line, step) -> jax.Array:
        """The column of each element of a tile."""
        iota = lambda axis: plgpu.broadcasted_iota(  # noqa: E731
            jnp.int32, self.shape, axis, layout=self.layout
        )
        warp, line, col = (iota(axis) for axis in range(3))
        line = warp * self.config.lines + line + (first_line + step * self.step)
        return line * self.width + col


@dataclass(frozen=True)
class Sweeps:
    """The two sweeps over a warpgroup's part of a row, which lies in ``smem``.

    ``per_row`` are refs ``[T]``; ``factors`` are static, or were read from memory.
    """

    problem: RowProblem
    lines: Lines
    factors: tuple[LogitFactors, LogitFactors]
    per_row: Refs
    class_weights: Ref | None  # [warps of a row, lines, width]

    def facts(self, row) -> RowFacts:
        read = lambda name: self.per_row[name][row] if name in self.per_row else None  # noqa: E731
        return RowFacts(*(every_warp(read(name)) for name in RowFacts._fields))

    def sums(self, smem: list[Ref], row, first_line):
        """The sums of each warp's stretch, one value a warp."""
        label = self.per_row["labels"][row] if "labels" in self.per_row else None

        def of_step(labels, exact: bool, step):
            tiles, cols, cw = self._tile(smem, first_line, step, exact)
            moments = self.problem.moments
            return self._per_warp(
                self.problem.loss.of_tile(tiles.z, tiles.t, cols, labels, moments, cw)
            )

        def sweep(exact: bool):
            one = lambda step: of_step(every_warp(label) if exact else None, exact, step)  # noqa: E731
            more = lambda step, sums: self._per_warp(  # noqa: E731
                self.problem.loss.merge(sums, one(step))
            )
            sums = one(0)
            if getattr(sums, "z_label", 0) is None and label is not None:
                sums = self._per_warp(sums._replace(z_label=jnp.full_like(sums.m, -jnp.inf)))
            steps = self.lines.config.steps
            return sums if steps == 1 else lax.fori_loop(1, steps, more, sums)

        special = self._special(label, first_line)
        if special is None:
            return sweep(False)
        return lax.cond(special, lambda: sweep(True), lambda: sweep(False))

    def gradient(self, smem: list[Ref], row, first_line, coefficients: Callable[[], Any]) -> None:
        """Writes the gradient over the logits; zeros in a row that has no part in the loss."""
        g = self.per_row["g"][row]
        label = self.per_row["labels"][row] if "labels" in self.per_row else None
        special = self._special(label, first_line)

        def sweep(exact: bool):
            d = coefficients()
            labels = every_warp(label) if exact else None

            @pl.loop(0, self.lines.config.steps)
            def _step(step):
                tiles, cols, cw = self._tile(smem, first_line, step, exact)
                dz = self.problem.loss.tile(d, tiles.z, tiles.t, cols, labels, cw)
                dz = self.problem.transform.chain(dz, tiles.tanh)
                self._at(smem[0], step)[...] = dz.astype(smem[0].dtype)

        @pl.when(g != 0)
        def _counts():
            if special is None:
                sweep(False)
            else:
                pl.when(special)(lambda: sweep(True))
                pl.when(~special)(lambda: sweep(False))

        @pl.when(g == 0)
        def _does_not():
            @pl.loop(0, self.lines.config.steps)
            def _step(step):
                zeros = jnp.zeros(self.lines.shape, smem[0].dtype)
                self._at(smem[0], step)[...] = plgpu.layout_cast(zeros, self.lines.layout)

    def _special(self, label, first_line):
        """Whether this warpgroup holds the label or columns that are not real: few do."""
        lines, special = self.lines, None
        first = first_line * lines.width
        end = first + WARPS * lines.config.lines * lines.width
        if label is not None:
            special = (label >= first) & (label < end)
        if lines.masked:
            special = (end > lines.vocab) if special is None else special | (end > lines.vocab)
        return special

    def _at(self, smem: Ref, step) -> Ref:
        return smem.at[:, pl.ds(step * self.lines.step, self.lines.step)]

    def _tile(self, smem: list[Ref], first_line, step, exact: bool) -> tuple[Tiles, Any, Any]:
        """``(tiles, columns, class weights)``; ``exact`` tells real columns from others."""
        lines = self.lines
        raw = [
            plgpu.load(self._at(ref, step), layout=lines.layout, optimized=False) for ref in smem
        ]
        cols = lines.cols(first_line, step)
        live = cols < lines.vocab if exact and lines.masked else None
        tiles = tiles_of(
            self.problem, raw[0], raw[1] if raw[1:] else None, self.factors, tanh, live
        )
        cw = None
        if self.class_weights is not None:
            warp = lax.div(first_line, lines.config.lines)
            here = self.class_weights.at[pl.ds(warp, WARPS), pl.ds(step * lines.step, lines.step)]
            cw = plgpu.load(here, layout=lines.layout, optimized=False)
        elif live is not None and "u" in self.problem.moments:
            cw = jnp.where(live, 1.0, 0.0)
        return tiles, cols, cw

    def _per_warp(self, sums):
        return jax.tree.map(lambda v: plgpu.layout_cast(v, PER_WARP), sums)


def every_warp(v):
    """A row's value as that of each warp."""
    return None if v is None else plgpu.layout_cast(jnp.full((WARPS,), v), PER_WARP)


@dataclass(frozen=True)
class RowKernel:
    """The body of a launch; ``treedef`` is that of the sums."""

    mode: Mode
    sweeps: Sweeps
    inputs: list[Ref]
    gradient_gmem: Ref | None
    exchange: Exchange | None
    treedef: Any
    coefficients: Callable[[Any, RowFacts, Any], Any]
    kept: Callable[[Any], Any]
    clusters: int

    def run(self) -> None:
        config, lines = self.sweeps.lines.config, self.sweeps.lines
        shape = (config.warpgroups, config.slots, WARPS, config.lines, lines.width)
        pl.run_scoped(
            self._scoped,
            [plgpu.SMEM(shape, ref.dtype) for ref in self.inputs],
            plgpu.Barrier(
                num_arrivals=WARPS * len(self.inputs),
                num_barriers=config.warpgroups * config.slots,
            ),
            {} if self.exchange is None else self.exchange.scratch,
            collective_axes="wg",
        )

    def _scoped(self, smem, ready, exchange_refs) -> None:
        lines, config = self.sweeps.lines, self.sweeps.lines.config
        slots, wg = config.slots, lax.axis_index("wg")
        cluster, kept_whole = lax.axis_index("cluster"), self.mode == "both"
        total = lines.rows if kept_whole else lines.rows * lines.parts
        count = lax.div(total - cluster + self.clusters - 1, self.clusters)

        def item(i):
            """``(row, part)`` of this block's item ``i``."""
            nth = cluster + i * self.clusters
            if kept_whole:
                return nth, lax.axis_index("block") if config.cluster > 1 else 0
            return lax.div(nth, lines.parts), lax.rem(nth, lines.parts)

        def mine(i):
            return [ref.at[wg, lax.rem(i, slots)] for ref in smem]

        def ready_barrier(i):
            return ready.at[wg * slots + lax.rem(i, slots)]

        def stretches(i):
            """The lines of each warp, in global memory."""
            row, part = item(i)
            first = lines.first_line(part, wg)
            return [
                (row, pl.ds(first + warp * config.lines, config.lines)) for warp in range(WARPS)
            ]

        def load(i):
            for ref, there in zip(self.inputs, mine(i), strict=True):
                for warp, here in enumerate(stretches(i)):
                    plgpu.copy_gmem_to_smem(
                        ref.at[here],
                        there.at[warp],
                        ready_barrier(i),
                        oob_mode=plgpu.OOBFillMode.ZEROS,
                    )

        def sums(i):
            row, part = item(i)
            plgpu.barrier_wait(ready_barrier(i))
            return self.sweeps.sums(mine(i), row, lines.first_line(part, wg))

        def store_gradient(i, coefficients):
            row, part = item(i)
            self.sweeps.gradient(mine(i), row, lines.first_line(part, wg), coefficients)
            plgpu.commit_smem()
            for warp, here in enumerate(stretches(i)):
                plgpu.copy_smem_to_gmem(
                    mine(i)[0].at[warp], self.gradient_gmem.at[here], commit_group=False
                )
            plgpu.commit_smem_to_gmem_group()

        def both():
            problem = self.sweeps.problem
            nothing = self.sweeps._per_warp(problem.loss.start(WARPS, problem.moments))
            self.exchange.fill(exchange_refs, wg, jax.tree.leaves(nothing))
            for i in range(slots - 1):
                pl.when(i < count)(lambda i=i: load(i))

            @pl.loop(-1, count)
            def _row(i):
                @pl.when(i + 1 < count)
                def _sums():
                    values = jax.tree.leaves(sums(i + 1))
                    self.exchange.post(exchange_refs, i + 1, item(i + 1)[0], wg, values)

                @pl.when(i >= 0)
                def _gradient():
                    @pl.when(i + slots - 1 < count)
                    def _load():
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                        load(i + slots - 1)

                    row = item(i)[0]
                    facts, g = self.sweeps.facts(row), self.sweeps.per_row["g"][row]
                    parts = self.exchange.read(exchange_refs, i)
                    parts = jax.tree.unflatten(self.treedef, parts)
                    merged = self.sweeps.problem.loss.merge_parts(parts)
                    d = self.coefficients(merged, facts, every_warp(g))
                    store_gradient(i, lambda: d)

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def only_sums():
            for i in range(slots):
                pl.when(i < count)(lambda i=i: load(i))

            @pl.loop(0, count)
            def _part(i):
                row, part = item(i)
                here = pl.ds((part * config.warpgroups + wg) * WARPS, WARPS)
                for f, value in enumerate(jax.tree.leaves(sums(i))):
                    self.exchange.out.at[row, f, here][...] = value
                plgpu.commit_smem()  # all have read the slot
                pl.when(i + slots < count)(lambda: load(i + slots))

        def only_gradient():
            for i in range(slots - 1):
                pl.when(i < count)(lambda i=i: load(i))

            @pl.loop(0, count)
            def _part(i):
                plgpu.barrier_wait(ready_barrier(i))
                store_gradient(i, lambda: self.kept(item(i)[0]))

                @pl.when(i + slots - 1 < count)
                def _load():
                    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                    load(i + slots - 1)

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        run = {"both": both, "sums": only_sums, "gradient": only_gradient}[self.mode]
        if config.cluster == 1:
            run()
            return
        pl.when(wg < config.warpgroups)(run)

        @pl.when(wg == config.warpgroups)
        def _messenger():
            @pl.loop(0, count)
            def _row(i):
                self.exchange.carry(exchange_refs, i, item(i)[0])
