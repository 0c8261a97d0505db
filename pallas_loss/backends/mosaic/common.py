"""What the Mosaic GPU kernels share: reading per row and per column, tanh, the launch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_loss._device import num_multiprocessors
from pallas_loss._varying import vary_like
from pallas_loss.backends.mosaic import compat
from pallas_loss.tuning import BlackwellConfig, HopperConfig

SLOTS = 2  # two buffers take turns

# JAX's own signatures disagree about the type of a reference.
Ref = Any
Refs = Mapping[str, Ref]
Config = HopperConfig | BlackwellConfig


class Accumulator(Protocol):
    """A tile of products: an array in registers, or tensor memory that is read when asked."""

    def __getitem__(self, index: tuple[slice, slice]) -> jax.Array:
        """``acc[:, first:last]``, in registers."""
        ...


@dataclass(frozen=True)
class Registers:
    """How a tile lies in the registers of a warpgroup; ``store_m`` is the rows of one store.

    A tile leaves for shared memory in vectors of ``store_bytes``, 0 for those it has.
    """

    tile: Any
    store_m: int
    store_bytes: int = 0

    @property
    def row(self):
        """One value per row, as a reduction leaves it."""
        return self.tile.reduce(1)

    @property
    def col(self):
        """One value per column."""
        return self.tile.reduce(0)

    def load_rows(self, ref: Ref, start, size: int) -> jax.Array:
        """``ref[start : start + size]``, one value per row of a tile."""
        return plgpu.load(ref.at[pl.ds(start, size)], layout=self.row, optimized=False)

    def load_cols(self, ref: Ref, start, size: int) -> jax.Array:
        """``ref[start : start + size]``, one value per column of a tile."""
        return plgpu.load(ref.at[pl.ds(start, size)], layout=self.col, optimized=False)

    def cols_of(self, shape: tuple[int, int], first) -> jax.Array:
        """The column number of each element of a tile whose first is ``first``."""
        return plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=self.tile) + first

    def as_rows(self, v: jax.Array) -> jax.Array:
        """``v`` laid out as one value per row."""
        return plgpu.layout_cast(v, self.row)

    def for_store(self, v: jax.Array) -> jax.Array:
        """``v`` in the vectors that a store moves."""
        if not self.store_bytes:
            return v
        return plgpu.layout_cast(v, self.tile(self.store_bytes // v.dtype.itemsize))


# A thread holds pairs of columns of two rows of each 64, as wgmma leaves them.
WGMMA = Registers(plgpu.Layout.WGMMA, store_m=64)
# A thread holds a row: no reduction leaves it. 16 bytes at a time, eight neighbouring rows fill all
# banks of a swizzled buffer; the layout's own pairs would meet in a quarter of them.
TMEM = Registers(plgpu.Layout.TCGEN05_TMEM_NATIVE, store_m=128, store_bytes=16)


def registers(config: Config) -> Registers:
    """How the tiles of a kernel with this config lie in registers."""
    return TMEM if isinstance(config, BlackwellConfig) else WGMMA


class Place(NamedTuple):
    """Where a warpgroup's accumulator lies: its first row and column, the warpgroup, the group."""

    row: jax.Array
    col: jax.Array
    wg: jax.Array
    group: jax.Array


def cdiv(a: int | jax.Array, b: int):
    """``a / b`` rounded up; ``a`` may be a scalar of the kernel's."""
    return -(-a // b) if isinstance(a, int) else lax.div(a + (b - 1), b)


def row_tiles(tiles: tuple[int, int], config: Config, count: Ref | None):
    """``tiles``, with the rows of them that the first ``count[0]`` rows of the output need.

    Blocks of a cluster read the same count, and so make as many steps.
    """
    if count is None:
        return tiles
    return cdiv(count[0], config.block_m * config.cluster) * config.cluster, tiles[1]


def tanh(s: jax.Array) -> jax.Array:
    """``1 - 2 / (e^2s + 1)``: within 1e-7 of tanh, where the hardware's own is off by 5e-4."""
    return 1.0 - 2.0 / (jnp.exp(2.0 * s) + 1.0)


def over_rows(v: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Broadcasts one value per column over the rows of an accumulator."""
    return lax.broadcast_in_dim(v, shape, (1,))


def transforms(columns: int, dtype) -> tuple:
    """The tiling and swizzle of a shared-memory block with this many columns."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(columns * itemsize * 8)
    tiling = plgpu.TilingTransform((8, swizzle // itemsize))  # type: ignore[abstract]
    return (tiling, plgpu.SwizzleTransform(swizzle))  # type: ignore[abstract]


def store_buffer(config: Config, width: int, dtype):
    """Shared memory for the stores of a tile, ``store_m x width`` at a time, per warpgroup."""
    shape = (2, SLOTS, registers(config).store_m, width)
    return plgpu.SMEM(shape, dtype, transforms=transforms(width, dtype))


class TileStores:
    """Stores of the slices of a tile, ``store_m x width`` at a time; the buffers take turns."""

    def __init__(self, smem: Ref, out: Ref, config: Config, width: int):
        self.smem, self.out, self.width, self.tile_m = smem, out, width, config.tile_m
        self.registers = registers(config)
        # Every tile begins at buffer 0, so turns can be taken if it makes an even number of stores.
        stores = (config.tile_m // self.registers.store_m) * (config.tile_n // width)
        self.turns = SLOTS if stores % SLOTS == 0 else 1

    def __call__(self, part: jax.Array, place: Place, col: int, reduction: Any = None) -> None:
        """Stores ``part``, the rows of the tile at ``place`` from its column ``col`` on."""
        store_m = self.registers.store_m
        for m in range(0, self.tile_m, store_m):
            nth = (col // self.width) * (self.tile_m // store_m) + m // store_m
            buffer = self.smem.at[place.wg, nth % self.turns]
            plgpu.wait_smem_to_gmem(self.turns - 1, wait_read_only=True)
            rows = part[m : m + store_m].astype(self.out.dtype)
            buffer[...] = self.registers.for_store(rows)
            plgpu.commit_smem()
            out = self.at(place.row + m, place.col + col)
            plgpu.copy_smem_to_gmem(buffer, out, reduction_op=reduction)

    def at(self, row, col) -> Ref:
        """The part of the output that one store writes."""
        rows = pl.ds(pl.multiple_of(row, 8), self.registers.store_m)
        return self.out.at[rows, pl.ds(pl.multiple_of(col, self.width), self.width)]


def finish_stores() -> None:
    """Waits until the copy engine has read all that was stored."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def launch(body, operands, out_type, config: Config, name: str):
    """Runs ``body(*operand_refs, *out_refs)`` on every multiprocessor with three warpgroups."""
    options = _launch_options(config)
    run = plgpu.kernel(body, out_type=out_type, kernel_name=name, **options)
    return vary_like(run(*compat.untyped(operands)), operands)


def launch_in_place(body, operands, out: Ref, config: Config, name: str) -> None:
    """Runs ``body(*operand_refs, out_ref)``, which writes parts of ``out``."""
    options = _launch_options(config)
    params = options.pop("compiler_params")
    kernel = pl.kernel(body, mesh=plgpu.Mesh(**options), compiler_params=params, name=name)
    kernel(*operands, out)


def _launch_options(config: Config) -> dict:
    return dict(
        grid=(num_multiprocessors() // config.cluster,),
        grid_names=("cluster",),
        cluster=(config.cluster,),
        cluster_names=("block",),
        num_threads=3,
        thread_name="wg",
        # No warpgroup reads what it wrote: a store needs two barriers, those of ``TileStores``, not
        # four, and a load none, since all threads of the loader arrive for each copy.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )
