"""The two products of d-logits, written in place: ``dx += d w^T`` and ``dw[split] = x^T d``.

XLA's own products would copy the slice of ``w`` they read and the slice of ``dw`` they write.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_loss._types import Layout
from pallas_loss.backends.mosaic import compat, hopper, products
from pallas_loss.backends.mosaic.common import (
    Config,
    Place,
    Ref,
    TileStores,
    finish_stores,
    launch_in_place,
    registers,
    store_buffer,
)


@dataclass(frozen=True)
class StoreEpilogue:
    """``out[row_offset:, col_offset:] = unscale * acc``, or ``+=`` with ``accumulate``.

    Adding is left to the copy engine: each element is added to once a launch, so the result does
    not depend on the order.
    """

    config: Config
    out: Ref
    row_offset: Any = 0
    col_offset: Any = 0
    unscale: Ref | None = None
    accumulate: bool = False
    scratch: Any = field(init=False)

    def __post_init__(self):
        buffer = store_buffer(self.config, self.width, self.out.dtype)
        object.__setattr__(self, "scratch", buffer)

    @property
    def width(self) -> int:
        """Columns of one store: 128 bytes, one swizzle, or the part of it that divides a tile."""
        return math.gcd(self.config.tile_n, 128 // jnp.dtype(self.out.dtype).itemsize)

    def start(self, place: Place):
        return ()

    def before(self, place: Place) -> None:
        return None

    def fold(self, state, before, acc, place: Place, smem):
        unscale = None if self.unscale is None else self.unscale[0]
        stores = TileStores(smem, self.out, self.config, self.width)
        here = place._replace(row=self.row_offset + place.row, col=self.col_offset + place.col)
        for col in range(0, self.config.tile_n, self.width):
            part = acc[:, col : col + self.width]
            if unscale is not None:
                part = part * unscale
            if self.accumulate and compat.interpreting():
                # The interpreter (JAX 0.12) has no reducing copy.
                rows = range(0, self.config.tile_m, registers(self.config).store_m)
                old = [stores.at(here.row + m, here.col + col) for m in rows]
                part = part + jnp.concatenate([plgpu.load(ref, optimized=False) for ref in old])
                stores(part, here, col)
            else:
                stores(part, here, col, reduction="add" if self.accumulate else None)
        return state

    def finish(self, state, place: Place, scratch) -> None:
        finish_stores()


def zero_dx(shape: tuple[int, ...], config: Config) -> jax.Array:
    """What ``add_dx`` adds to."""
    if compat.interpreting():
        # There an addition reads a whole tile, which must not reach past the end.
        tiles = config.tiles(*shape)
        shape = (tiles[0] * config.block_m, tiles[1] * config.block_n)
    return jnp.zeros(shape, jnp.float32)


def add_dx(dx: Ref, d, w, layout: Layout, first, size: int, config: Config) -> None:
    """``dx += d @ w[:, first : first + size]^T``; ``d [T, size]``, ``dx [T, H]`` float32."""
    t, h = d.shape[0], w.shape[0 if layout == "hv" else 1]
    tiles = config.tiles(t, h)

    def add_dx_kernel(first_gmem, d_gmem, w_gmem, dx_gmem):
        a = hopper.Side(d_gmem, k_minor=True)
        b = hopper.Side(w_gmem, k_minor=layout == "hv", first_k=first_gmem[0])
        products.matmul(a, b, size, tiles, config, StoreEpilogue(config, dx_gmem, accumulate=True))

    launch_in_place(add_dx_kernel, (_scalar(first), d, w), dx, config, "add_dx")


def store_dw(dw: Ref, x, d, layout: Layout, first, size: int, unscale, config: Config) -> None:
    """``dw[:, first : first + size] = unscale * x^T @ d``; ``dw`` in the layout of ``w``."""
    t, h = x.shape
    rows, cols = (h, size) if layout == "hv" else (size, h)
    tiles = config.tiles(rows, cols)
    scale = () if unscale is None else (unscale.reshape(1),)

    def store_dw_kernel(first_gmem, x_gmem, d_gmem, *refs):
        *scale_gmem, dw_gmem = refs
        x_side, d_side = hopper.Side(x_gmem, k_minor=False), hopper.Side(d_gmem, k_minor=False)
        a, b = (x_side, d_side) if layout == "hv" else (d_side, x_side)
        offset = {"col_offset" if layout == "hv" else "row_offset": first_gmem[0]}
        unscale_gmem = scale_gmem[0] if scale_gmem else None
        epilogue = StoreEpilogue(config, dw_gmem, unscale=unscale_gmem, **offset)
        products.matmul(a, b, t, tiles, config, epilogue)

    launch_in_place(store_dw_kernel, (_scalar(first), x, d, *scale), dw, config, "store_dw")


def _scalar(v) -> jax.Array:
    return jnp.full((1,), v, jnp.int32)
