"""How the warps of a block tell each other their sums: shared memory and a barrier.

Rows take turns at two places. A warpgroup posts row i+2 after it has read row i+1, which all have
posted by then, each after reading row i; so what it overwrites has been read by everyone.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_loss.backends.mosaic import compat
from pallas_loss.backends.mosaic.common import Ref
from pallas_loss.tuning import RowConfig

TURNS = 2
EXACT_COLUMNS = 1 << 24  # what is exchanged is float32
PLACES = 32  # as many as lanes that read them, and as a block has warps at most


@dataclass(frozen=True)
class Exchange:
    """``scratch`` is for ``pl.run_scoped``; ``out [T, fields, warps]`` gets what is posted."""

    config: RowConfig
    fields: int
    out: Ref

    @property
    def scratch(self) -> dict[str, Any]:
        return {
            "places": plgpu.SMEM((TURNS, self.fields, PLACES), jnp.float32),
            "posted": plgpu.Barrier(num_arrivals=self.config.warpgroups, num_barriers=TURNS),
        }

    def fill(self, refs: dict[str, Ref], wg, neutral: list[jax.Array]) -> None:
        """Fills the places that belong to no warp with what adds nothing, before any ``post``."""

        @pl.when(wg == 0)
        def _fill():
            for place in range(self.config.warps, PLACES, 4):
                for f, value in enumerate(neutral):
                    for turn in range(TURNS):
                        refs["places"].at[turn, f, pl.ds(place, 4)][...] = as_float(value)

    def post(self, refs: dict[str, Ref], i, row, wg, values: list[jax.Array]) -> None:
        """Makes known one value a warp for each field."""
        for f, value in enumerate(values):
            refs["places"].at[lax.rem(i, TURNS), f, pl.ds(wg * 4, 4)][...] = as_float(value)
        self.keep(row, wg, values)
        plgpu.commit_smem()  # JAX 0.11.2 has every thread arrive, but does not promise it
        plgpu.barrier_arrive(refs["posted"].at[lax.rem(i, TURNS)])

    def keep(self, row, wg, values: list[jax.Array]) -> None:
        """Writes them to global memory only."""
        for f, value in enumerate(values):
            compat.store_few(self.out.at[row, f, pl.ds(wg * 4, 4)], as_float(value))

    def read(self, refs: dict[str, Ref], i) -> list[jax.Array]:
        """Each field of all warps, ``[warps, 4]``: each warp of the warpgroup has its own copy.

        Waits until all have posted.
        """
        turn = lax.rem(i, TURNS)
        plgpu.barrier_wait(refs["posted"].at[turn])
        layout, of_lane = self._copies, self._copies.reduce((1,))

        def copies(f):
            values = plgpu.load(refs["places"].at[turn, f], layout=of_lane, optimized=False)
            shape = (PLACES, 4)
            return plgpu.layout_cast(lax.broadcast_in_dim(values, shape, (0,)), layout)

        return [copies(f) for f in range(self.fields)]

    @property
    def _copies(self):
        """A value a lane, a column a warp: reduced over lanes, without shared memory."""
        return plgpu.Layout.TILED(
            plgpu.Tiling(((PLACES, 4), (1,))), warp_dims=(-2,), lane_dims=(-3,), vector_dim=-1
        )


def as_float(value: jax.Array) -> jax.Array:
    """float32, which holds the number of every column of at most ``EXACT_COLUMNS``."""
    return value.astype(jnp.float32)
