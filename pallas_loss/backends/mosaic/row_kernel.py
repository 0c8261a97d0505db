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

from pallas_loss.backends.mosaic import compat
from pallas_loss.backends.mosaic.common import Ref
from pallas_loss.backends.mosaic.exchange import Exchange
from pallas_loss.backends.mosaic.row_schedule import Mode, Place, Schedule, Visit
from pallas_loss.backends.mosaic.rows import WARPS, Sweeps, every_warp
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
        shape = (config.warpgroups, config.slots, WARPS, config.lines, lines.width)
        pl.run_scoped(
            lambda *refs: _Warpgroup(self, *refs).run(),
            [plgpu.SMEM(shape, ref.dtype) for ref in self.inputs],
            plgpu.Barrier(
                num_arrivals=copies_of_stretch() * len(self.inputs),
                num_barriers=config.warpgroups * config.slots,
            ),
            self.exchange.scratch if self.mode == "both" else {},
            collective_axes="wg",
        )


def copies_of_stretch() -> int:
    """One; but JAX's interpreter (0.11.2) cannot take two axes of shared memory for one."""
    return WARPS if compat.interpreting() else 1


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
        sweeps, exchange, last = self.sweeps, self.kernel.exchange, self.schedule.stretches - 1
        exchange.fill(self.exchange_refs, self.wg, jax.tree.leaves(sweeps.nothing()))

        def row(i, facts):
            values = jax.tree.leaves(self.sums(i, facts))
            exchange.post(self.exchange_refs, i, self.row(i), self.wg, values)

            @pl.when(i > 0)
            def _last_of_the_row_before():
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                self.load_next(self.schedule.gradient(i - 1, last))

            parts = jax.tree.unflatten(self.kernel.treedef, exchange.read(self.exchange_refs, i))
            merged = sweeps.problem.loss.merge_parts(parts)
            known = RowFacts(*(every_warp(facts.get(name)) for name in RowFacts._fields))
            d = self.kernel.coefficients(merged, known, every_warp(facts["g"]))

            @pl.loop(0, self.schedule.stretches)
            def _stretch(step):
                self.store_gradient(self.schedule.gradient(i, step), facts, d)

                @pl.when(step > 0)
                def _stored():
                    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                    self.load_next(self.schedule.gradient(i, step - 1))

        self.each_row(sweeps.facts, row)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def only_sums(self) -> None:
        def row(i, facts):
            values = jax.tree.leaves(self.sums(i, facts))
            self.kernel.exchange.keep(self.row(i), self.wg, values)

        self.each_row(self.sweeps.facts, row)

    def only_gradient(self) -> None:
        def row(i, known):
            @pl.loop(0, self.schedule.stretches)
            def _stretch(step):
                visit = self.schedule.gradient(i, step)
                self.store_gradient(visit, *known)

                @pl.when(visit.number > 0)
                def _stored():
                    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                    self.load_next(Visit(False, visit.number - 1))

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

        def stretch(step, sums):
            visit = self.schedule.sums(i, step)
            place = self.schedule.place(visit)
            plgpu.barrier_wait(self.barrier(place))
            sums = self.sweeps.add(sums, self.slot(place), facts, self.first_line(place))

            def free():
                plgpu.commit_smem()  # all have read it
                self.load_next(visit)

            _when(self.schedule.is_dropped(visit), free)
            return sums

        return lax.fori_loop(0, self.schedule.stretches, stretch, self.sweeps.nothing())

    def store_gradient(self, visit: Visit, facts, coefficients) -> None:
        """One group of stores, begun."""
        place = self.schedule.place(visit)
        _when(self.schedule.arrives(visit), lambda: plgpu.barrier_wait(self.barrier(place)))
        first = self.first_line(place)
        self.sweeps.gradient(self.slot(place), facts, first, coefficients)
        plgpu.commit_smem()
        row, lines = self.row(place.row), self.lines

        def whole():
            for here, there in self.copies(self.gradient_slot(place), first):
                plgpu.copy_smem_to_gmem(
                    here, self.kernel.gradient_gmem.at[row, there], commit_group=False
                )

        def short():
            # A store that reaches past the last line would write into the next row: where the
            # array is contiguous, Mosaic (JAX 0.11.2) cuts off only what lies past the array.
            @pl.loop(0, lines.in_stretch)
            def _line(line):
                @pl.when(first + line < lines.count)
                def _store():
                    warp, nth = lax.div(line, lines.config.lines), lax.rem(line, lines.config.lines)
                    plgpu.copy_smem_to_gmem(
                        self.gradient_slot(place).at[warp, pl.ds(nth, 1)],
                        self.kernel.gradient_gmem.at[row, pl.ds(first + line, 1)],
                        commit_group=False,
                    )

            # An empty group counts on a device, not in the interpreter.
            pl.when(first >= lines.count)(lambda: plgpu.wait_smem_to_gmem(0, wait_read_only=True))

        if lines.ragged:
            fits = first + lines.in_stretch <= lines.count
            pl.when(fits)(whole)
            pl.when(~fits)(short)
        else:
            whole()
        plgpu.commit_smem_to_gmem_group()

    def load_next(self, visit: Visit) -> None:
        """Into the slot of a stretch that is done with."""
        self.load(self.schedule.next(visit))

    def load(self, visit: Visit) -> None:
        place = self.schedule.place(visit)

        @pl.when(place.row < self.rows)
        def _load():
            row, first = self.row(place.row), self.first_line(place)
            for ref, slot in zip(self.kernel.inputs, self.slot(place), strict=True):
                for here, there in self.copies(slot, first):
                    plgpu.copy_gmem_to_smem(
                        ref.at[row, there],
                        here,
                        self.barrier(place),
                        oob_mode=plgpu.OOBFillMode.ZEROS,
                    )

    def copies(self, slot: Ref, first):
        """``(shared memory, lines of the row)`` of each copy that a stretch takes."""
        lines = self.lines
        if copies_of_stretch() == 1:
            yield slot.reshape(lines.in_stretch, lines.width), pl.ds(first, lines.in_stretch)
            return
        for warp in range(WARPS):
            each = lines.config.lines
            yield slot.at[warp], pl.ds(first + warp * each, each)

    def first_line(self, place: Place):
        return self.lines.first_line(place.nth, self.wg)

    def slot(self, place: Place) -> list[Ref]:
        return [ref.at[self.wg, place.slot] for ref in self.smem]

    def gradient_slot(self, place: Place) -> Ref:
        return self.slot(place)[0]

    def barrier(self, place: Place) -> Ref:
        return self.ready.at[self.wg * self.lines.config.slots + place.slot]


def _when(condition, run: Callable[[], None]) -> None:
    """``pl.when``; at once where the condition is no matter of the row."""
    if isinstance(condition, bool):
        if condition:
            run()
    else:
        pl.when(condition)(run)
