"""The two products of d-logits, written in place: ``dx += d w^T`` and ``dw[split] = x^T d``.

XLA's own products would copy the slice of ``w`` they read and the slice of ``dw`` they write.
"""

import math
from dataclasses import dataclass
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
    launch,
    launch_in_place,
    registers,
    row_tiles,
    store_buffer,
)

# What is computed of d-logits are whole tiles of so many rows, and no step may read past them.
TILE_ROWS = 64


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

    @property
    def scratch(self):
        return store_buffer(self.config, self.width, self.out.dtype)

    @property
    def width(self) -> int:
        """Columns of one store: 128 bytes, one swizzle, or the part of it that divides a tile."""
        return math.gcd(self.config.tile_n, 128 // jnp.dtype(self.out.dtype).itemsize)

    def start(self, place: Place) -> None:
        return None

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


def add_dx(dx: Ref, d, w, layout: Layout, first, size: int, config: Config, counts=()) -> None:
    """``dx += d @ w[:, first : first + size]^T``; ``d [T, size]``, ``dx [T, H]`` float32.

    ``counts`` (``kernels.row_counts``) says how many rows there are.
    """
    tiles = config.tiles(d.shape[0], w.shape[0 if layout == "hv" else 1])

    def add_dx_kernel(first_gmem, d_gmem, w_gmem, *refs):
        *count, dx_gmem = refs
        a = hopper.Side(d_gmem, k_minor=True)
        b = hopper.Side(w_gmem, k_minor=layout == "hv", first_k=first_gmem[0])
        here = row_tiles(tiles, config, count[0] if count else None)
        products.matmul(a, b, size, here, config, StoreEpilogue(config, dx_gmem, accumulate=True))

    launch_in_place(add_dx_kernel, (_scalar(first), d, w, *counts), dx, config, "add_dx")


def store_dx(d, w, layout: Layout, config: Config, counts) -> jax.Array:
    """``d @ w^T``, float32; rows past the count are not written."""
    t, h = d.shape[0], w.shape[0 if layout == "hv" else 1]
    tiles = config.tiles(t, h)

    def store_dx_kernel(d_gmem, w_gmem, count, dx_gmem):
        a = hopper.Side(d_gmem, k_minor=True)
        b = hopper.Side(w_gmem, k_minor=layout == "hv")
        here = row_tiles(tiles, config, count)
        epilogue = StoreEpilogue(config, dx_gmem)
        products.matmul(a, b, d_gmem.shape[1], here, config, epilogue)

    out_type = jax.ShapeDtypeStruct((t, h), jnp.float32)
    return launch(store_dx_kernel, (d, w, *counts), out_type, config, "store_dx")


def store_dw(
    dw: Ref, x, d, layout: Layout, first, size: int, unscale, config: Config, counts=()
) -> None:
    """``dw[:, first : first + size] = unscale * x^T @ d``; ``dw`` in the layout of ``w``.

    ``counts`` says how many tokens there are. ``x`` is 0 in those past it, and ``d`` is finite up
    to the end of the last step.
    """
    scale = () if unscale is None else (unscale.reshape(1),)

    def store_dw_kernel(first_gmem, x_gmem, d_gmem, *refs):
        count, (*scale_gmem, dw_gmem) = refs[: len(counts)], refs[len(counts) :]
        offset = {"col_offset" if layout == "hv" else "row_offset": first_gmem[0]}
        unscale_gmem = scale_gmem[0] if scale_gmem else None
        epilogue = StoreEpilogue(config, dw_gmem, unscale=unscale_gmem, **offset)
        _contract_tokens(x_gmem, d_gmem, layout, size, config, epilogue, count)

    operands = (_scalar(first), x, d, *counts, *scale)
    launch_in_place(store_dw_kernel, operands, dw, config, "store_dw")


def whole_dw(x, d, layout: Layout, dtype, config: Config, counts) -> jax.Array:
    """``store_dw`` of all columns of ``d``, as an array of its own in ``dtype``."""
    h, size = x.shape[1], d.shape[1]

    def whole_dw_kernel(x_gmem, d_gmem, count, dw_gmem):
        epilogue = StoreEpilogue(config, dw_gmem)
        _contract_tokens(x_gmem, d_gmem, layout, size, config, epilogue, (count,))

    out_type = jax.ShapeDtypeStruct((h, size) if layout == "hv" else (size, h), dtype)
    return launch(whole_dw_kernel, (x, d, *counts), out_type, config, "whole_dw")


def _contract_tokens(
    x: Ref, d: Ref, layout: Layout, size: int, config: Config, epilogue, count
) -> None:
    t, h = x.shape
    if count and config.tile_k != TILE_ROWS:
        raise ValueError(f"tokens that are counted on the device go by {TILE_ROWS}: {config}")
    x_side, d_side = hopper.Side(x, k_minor=False), hopper.Side(d, k_minor=False)
    a, b = (x_side, d_side) if layout == "hv" else (d_side, x_side)
    tiles = config.tiles(*((h, size) if layout == "hv" else (size, h)))
    products.matmul(a, b, count[0][0] if count else t, tiles, config, epilogue)


def _scalar(v) -> jax.Array:
    return jnp.full((1,), v, jnp.int32)
