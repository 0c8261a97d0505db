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
    """Of the block's row ``row``, the ``load``-th load into the ring, or of a kept stretch."""

    in_ring: bool
    row: Int
    load: Int
    slot: Int


class Part(NamedTuple):
    """Stretches of a row that are visited one after the other, in the ring or among the kept."""

    in_ring: bool
    first_load: int
    stretches: int


@dataclass(frozen=True)
class Schedule:
    """The first ``kept`` stretches of a row stay on the chip, the others pass through a ring.

    Kept stretches wait from their sums to their gradient. They take turns at the slots that the
    ring leaves; where there are more such slots than kept stretches, the next row is loaded ahead.

    The last ``ring`` of the others are still there when the sums of the row are known, and are
    differentiated at once. Those before them are loaded again, the latest first: what lies between
    the two loads of a stretch, and could drive it out of L2, is then as little as can be. At last
    come the kept ones, whose slots are filled with the next row's as they are stored.

    Ring and kept stretches have loops of their own, so that which it is costs no instructions:
    where losses are bound by those, choosing was 18% of them.
    """

    mode: Mode
    stretches: int
    slots: int
    kept: int
    ring: int
    in_l2: int = 0

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
        return cls(mode, stretches, slots, kept, config.ring, config.in_l2)

    @property
    def streamed(self) -> int:
        """Stretches of a row that pass through the ring."""
        return self.stretches - self.kept

    @property
    def again(self) -> int:
        """Stretches that are loaded twice."""
        return self.streamed - self.ring if self.mode == "both" else 0

    def first_loads(self) -> list[Visit]:
        """The loads that fill all slots."""
        return [
            Visit(in_ring, *divmod(n, self._loads(in_ring)), self._slot(in_ring, n))
            for in_ring in (False, True)
            for n in range(self._turns(in_ring))
        ]

    @property
    def sums_order(self) -> list[Part]:
        """The kept ones come first."""
        parts = [Part(False, 0, self.kept), Part(True, 0, self.streamed)]
        return [part for part in parts if part.stretches]

    @property
    def gradient_order(self) -> list[Part]:
        """Those in the ring, those loaded again, those kept."""
        parts = [Part(True, self.again, self.streamed), Part(False, 0, self.kept)]
        return [part for part in parts if part.stretches]

    def visit(self, part: Part, row: Int, step: Int) -> Visit:
        """Stretch ``step`` of a part."""
        load = part.first_load + step
        slot = self._slot(part.in_ring, row * self._loads(part.in_ring) + load)
        return Visit(part.in_ring, row, load, slot)

    def nth(self, visit: Visit) -> Int:
        """Which stretch of the row it is."""
        if not visit.in_ring:
            return visit.load
        if not self.again:
            return self.kept + visit.load
        backwards = self.streamed + self.again - 1 - visit.load
        return self.kept + _where(visit.load < self.streamed, visit.load, backwards)

    def next(self, visit: Visit) -> Visit:
        """The load that takes the place of a stretch that is done with."""
        loads = self._loads(visit.in_ring)
        rows, further = divmod(self._turns(visit.in_ring), loads)
        row, load = visit.row + rows, visit.load + further
        fits = load < loads
        return visit._replace(row=_where(fits, row, row + 1), load=_where(fits, load, load - loads))

    def arrives(self, visit: Visit) -> Any:
        """Whether the gradient must wait for it: the sums did not."""
        if self.mode == "gradient":
            return True
        return visit.load >= self.streamed if visit.in_ring and self.again else False

    def is_dropped(self, visit: Visit) -> Any:
        """Whether its slot is free as soon as its sums are taken."""
        return True if self.mode == "sums" else self.comes_again(visit)

    def comes_again(self, visit: Visit) -> Any:
        """Whether it is loaded once more."""
        return visit.load < self.again if visit.in_ring and self.again else False

    def stays_in_l2(self, visit: Visit) -> Any:
        """Whether L2 is to keep it for its second load: the ``in_l2`` that come again soonest."""
        if not (visit.in_ring and self.again):
            return False
        return (visit.load >= self.again - self.in_l2) & (visit.load < self.again)

    def _loads(self, in_ring: bool) -> int:
        """Loads of one row."""
        return self.streamed + self.again if in_ring else self.kept

    def _turns(self, in_ring: bool) -> int:
        """Slots that the loads take turns at."""
        return self.ring if in_ring else self.slots - self.ring

    def _slot(self, in_ring: bool, number: Int) -> Int:
        turn = _rem(number, self._turns(in_ring))
        return self.slots - self.ring + turn if in_ring else turn


def _where(choice: Any, yes: Int, no: Int) -> Int:
    if not isinstance(choice, jax.Array):
        return yes if choice else no
    return lax.select(choice, *(lax.convert_element_type(v, "int32") for v in (yes, no)))


def _rem(x: Int, by: int) -> Int:
    return lax.rem(x, by) if isinstance(x, jax.Array) else x % by
