"""How the warps that share a row tell each other their sums.

Within a block: shared memory and a barrier. Between the blocks of a cluster a warpgroup of its own,
the messenger, carries them: it stores its block's sums to global memory (TMA), waits until they
have arrived there, meets the other blocks' messengers at a cluster barrier and loads all sums back
(TMA). So every step of the way is ordered by a completed copy or by a barrier, no thread relies on
the order of plain stores, and the computing warpgroups are not held up.

Rows take turns at ``TURNS`` places. A warpgroup posts row i before it reads row i-1, and has read
row i-2 by then; so what it overwrites, row i-4, has been read by everyone.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_loss.backends.mosaic.common import Ref
from pallas_loss.tuning import RowConfig

TURNS, LANES = 4, 32


def padded_fields(fields: int, config: RowConfig) -> int:
    """The fields of one row in whole 128 bytes, where a copy may begin."""
    per_128_bytes = max(32 // config.warps, 1)
    return fields + -fields % per_128_bytes


@dataclass(frozen=True)
class Exchange:
    """``scratch`` is for ``pl.run_scoped``; ``out [T, fields, warps of the cluster]``."""

    config: RowConfig
    fields: int
    out: Ref

    @property
    def places(self) -> int:
        """Places in a row of ``mine``: at least one a lane where they are read from there."""
        return max(self.config.warps, LANES if self.config.cluster == 1 else 0)

    @property
    def everyone(self) -> int:
        """Warps that share a row, and the empty places among them."""
        return self.places * self.config.cluster

    @property
    def scratch(self) -> dict[str, Any]:
        config, fields = self.config, padded_fields(self.fields, self.config)
        of_block = plgpu.SMEM((TURNS, fields, self.places), jnp.float32)
        posted = plgpu.Barrier(num_arrivals=config.warpgroups, num_barriers=TURNS)
        if config.cluster == 1:
            return {"mine": of_block, "posted": posted}
        return {
            "mine": of_block,
            "posted": posted,
            "met": plgpu.ClusterBarrier(
                collective_axes=("block",), num_arrivals=1, num_barriers=TURNS
            ),
            "everyones": plgpu.SMEM((TURNS, fields, self.everyone), jnp.float32),
            "delivered": plgpu.Barrier(num_arrivals=1, num_barriers=TURNS),
        }

    def fill(self, refs: dict[str, Ref], wg, neutral: list[jax.Array]) -> None:
        """Fills the places that belong to no warp with what adds nothing, before any ``post``."""

        @pl.when(wg == 0)
        def _fill():
            for place in range(self.config.warps, self.places, 4):
                for f, value in enumerate(neutral):
                    for turn in range(TURNS):
                        refs["mine"].at[turn, f, pl.ds(place, 4)][...] = value

    def post(self, refs: dict[str, Ref], i, row, wg, values: list[jax.Array]) -> None:
        """Makes known one value a warp for each field."""
        here = pl.ds(wg * 4, 4)
        for f, value in enumerate(values):
            refs["mine"].at[lax.rem(i, TURNS), f, here][...] = value
            if self.config.cluster == 1:
                self.out.at[row, f, here][...] = value
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs["posted"].at[lax.rem(i, TURNS)])

    def read(self, refs: dict[str, Ref], i) -> list[jax.Array]:
        """Each field of all warps, in the order of their columns, ``[warps, 4]``: each warp of the
        warpgroup has its own copy. Waits until all have posted."""
        turn = lax.rem(i, TURNS)
        alone = self.config.cluster == 1
        plgpu.barrier_wait(refs["posted" if alone else "delivered"].at[turn])
        everyones = refs["mine" if alone else "everyones"]
        layout, of_lane = self._copies, self._copies.reduce((1,))

        def copies(f):
            values = plgpu.load(everyones.at[turn, f], layout=of_lane, optimized=False)
            shape = (self.everyone, 4)
            return plgpu.layout_cast(lax.broadcast_in_dim(values, shape, (0,)), layout)

        return [copies(f) for f in range(self.fields)]

    def carry(self, refs: dict[str, Ref], i, row) -> None:
        """The messenger's part in row ``i``."""
        turn, warps = lax.rem(i, TURNS), self.config.warps
        block = lax.axis_index("block")
        plgpu.barrier_wait(refs["posted"].at[turn])
        plgpu.copy_smem_to_gmem(
            refs["mine"].at[turn],
            self.out.at[row, :, pl.ds(pl.multiple_of(block * warps, warps), warps)],
        )
        plgpu.wait_smem_to_gmem(0)
        plgpu.barrier_arrive(refs["met"].at[turn])
        plgpu.barrier_wait(refs["met"].at[turn])
        plgpu.copy_gmem_to_smem(
            self.out.at[row], refs["everyones"].at[turn], refs["delivered"].at[turn]
        )

    @property
    def _copies(self):
        """A value a lane, a column a warp: reduced over lanes, without shared memory."""
        return plgpu.Layout.TILED(
            plgpu.Tiling(((LANES, 4), (1,))), warp_dims=(-2,), lane_dims=(-3,), vector_dim=-1
        )
