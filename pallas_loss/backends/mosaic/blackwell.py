"""The main loop on Blackwell: products in tensor memory, and an epilogue beside the next ones.

Of three warpgroups one works with two single warps: one loads (TMA), one multiplies (tcgen05). Both
run over all the tiles of their block without a pause. Tensor memory holds two tiles; the two
epilogue warpgroups read one, a few columns at a time, while the other fills, so an epilogue costs
nothing as long as it is shorter than a tile's products.

What two blocks that multiply together do differently is all in ``_Pair``.
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_loss.backends.mosaic.common import TMEM, Place, Ref, transforms
from pallas_loss.backends.mosaic.hopper import Epilogue, Side
from pallas_loss.backends.mosaic.turns import Turns
from pallas_loss.tuning import BlackwellConfig

PRODUCTS = 2  # the third warpgroup
LOADER, MULTIPLIER = 0, 1  # its warps
# With fewer the single warps spill what the compiler computes ahead of both branches.
PRODUCT_REGISTERS, EPILOGUE_REGISTERS = 96, 208
HELD = 2  # tiles in tensor memory


class TmemTile:
    """An ``Accumulator``: a warpgroup's part of a tile, whose slices are loaded when asked for."""

    def __init__(self, ref: Ref, first):
        self.ref, self.first = ref, first

    def __getitem__(self, index: tuple[slice, slice]) -> jax.Array:
        cols = index[1]
        here = pl.ds(self.first + cols.start, cols.stop - cols.start)
        return plgpu.async_load_tmem(self.ref.at[:, here], layout=TMEM.tile)


class _Pair:
    """What differs where two blocks multiply one tile of twice the rows, and what one does.

    Extents: each block holds the products of its own rows with all columns, its own rows of A and
    half of the columns of B; a copy names the rows, or columns, of both, and each receives a half.
    Only the first block learns that a copy has arrived, and it alone issues products. They read and
    write the memories of both blocks, and both are told when they are done. Tensor memory is free
    again once both blocks' epilogues have said so to both.
    """

    def __init__(self, config: BlackwellConfig):
        self.config = config
        self.axis = "block" if config.collective else None

    def issues(self):
        """Whether this block issues the products."""
        return lax.axis_index("block") == 0 if self.axis else True

    def copy(self, side: Side, tile, rows: int, k, smem: Ref, ready: Ref, shared: bool) -> None:
        """Loads a step of the operand's ``tile``, of ``rows``; ``shared`` if it is both blocks'."""
        options: dict[str, Any] = {}
        if self.axis:
            if not shared:
                tile, rows = lax.div(tile, 2), 2 * rows
            partition = plgpu.CopyPartition.PARTITIONED(0 if side.k_minor else 1)
            options = {"collective_axes": self.axis, "leader_tracked": partition}
        plgpu.copy_gmem_to_smem(
            _step_of(side, tile * rows, rows, k, self.config.tile_k),
            smem,
            ready,
            oob_mode=plgpu.OOBFillMode.ZEROS,
            **options,
        )

    def multiply(self, acc: Ref, a_smem: Ref, b_smem: Ref, free: Ref, accumulate) -> None:
        """Issues a step's products, and that ``free`` be told when they are done."""
        plgpu.tcgen05_mma(
            acc, a_smem, b_smem, free, accumulate=accumulate, collective_axis=self.axis
        )

    def tell(self, done: Ref) -> None:
        """Has ``done`` told when all products issued so far are done."""
        plgpu.tcgen05_commit_arrive(done, collective_axis=self.axis)

    def tensor_memory(self):
        """What holds two tiles."""
        shape = (self.config.block_m, self.config.tmem_columns)
        return plgpu.TMEM(shape, jnp.float32, collective=self.config.collective)

    def taken(self):
        """The barriers on which each epilogue warpgroup hands a tile of tensor memory back."""
        options = {"num_arrivals": 2, "num_barriers": HELD, "orders_tensor_core": True}
        if self.axis:
            return plgpu.ClusterBarrier(collective_axes=(self.axis,), **options)
        return plgpu.Barrier(**options)


def matmul(
    a: Side,
    b: Side,
    size_k: int | jax.Array,
    tiles: tuple[int | jax.Array, int],
    config: BlackwellConfig,
    epilogue: Epilogue,
) -> None:
    """As ``hopper.matmul``."""
    pair = _Pair(config)
    a, b = _aligned(a), _aligned(b)
    turns = Turns.of(size_k, tiles, config)
    k_steps, stages = turns.k_steps, turns.stages
    a_block = a.block(config.block_m, config.tile_k)
    b_block = b.block(config.load_n, config.tile_k)
    dtype = a.ref.dtype

    def scoped(a_smem, b_smem, acc_tmem, ready, free, done, taken, scratch):
        wg, items = lax.axis_index("wg"), turns.count()

        def load_all():
            def copy(m, n, k, slot):
                into = ready.at[slot]
                pair.copy(a, m, config.block_m, k, a_smem.at[slot], into, shared=False)
                pair.copy(b, n, config.block_n, k, b_smem.at[slot], into, shared=True)

            turns.load(items, free, copy)

        def multiply_all():
            def multiply_tile(tile, step):
                held = lax.rem(tile, HELD)
                pl.when(tile >= HELD)(lambda: plgpu.barrier_wait(taken.at[held]))

                @pl.when(pair.issues())
                def _issue():
                    acc = acc_tmem.at[:, pl.ds(held * config.block_n, config.block_n)]

                    @pl.loop(0, k_steps)
                    def _step(k):
                        slot = lax.rem(step + k, stages)
                        plgpu.barrier_wait(ready.at[slot])
                        lhs, rhs = _rows_by_k(a, a_smem.at[slot]), _k_by_cols(b, b_smem.at[slot])
                        pair.multiply(acc, lhs, rhs, free.at[slot], accumulate=k > 0)

                    pair.tell(done.at[held])

                return step + k_steps

            total = lax.fori_loop(0, items, lambda i, n: n + turns.item(i)[2], jnp.int32(0))
            lax.fori_loop(0, total, multiply_tile, jnp.int32(0))

            @pl.loop(jnp.maximum(total - HELD, 0), total)
            def _drain(tile):
                plgpu.barrier_wait(taken.at[lax.rem(tile, HELD)])

        @pl.when(wg == PRODUCTS)
        def _products():
            plgpu.set_max_registers(PRODUCT_REGISTERS, action="decrease")

            @plgpu.warp_map
            def _per_warp(warp):
                pl.when(warp == LOADER)(load_all)
                pl.when(warp == MULTIPLIER)(multiply_all)

        @pl.when(wg < PRODUCTS)
        def _epilogues():
            plgpu.set_max_registers(EPILOGUE_REGISTERS, action="increase")

            def one_item(i, tile):
                m, group, tiles_here = turns.item(i)
                first_col = group * config.group * config.block_n + wg * config.tile_n
                place = Place(m * config.block_m, first_col, wg, group)

                def one_tile(j, carry):
                    tile, state = carry
                    here = place._replace(col=first_col + j * config.block_n)
                    before = epilogue.before(here)
                    held = lax.rem(tile, HELD)
                    plgpu.barrier_wait(done.at[held])
                    acc = TmemTile(acc_tmem, held * config.block_n + wg * config.tile_n)
                    state = epilogue.fold(state, before, acc, here, scratch)
                    plgpu.wait_load_tmem()
                    plgpu.barrier_arrive(taken.at[held])
                    return tile + 1, state

                carry = (tile, epilogue.start(place))
                tile, state = lax.fori_loop(0, tiles_here, one_tile, carry)
                epilogue.finish(state, place, scratch)
                return tile

            lax.fori_loop(0, items, one_item, jnp.int32(0))

    pl.run_scoped(
        scoped,
        plgpu.SMEM((stages, *a_block), dtype, transforms=transforms(a_block[1], dtype)),
        plgpu.SMEM((stages, *b_block), dtype, transforms=transforms(b_block[1], dtype)),
        pair.tensor_memory(),
        plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        plgpu.Barrier(num_arrivals=1, num_barriers=stages, orders_tensor_core=True),
        plgpu.Barrier(num_arrivals=1, num_barriers=HELD, orders_tensor_core=True),
        pair.taken(),
        epilogue.scratch,
        collective_axes="wg",
    )


def _aligned(side: Side) -> Side:
    """``side`` whose beginnings are known to be multiples of 64.

    A single warp cannot state it (JAX 0.11.2 has no ``multiple_of`` there), only its warpgroup; the
    rest of an address is a product with a tile's extent, which the compiler sees for itself.
    """
    known = lambda v: v if isinstance(v, int) else pl.multiple_of(v, 64)  # noqa: E731
    return side._replace(first=known(side.first), first_k=known(side.first_k))


def _step_of(side: Side, row, rows: int, k, tile_k: int) -> Ref:
    here, there = pl.ds(side.first + row, rows), pl.ds(side.first_k + k, tile_k)
    return side.ref.at[here, there] if side.k_minor else side.ref.at[there, here]


def _rows_by_k(side: Side, smem: Ref) -> Ref:
    return smem if side.k_minor else smem.transpose((1, 0))


def _k_by_cols(side: Side, smem: Ref) -> Ref:
    return smem.transpose((1, 0)) if side.k_minor else smem
