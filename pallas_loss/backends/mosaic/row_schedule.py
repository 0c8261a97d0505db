"""Which stretch of which row lies in which slot of shared memory, and when.

A warpgroup's part of a row is ``stretches`` stretches, which it visits in one order for their sums
and in another for their gradient. Plain arithmetic on Python or traced integers: the kernel asks it
where to look and what to load, and a test follows it without a device.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
from jax import lax

from pallas_loss.tuning import RowConfig

Mode = Literal["sums", "gradient", "both"]
Int = Any  # an int or a traced int32, never negative


class Visit(NamedTuple):
    """The ``number``-th load into the ring, or into the slots of the kept stretches."""

    in_ring: Int
    number: Int


class Place(NamedTuple):
    """Stretch ``nth`` of ``row``, the block's ``row``-th, and its slot."""

    row: Int
    nth: Int
    slot: Int


@dataclass(frozen=True)
class Schedule:
    """The first ``kept`` stretches of a row stay on the chip, the others pass through a ring.

    Kept stretches wait from their sums to their gradient. They take turns at the slots that the
    ring leaves; where there are more such slots than kept stretches, the next row is loaded ahead.

    The last ``ring`` of the others are still there when the sums of the row are known, and are
    differentiated at once. Those before them are loaded again, the latest first: what lies between
    the two loads of a stretch, and could drive it out of L2, is then as little as can be. At last
    come the kept ones, whose slots are filled with the next row's as they are stored.
    """

    mode: Mode
    stretches: int
    slots: int
    kept: int
    ring: int

    @classmethod
    def of(cls, mode: Mode, stretches: int, config: RowConfig) -> "Schedule":
        slots = config.slots
        if mode == "sums":
            return cls(mode, stretches, slots, kept=0, ring=slots)
        if mode == "gradient" or stretches <= slots - config.ahead:
            return cls(mode, stretches, slots, kept=stretches, ring=0)
        kept = slots - config.ring - config.ahead
        if not kept:
            # The last slot that a row frees is loaded again after the sums of the next.
            raise ValueError(f"{config} keeps none of {stretches} stretches")
        return cls(mode, stretches, slots, kept, config.ring)

    @property
    def streamed(self) -> int:
        """Stretches of a row that pass through the ring."""
        return self.stretches - self.kept

    @property
    def again(self) -> int:
        """Stretches that are loaded twice."""
        return self.streamed - self.ring if self.mode == "both" else 0

    @property
    def ring_loads(self) -> int:
        """Loads of one row into the ring."""
        return self.streamed + self.again

    def first_loads(self) -> list[Visit]:
        """The loads that fill all slots."""
        kept = [Visit(False, number) for number in range(self.slots - self.ring)]
        return kept + [Visit(True, number) for number in range(self.ring)]

    def sums(self, row: Int, step: Int) -> Visit:
        """Stretch ``step``: the kept ones come first."""
        return self._visit(
            step >= self.kept,
            row * self.ring_loads + (step - self.kept),
            row * self.kept + step,
        )

    def gradient(self, row: Int, step: Int) -> Visit:
        """Those in the ring, those loaded again, those kept."""
        return self._visit(
            step < self.streamed,
            row * self.ring_loads + (self.again + step),
            row * self.kept + (step - self.streamed),
        )

    def place(self, visit: Visit) -> Place:
        """Where a visit finds what."""
        return Place(*(
            self._choose(visit.in_ring, of_ring, of_kept)
            for of_ring, of_kept in zip(self._in_ring(visit), self._among_kept(visit), strict=True)
        ))  # fmt: skip

    def next(self, visit: Visit) -> Visit:
        """The load that takes the place of a stretch that is done with."""
        step = self._choose(visit.in_ring, self.ring, self.slots - self.ring)
        return Visit(visit.in_ring, visit.number + step)

    def arrives(self, visit: Visit) -> Int:
        """Whether the gradient must wait for it: the sums did not."""
        if self.mode == "gradient" or not self.ring:
            return self.mode == "gradient"
        return visit.in_ring & (_rem(visit.number, self.ring_loads) >= self.streamed)

    def is_dropped(self, visit: Visit) -> Int:
        """Whether its slot is free as soon as its sums are taken."""
        if self.mode == "sums" or not self.ring:
            return self.mode == "sums"
        return visit.in_ring & (_rem(visit.number, self.ring_loads) < self.again)

    def _in_ring(self, visit: Visit) -> tuple[Int, Int, Int]:
        if not self.ring:
            return 0, 0, 0
        row, nth = _div(visit.number, self.ring_loads), _rem(visit.number, self.ring_loads)
        nth = _where(nth < self.streamed, nth, self.streamed + self.again - 1 - nth)
        return row, self.kept + nth, self.slots - self.ring + _rem(visit.number, self.ring)

    def _among_kept(self, visit: Visit) -> tuple[Int, Int, Int]:
        if not self.kept:
            return 0, 0, 0
        row, nth = _div(visit.number, self.kept), _rem(visit.number, self.kept)
        return row, nth, _rem(visit.number, self.slots - self.ring)

    def _visit(self, in_ring: Int, of_ring: Int, of_kept: Int) -> Visit:
        if not (self.kept and self.ring):
            in_ring = bool(self.ring)
        return Visit(in_ring, self._choose(in_ring, of_ring, of_kept))

    def _choose(self, in_ring: Int, of_ring: Int, of_kept: Int) -> Int:
        if not (self.kept and self.ring):
            return of_ring if self.ring else of_kept
        return _where(in_ring, of_ring, of_kept)


def _where(choice: Int, yes: Int, no: Int) -> Int:
    if not isinstance(choice, jax.Array):
        return yes if choice else no
    return lax.select(choice, *(lax.convert_element_type(v, "int32") for v in (yes, no)))


def _div(x: Int, by: int) -> Int:
    return lax.div(x, by) if isinstance(x, jax.Array) else x // by


def _rem(x: Int, by: int) -> Int:
    return lax.rem(x, by) if isinstance(x, jax.Array) else x % by
