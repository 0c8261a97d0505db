"""The main loop on Hopper: a persistent, warp-specialised product whose tiles stay in registers.

Two warpgroups multiply (wgmma), each a part of one tile; a third loads (TMA). The loader runs
over all the tiles of its block without a pause, so the next tile's operands arrive while an
epilogue runs; a slot of shared memory is handed back as soon as the products that read it are done.
"""

from typing import Any, NamedTuple, Protocol

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_loss.backends.mosaic.common import Accumulator, Place, Ref, transforms
from pallas_loss.backends.mosaic.turns import Turns
from pallas_loss.tuning import HopperConfig

LOADER = 2  # the third warpgroup
LOADER_REGISTERS, COMPUTE_REGISTERS = 40, 232


class Side(NamedTuple):
    """One operand of ``A @ B``: rows (of A) or columns (of B) by K, in global memory.

    ``k_minor`` says that K is contiguous. The product starts at ``first`` along the rows and at
    ``first_k`` along K, multiples of 64.
    """

    ref: Ref
    k_minor: bool
    first: Any = 0
    first_k: Any = 0

    def block(self, rows: int, tile_k: int) -> tuple[int, int]:
        return (rows, tile_k) if self.k_minor else (tile_k, rows)

    def at(self, row, rows: int, k, tile_k: int) -> Ref:
        here = pl.ds(pl.multiple_of(self.first + row, 64), rows)
        there = pl.ds(pl.multiple_of(self.first_k + k, 64), tile_k)
        return self.ref.at[here, there] if self.k_minor else self.ref.at[there, here]


class Epilogue(Protocol):
    """What happens to the tiles. ``state`` is carried over the column tiles of one group."""

    @property
    def scratch(self) -> Any:
        """The shared memory that it needs, for ``pl.run_scoped``."""
        ...

    def start(self, place: Place) -> Any:
        """The state before the first tile of a group."""
        ...

    def before(self, place: Place) -> Any:
        """What ``fold`` needs from memory, read before the products so that it need not wait."""
        ...

    def fold(self, state, before, acc: Accumulator, place: Place, scratch) -> Any:
        """The state after one more tile."""
        ...

    def finish(self, state, place: Place, scratch) -> None:
        """Writes what a group leaves behind."""
        ...


def matmul(
    a: Side,
    b: Side,
    size_k: int | jax.Array,
    tiles: tuple[int | jax.Array, int],
    config: HopperConfig,
    epilogue: Epilogue,
) -> None:
    """Hands every tile of ``A @ B`` to the epilogue; ``tiles`` counts the rows and columns of them.

    Elements past the end of an operand are loaded as zeros. The rows of tiles, in whole clusters,
    and a positive ``size_k`` may be known on the device alone.
    """
    turns = Turns.of(size_k, tiles, config)
    k_steps, stages = turns.k_steps, turns.stages
    a_block, b_block = (
        a.block(config.block_m, config.tile_k),
        b.block(config.block_n, config.tile_k),
    )
    dtype = a.ref.dtype

    together = "block" if config.cluster > 1 else None

    def scoped(a_smem, b_smem, ready, free, scratch):
        wg, items = lax.axis_index("wg"), turns.count()

        @pl.when(wg == LOADER)
        def _load():
            plgpu.set_max_registers(LOADER_REGISTERS, action="decrease")

            def copy(m, n, k, slot):
                for side, smem, row, rows, shared in (
                    (a, a_smem, m * config.block_m, config.block_m, None),
                    (b, b_smem, n * config.block_n, config.block_n, together),
                ):
                    plgpu.copy_gmem_to_smem(
                        side.at(row, rows, k, config.tile_k),
                        smem.at[slot],
                        ready.at[slot],
                        collective_axes=shared,
                        oob_mode=plgpu.OOBFillMode.ZEROS,
                    )

            turns.load(items, free, copy)

        @pl.when(wg < LOADER)
        def _compute():
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            m_here = wg * config.tile_m if config.split == "m" else 0
            n_here = wg * config.tile_n if config.split == "n" else 0

            def one_item(i, step):
                m, group, tiles_here = turns.item(i)
                row = m * config.block_m + m_here
                first_col = group * config.group * config.block_n + n_here

                def one_tile(j, carry):
                    step, state = carry
                    place = Place(row, first_col + j * config.block_n, wg, group)
                    before = epilogue.before(place)

                    def accumulate(acc):
                        def one_step(k, step):
                            slot = lax.rem(step, stages)
                            plgpu.barrier_wait(ready.at[slot])
                            _multiply(acc, a, b, a_smem.at[slot], b_smem.at[slot], wg, config)
                            plgpu.wgmma_wait(1)
                            # All products but the last are done, so the slot before is free.
                            last = lax.rem(step + stages - 1, stages)
                            pl.when(k > 0)(lambda: plgpu.barrier_arrive(free.at[last]))
                            return step + 1

                        end = lax.fori_loop(0, k_steps, one_step, step)
                        plgpu.wgmma_wait(0)
                        plgpu.barrier_arrive(free.at[lax.rem(end + stages - 1, stages)])
                        return end, epilogue.fold(state, before, acc[...], place, scratch)

                    shape = (config.tile_m, config.tile_n)
                    return pl.run_scoped(accumulate, plgpu.ACC(shape, jnp.float32))

                place = Place(row, first_col, wg, group)
                carry = (step, epilogue.start(place))
                step, state = lax.fori_loop(0, tiles_here, one_tile, carry)
                epilogue.finish(state, place, scratch)
                return step

            lax.fori_loop(0, items, one_item, jnp.int32(0))

    pl.run_scoped(
        scoped,
        plgpu.SMEM((stages, *a_block), dtype, transforms=transforms(a_block[1], dtype)),
        plgpu.SMEM((stages, *b_block), dtype, transforms=transforms(b_block[1], dtype)),
        plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        # A slot is free once both warpgroups of every block that the copy fills are done with it.
        plgpu.Barrier(num_arrivals=2, num_barriers=stages)
        if together is None
        else plgpu.ClusterBarrier(collective_axes=(together,), num_arrivals=2, num_barriers=stages),
        epilogue.scratch,
        collective_axes="wg",
    )


def _multiply(acc, a: Side, b: Side, a_smem, b_smem, wg, config: HopperConfig) -> None:
    everything = slice(None)
    m = pl.ds(wg * config.tile_m, config.tile_m) if config.split == "m" else everything
    n = pl.ds(wg * config.tile_n, config.tile_n) if config.split == "n" else everything
    lhs = a_smem.at[m] if a.k_minor else a_smem.at[:, m].transpose((1, 0))
    rhs = b_smem.at[n].transpose((1, 0)) if b.k_minor else b_smem.at[:, n]
    plgpu.wgmma(acc, lhs, rhs)
