"""The schedule of the row kernel, followed step by step as a warpgroup does, without a device."""

import itertools
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from pallas_loss.backends.mosaic import row_backend
from pallas_loss.backends.mosaic.row_schedule import Schedule
from pallas_loss.backends.mosaic.rows import Lines
from pallas_loss.backends.rows import RowOperands
from pallas_loss.tuning import SMEM_BYTES, RowConfig, override


class Chip:
    """Slots that know what they hold; refuses what would lose or mistake it."""

    def __init__(self, schedule, rows):
        self.schedule, self.rows = schedule, rows
        self.held, self.unseen, self.loads, self.announced = {}, set(), [], []
        for visit in schedule.first_loads():
            self.load(visit)

    def load(self, visit):
        if visit.row < self.rows:
            assert 0 <= visit.slot < self.schedule.slots and visit.slot not in self.held, visit
            self.held[visit.slot] = self.place(visit)
            self.unseen.add(visit.slot)  # its barrier has a phase that nobody has waited for
            self.loads.append(self.place(visit))
            self.announced.append(self.schedule.comes_again(visit))

    def place(self, visit):
        return visit.row, self.schedule.nth(visit)

    def use(self, visit, waits):
        assert self.held[visit.slot] == self.place(visit), "the slot holds what is looked for"
        assert (visit.slot in self.unseen) == waits, "waited for once, and then not again"
        self.unseen.discard(visit.slot)
        return self.place(visit)

    def free(self, visit):
        del self.held[visit.slot]
        self.load(self.schedule.next(visit))


def follow(schedule, rows):
    """The kernel's loops; ``(summed, stored, loads)`` in order.

    Each load knows whether another one of the same stretch follows.
    """
    chip = Chip(schedule, rows)
    summed, stored = [], []
    before = None
    for row in range(rows):
        if schedule.mode != "gradient":
            for visit in visits(schedule, schedule.sums_order, row):
                summed.append(chip.use(visit, waits=True))
                if schedule.is_dropped(visit):
                    chip.free(visit)
        if schedule.mode != "sums":
            for step, visit in enumerate(visits(schedule, schedule.gradient_order, row)):
                if before and not step and schedule.mode == "both":
                    chip.free(before)
                stored.append(chip.use(visit, schedule.arrives(visit)))
                if before and (step or schedule.mode == "gradient"):
                    chip.free(before)
                before = visit
    assert chip.announced == [load in chip.loads[n + 1 :] for n, load in enumerate(chip.loads)]
    return summed, stored, chip.loads


def visits(schedule, order, row):
    return [schedule.visit(part, row, n) for part in order for n in range(part.stretches)]


CONFIGS = [RowConfig(2), RowConfig(2, slots=8), RowConfig(2, slots=4, ring=2)]
CONFIGS += [RowConfig(2, slots=7, ring=r, ahead=a) for r, a in itertools.product((2, 3, 4), (1, 2))]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("mode", ["both", "sums", "gradient"])
def test_every_stretch_is_summed_and_stored_once(mode, config):
    """From a slot that holds it; no load goes to a slot in use; each load is waited for once."""
    for n, rows in itertools.product((1, 2, 3, 5, 6, 7, 8, 9, 13, 16, 40), (0, 1, 2, 9)):
        schedule = Schedule.of(mode, n, config)
        summed, stored, loads = follow(schedule, rows)
        every = [(row, nth) for row in range(rows) for nth in range(n)]
        assert summed == (every if mode != "gradient" else [])
        assert sorted(stored) == (every if mode != "sums" else [])
        assert [row for row, _ in stored] == sorted(row for row, _ in stored)
        again = len(loads) - len(set(loads))
        assert set(loads) == set(every) and again == rows * schedule.again


def test_how_much_is_read_twice():
    """What shared memory cannot hold beside a stretch of the next row; nothing where it can."""
    again = {n: Schedule.of("both", n, RowConfig(2)).again for n in (1, 6, 7, 8, 16)}
    assert again == {1: 0, 6: 0, 7: 1, 8: 2, 16: 10}


def test_l2_keeps_what_comes_again_soonest():
    """Eight of ten stretches, whose second loads are the first to come; of few, all."""
    for stretches, kept in ((16, 8), (10, 4), (6, 0)):
        schedule = Schedule.of("both", stretches, RowConfig(2, in_l2=8))
        visits_of_row = visits(schedule, schedule.sums_order, 0)
        stays = [schedule.nth(v) for v in visits_of_row if schedule.stays_in_l2(v)]
        *_, loads = follow(schedule, 2)
        second = [nth for n, (row, nth) in enumerate(loads) if row == 0 and (row, nth) in loads[:n]]
        assert len(stays) == kept and set(stays) == set(second[:kept])


def test_what_is_loaded_again_is_the_latest():
    """Its first load is the least time ago: L2 still has it."""
    schedule = Schedule.of("both", 16, RowConfig(2))
    _, stored, _ = follow(schedule, 1)
    ring, again, kept = stored[:4], stored[4:14], stored[14:]
    assert [nth for _, nth in ring] == [12, 13, 14, 15]
    assert [nth for _, nth in again] == list(range(11, 1, -1))
    assert [nth for _, nth in kept] == [0, 1]


def test_rows_that_must_fit():
    """Two slots of a row and one of the next; a third stretch would have nowhere to go."""
    config = RowConfig(2, slots=3, ring=2)
    for n in (1, 2):
        assert len(follow(Schedule.of("both", n, config), 9)[2]) == 9 * n
    with pytest.raises(ValueError, match="keeps none of 3"):
        Schedule.of("both", 3, config)


@pytest.mark.parametrize("stretches", [3, 16])
@pytest.mark.parametrize("mode", ["both", "sums", "gradient"])
def test_traced_integers_say_the_same(mode, stretches):
    """The kernel asks with traced rows and steps."""
    schedule = Schedule.of(mode, stretches, RowConfig(2))

    def ask(part, row, step):
        visit = schedule.visit(part, row, step)
        after = schedule.next(visit)
        flags = schedule.arrives(visit), schedule.is_dropped(visit), schedule.comes_again(visit)
        return [*visit, schedule.nth(visit), *after, schedule.nth(after), *flags]

    orders = {"both": 3, "sums": 1, "gradient": 2}[mode]
    parts = schedule.sums_order * (orders & 1) + schedule.gradient_order * (orders >> 1)
    for part in parts:
        traced = jax.jit(partial(ask, part))
        for row, step in itertools.product((0, 1, 5), range(part.stretches)):
            got = jax.tree.map(int, traced(jnp.int32(row), jnp.int32(step)))
            assert got == jax.tree.map(int, ask(part, row, step))


VOCABS = (1, 63, *range(64, 40000, 64 * 7), *range(256, 600000, 256 * 13), 50257, 128256, 151936)


def _problem_and_operands(vocab, dtypes, heavy):
    arrays = [jax.ShapeDtypeStruct((4, vocab), dtype) for dtype in dtypes]
    loss = SimpleNamespace(has_target=len(dtypes) == 2)
    transform = SimpleNamespace(soft_cap=5.0 if heavy else None)
    problem = SimpleNamespace(loss=loss, transform=transform, moments=frozenset())
    return problem, RowOperands(*arrays)


@pytest.mark.parametrize("heavy", [False, True])
@pytest.mark.parametrize(
    "dtypes", [("bfloat16",), ("float32",), *itertools.product(("bfloat16", "float32"), repeat=2)]
)
@pytest.mark.parametrize("mode", ["both", "sums", "gradient"])
def test_every_width_has_a_schedule(mode, dtypes, heavy):
    """The config that is chosen fits in shared memory, and its schedule works."""
    for vocab in VOCABS:
        problem, operands = _problem_and_operands(vocab, dtypes, heavy)
        view = row_backend._view(operands)
        config = row_backend._config(mode, problem, operands)
        assert config.smem_bytes(view.line_bytes) <= SMEM_BYTES
        lines = Lines(4, view.lines, view.width, vocab, config)
        assert view.width * view.lines == vocab + view.padding <= lines.dealt * view.width
        of_block = itertools.product(range(lines.stretches), range(config.warpgroups))
        firsts = [lines.first_line(nth, wg) for nth, wg in of_block]
        assert lines.count == sum(int(lines.real(first)) for first in firsts)
        schedule = Schedule.of(mode, lines.stretches, config)
        summed, stored, _ = follow(schedule, 3)
        for visited in (summed, stored):
            assert len(set(visited)) in (0, 3 * lines.stretches)


def test_too_much_shared_memory():
    """Said of the config, before anything is compiled."""
    problem, operands = _problem_and_operands(131072, ("bfloat16", "bfloat16"), False)
    with (
        override(RowConfig(4), "both"),
        pytest.raises(ValueError, match=r"lines=4.* needs 460800 bytes of shared memory"),
    ):
        row_backend._config("both", problem, operands)
