"""The row kernel: logits that are in memory, each byte moved once, or little more.

A warpgroup loads, sums, differentiates and stores its own stretches of a row (TMA; the gradient is
written over the logits in shared memory). All that it needs of the others is their sums, once a
row. Which stretch lies where, and what is loaded next, is ``row_schedule``'s matter.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_loss.backends.mosaic import bulk
from pallas_loss.backends.mosaic.common import Ref
from pallas_loss.backends.mosaic.exchange import Exchange
from pallas_loss.backends.mosaic.row_schedule import Mode, Schedule, Visit
from pallas_loss.backends.mosaic.rows import Sweeps, every_thread, every_warp
from pallas_loss.losses import RowFacts


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
    blocks: int

    def run(self) -> None:
        config, lines = self.sweeps.lines.config, self.sweeps.lines
        shape = (config.warpgroups, config.slots, lines.in_stretch, lines.width)
        pl.run_scoped(
            lambda *refs: _Warpgroup(self, *refs).run(),
            [plgpu.SMEM(shape, ref.dtype) for ref in self.inputs],
            plgpu.Barrier(
                num_arrivals=len(self.inputs),
                num_barriers=config.warpgroups * config.slots,
            ),
            self.exchange.scratch if self.mode == "both" else {},
            collective_axes="wg",
        )


class _Warpgroup:
    """One warpgroup at work. Each of its loops is one of a kernel's modes."""

    def __init__(self, kernel: RowKernel, smem, ready, exchange_refs):
        self.kernel, self.sweeps, self.lines = kernel, kernel.sweeps, kernel.sweeps.lines
        self.smem, self.ready, self.exchange_refs = smem, ready, exchange_refs
        self.wg, self.block = lax.axis_index("wg"), lax.axis_index("block")
        self.schedule = Schedule.of(kernel.mode, self.lines.stretches, self.lines.config)
        # Rows of this block.
        self.rows = lax.div(self.lines.rows - self.block + kernel.blocks - 1, kernel.blocks)

    def run(self) -> None:
        for visit in self.schedule.first_loads():
            self.load(visit)
        {"both": self.both, "sums": self.only_sums, "gradient": self.only_gradient}[
            self.kernel.mode
        ]()

    def both(self) -> None:
        sweeps, exchange = self.sweeps, self.kernel.exchange
        nothing = jax.tree.leaves(sweeps.of_warps(sweeps.nothing()))
        exchange.fill(self.exchange_refs, self.wg, nothing)

        def row(i, facts):
            values = jax.tree.leaves(sweeps.of_warps(self.sums(i, facts)))
            exchange.post(self.exchange_refs, i, self.row(i), self.wg, values)

            @pl.when(i > 0)
            def _last_of_the_row_before():
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                self.load_next(self.last(i - 1))

            parts = jax.tree.unflatten(self.kernel.treedef, exchange.read(self.exchange_refs, i))
            merged = sweeps.problem.loss.merge_parts(parts)
            known = RowFacts(*(every_warp(facts.get(name)) for name in RowFacts._fields))
            d = every_thread(self.kernel.coefficients(merged, known, every_warp(facts["g"])))
            self.gradient(i, facts, d)

        self.each_row(sweeps.facts, row)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def only_sums(self) -> None:
        def row(i, facts):
            values = jax.tree.leaves(self.sweeps.of_warps(self.sums(i, facts)))
            self.kernel.exchange.keep(self.row(i), self.wg, values)

        self.each_row(self.sweeps.facts, row)

    def only_gradient(self) -> None:
        def row(i, known):
            self.gradient(i, *known, last_of_row_before=True)

        self.each_row(lambda row: (self.sweeps.facts(row), self.kernel.kept(row)), row)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def each_row(self, known, body: Callable[[Any, Any], None]) -> None:
        """``body(i, known(row))``; what is known of a row is read while the one before is done."""

        def row(i, known_of_row):
            known_of_next = known(self.row(jnp.minimum(i + 1, self.rows - 1)))
            body(i, known_of_row)
            return known_of_next

        @pl.when(self.rows > 0)
        def _some():
            lax.fori_loop(0, self.rows, row, known(self.row(0)))

    def row(self, i):
        """In the arrays, the block's row ``i``."""
        return self.block + i * self.kernel.blocks

    def sums(self, i, facts):
        """The sums of this warpgroup's stretches."""
        sums = self.sweeps.nothing()
        for part in self.schedule.sums_order:

            def stretch(step, sums, part=part):
                visit = self.schedule.visit(part, i, step)
                plgpu.barrier_wait(self.barrier(visit))
                sums = self.sweeps.add(sums, self.slot(visit), facts, self.first_line(visit))

                def free():
                    plgpu.commit_smem()  # all have read it
                    self.load_next(visit)

                _when(self.schedule.is_dropped(visit), free)
                return sums

            sums = lax.fori_loop(0, part.stretches, stretch, sums)
        return sums

    def gradient(self, i, facts, coefficients, last_of_row_before: bool = False) -> None:
        """The gradient of this warpgroup's stretches; what was stored one ago makes room."""
        before = self.last(i - 1) if last_of_row_before else None
        for part in self.schedule.gradient_order:

            @pl.loop(0, part.stretches)
            def _stretch(step, part=part, before=before):
                self.store_gradient(self.schedule.visit(part, i, step), facts, coefficients)

                def stored(visit: Visit):
                    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                    self.load_next(visit)

                pl.when(step > 0)(lambda: stored(self.schedule.visit(part, i, step - 1)))
                if before is not None:
                    pl.when((step == 0) & (before.row >= 0))(lambda: stored(before))

            before = self.schedule.visit(part, i, part.stretches - 1)

    def last(self, i) -> Visit:
        """The last stretch of a row to be stored."""
        part = self.schedule.gradient_order[-1]
        return self.schedule.visit(part, i, part.stretches - 1)

    def store_gradient(self, visit: Visit, facts, coefficients) -> None:
        """One group of stores, begun."""
        _when(self.schedule.arrives(visit), lambda: plgpu.barrier_wait(self.barrier(visit)))
        self.sweeps.gradient(self.slot(visit), facts, self.first_line(visit), coefficients)
        plgpu.commit_smem()
        bulk.store(self.smem[0], self.kernel.gradient_gmem, *self.place(visit))

    def load_next(self, visit: Visit) -> None:
        """Into the slot of a stretch that is done with."""
        self.load(self.schedule.next(visit))

    def load(self, visit: Visit) -> None:
        @pl.when(visit.row < self.rows)
        def _load():
            stays = self.schedule.stays_in_l2(visit)
            for ref, smem in zip(self.kernel.inputs, self.smem, strict=True):
                bulk.load(ref, smem, self.ready, *self.place(visit), stays)

    def place(self, visit: Visit):
        """The row, the first line, the lines; the warpgroup, its slot."""
        first = self.first_line(visit)
        return self.row(visit.row), first, self.lines.real(first), self.wg, visit.slot

    def first_line(self, visit: Visit):
        return self.lines.first_line(self.schedule.nth(visit), self.wg)

    def slot(self, visit: Visit) -> list[Ref]:
        return [ref.at[self.wg, visit.slot] for ref in self.smem]

    def barrier(self, visit: Visit) -> Ref:
        return self.ready.at[self.wg * self.lines.config.slots + visit.slot]


def _when(condition, run: Callable[[], None]) -> None:
    """``pl.when``; at once where the condition is no matter of the row."""
    if isinstance(condition, bool):
        if condition:
            run()
    else:
        pl.when(condition)(run)
