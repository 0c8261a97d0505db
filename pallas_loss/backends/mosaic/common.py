"""What the Mosaic GPU kernels share: reading per row and per column, tanh, the launch."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_loss._device import num_multiprocessors
from pallas_loss._varying import vary_like
from pallas_loss.tuning import HopperConfig

STORE_M, SLOTS = 64, 2  # the rows of one store; two buffers take turns

# One value per row, and one per column, as a reduction of an accumulator leaves them.
ROW = plgpu.Layout.WGMMA.reduce(1)
COL = plgpu.Layout.WGMMA.reduce(0)

# JAX's own signatures disagree about the type of a reference.
Ref = Any
Refs = Mapping[str, Ref]


class Place(NamedTuple):
    """Where a warpgroup's accumulator lies: its first row and column, the warpgroup, the group."""

    row: jax.Array
    col: jax.Array
    wg: jax.Array
    group: jax.Array


def tanh(s: jax.Array) -> jax.Array:
    """``1 - 2 / (e^2s + 1)``: within 1e-7 of tanh, where the hardware's own is off by 5e-4."""
    return 1.0 - 2.0 / (jnp.exp(2.0 * s) + 1.0)


def load_rows(ref: Ref, start, size: int) -> jax.Array:
    """``ref[start : start + size]``, one value per row of an accumulator."""
    return plgpu.load(ref.at[pl.ds(start, size)], layout=ROW, optimized=False)


def load_cols(ref: Ref, start, size: int) -> jax.Array:
    """``ref[start : start + size]``, one value per column of an accumulator."""
    return plgpu.load(ref.at[pl.ds(start, size)], layout=COL, optimized=False)


def cols_of(shape: tuple[int, int], first) -> jax.Array:
    """The column number of each element of an accumulator whose first is ``first``."""
    return plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA) + first


def over_rows(v: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Broadcasts one value per column over the rows of an accumulator."""
    return lax.broadcast_in_dim(v, shape, (1,))


def transforms(columns: int, dtype) -> tuple:
    """The tiling and swizzle of a shared-memory block with this many columns."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(columns * itemsize * 8)
    tiling = plgpu.TilingTransform((8, swizzle // itemsize))  # type: ignore[abstract]
    return (tiling, plgpu.SwizzleTransform(swizzle))  # type: ignore[abstract]


def store_buffer(width: int, dtype):
    """Shared memory for the stores of a tile, ``STORE_M x width`` at a time, per warpgroup."""
    return plgpu.SMEM((2, SLOTS, STORE_M, width), dtype, transforms=transforms(width, dtype))


class TileStores:
    """Stores of the slices of a tile, ``STORE_M x width`` at a time; the buffers take turns."""

    def __init__(self, smem: Ref, out: Ref, config: HopperConfig, width: int):
        self.smem, self.out, self.width, self.tile_m = smem, out, width, config.tile_m
        # Every tile begins at buffer 0, so turns can be taken if it makes an even number of stores.
        stores = (config.tile_m // STORE_M) * (config.tile_n // width)
        self.turns = SLOTS if stores % SLOTS == 0 else 1

    def __call__(self, part: jax.Array, place: Place, col: int, reduction: Any = None) -> None:
        """Stores ``part``, the rows of the tile at ``place`` from its column ``col`` on."""
        for m in range(0, self.tile_m, STORE_M):
            nth = (col // self.width) * (self.tile_m // STORE_M) + m // STORE_M
            buffer = self.smem.at[place.wg, nth % self.turns]
            plgpu.wait_smem_to_gmem(self.turns - 1, wait_read_only=True)
            buffer[...] = part[m : m + STORE_M].astype(self.out.dtype)
            plgpu.commit_smem()
            out = self.at(place.row + m, place.col + col)
            plgpu.copy_smem_to_gmem(buffer, out, reduction_op=reduction)

    def at(self, row, col) -> Ref:
        """The part of the output that one store writes."""
        rows = pl.ds(pl.multiple_of(row, 8), STORE_M)
        return self.out.at[rows, pl.ds(pl.multiple_of(col, self.width), self.width)]


def finish_stores() -> None:
    """Waits until the copy engine has read all that was stored."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def launch(body, operands, out_type, config: HopperConfig, name: str):
    """Runs ``body(*operand_refs, *out_refs)`` on every multiprocessor with three warpgroups."""
    options = _launch_options(config)
    out = plgpu.kernel(body, out_type=out_type, kernel_name=name, **options)(*operands)
    return vary_like(out, operands)  # the kernel's outputs come without a type


def launch_in_place(body, operands, out: Ref, config: HopperConfig, name: str) -> None:
    """Runs ``body(*operand_refs, out_ref)``, which writes parts of ``out``."""
    options = _launch_options(config)
    params = options.pop("compiler_params")
    kernel = pl.kernel(body, mesh=plgpu.Mesh(**options), compiler_params=params, name=name)
    kernel(*operands, out)


def _launch_options(config: HopperConfig) -> dict:
    return dict(
        grid=(num_multiprocessors() // config.cluster,),
        grid_names=("cluster",),
        cluster=(config.cluster,),
        cluster_names=("block",),
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
