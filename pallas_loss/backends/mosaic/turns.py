"""Which tiles a block computes, one after the other, and how their operands get on the chip.

What the main loops of both chips share: blocks are persistent, and the loader of one runs over all
its tiles without a pause, as far ahead of the products as there are stages.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_loss.backends.mosaic.common import Config, Ref, cdiv


@dataclass(frozen=True)
class Turns:
    """An item is one row of tiles by one group of columns of them; blocks take turns at items.

    Scalars that are no ints are the kernel's.
    """

    config: Config
    cluster_rows: int | jax.Array  # rows of tiles, a cluster's at a time
    n_tiles: int
    groups: int
    k_steps: int | jax.Array
    stages: int

    @classmethod
    def of(
        cls, size_k: int | jax.Array, tiles: tuple[int | jax.Array, int], config: Config
    ) -> "Turns":
        """For ``tiles`` rows and columns of tiles and products ``size_k`` deep."""
        rows, n_tiles = tiles
        k_steps, stages = cdiv(size_k, config.tile_k), config.stages
        if isinstance(k_steps, int):
            stages = min(stages, max(k_steps * n_tiles, 1))
        groups = pl.cdiv(n_tiles, config.group)
        return cls(config, cdiv(rows, config.cluster), n_tiles, groups, k_steps, stages)

    def count(self) -> jax.Array:
        """Items of this block."""
        cluster, clusters = lax.axis_index("cluster"), lax.axis_size("cluster")
        return lax.div(self.cluster_rows * self.groups - cluster + clusters - 1, clusters)

    def item(self, i) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The block's ``i``-th: row of tiles, group, tiles of the group."""
        cluster, clusters = lax.axis_index("cluster"), lax.axis_size("cluster")
        config = self.config
        row, group = plgpu.planar_snake(
            cluster + i * clusters,
            (self.cluster_rows, self.groups),
            0 if config.snake_minor == "m" else 1,
            config.snake_width,
        )
        m = row * config.cluster + lax.axis_index("block")
        return m, group, jnp.minimum(self.n_tiles - group * config.group, config.group)

    def load(self, items, free: Ref, copy: Callable[..., None]) -> None:
        """``copy(m, n, k, slot)`` of every step of every tile, once ``free`` tells of its slot."""

        def load_item(i, step):
            m, group, tiles_here = self.item(i)

            def load_step(j, step):
                n = group * self.config.group + lax.div(j, self.k_steps)
                k = lax.rem(j, self.k_steps) * self.config.tile_k
                slot = lax.rem(step, self.stages)
                pl.when(step >= self.stages)(lambda: plgpu.barrier_wait(free.at[slot]))
                copy(m, n, k, slot)
                return step + 1

            return lax.fori_loop(0, tiles_here * self.k_steps, load_step, step)

        steps = lax.fori_loop(0, items, load_item, jnp.int32(0))

        # Nobody may still be about to arrive on a barrier when the block lets it go.
        @pl.loop(jnp.maximum(steps - self.stages, 0), steps)
        def _drain(step):
            plgpu.barrier_wait(free.at[lax.rem(step, self.stages)])
