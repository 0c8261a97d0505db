"""Pallas kernels on the Mosaic GPU backend: logits live in registers and nowhere else."""

import jax
import jax.numpy as jnp

from pallas_loss import _device, tuning
from pallas_loss._types import Array, Float
from pallas_loss.backends import sweep
from pallas_loss.backends.base import LinearGradients, LinearOperands, LinearProblem, Wanted
from pallas_loss.backends.mosaic import compat, kernels
from pallas_loss.losses import DLogits
from pallas_loss.row_sums import RowSums
from pallas_loss.tuning import HopperConfig, heuristics


class MosaicGpu:
    """The recompute plan on Hopper.

    Forward: one kernel leaves the row sums of groups of column tiles, merged here. Backward: for
    each split of the vocabulary, a kernel writes d-logits ``[T, split]`` in the compute dtype, then
    ``dx += d w_split^T`` and ``dw_split = x^T d``.
    """

    name = "mosaic_gpu"

    def unsupported(self, problem: LinearProblem, operands: LinearOperands) -> str | None:
        if problem.compute_dtype not in (jnp.bfloat16, jnp.float16):
            return (
                f"its tensor cores have no {problem.compute_dtype.name}; "
                "pass compute_dtype=jnp.bfloat16"
            )
        chip = _device.current_chip()
        if chip.capability is None or chip.capability[0] != 9:
            return None if compat.interpreting() else f"needs a Hopper GPU (sm_90), not {chip.kind}"
        return None

    def row_sums(self, problem: LinearProblem, operands: LinearOperands) -> RowSums:
        t, _, v = operands.sizes(problem.layout)
        if t == 0:
            return RowSums.start(0, problem.moments)
        config = tuning.lookup(HopperConfig, heuristics.row_sums, "row_sums")
        return kernels.row_sums(
            problem, kernels.aligned(problem, operands), v, config
        ).merge_parts()

    def gradients(
        self,
        problem: LinearProblem,
        operands: LinearOperands,
        coefficients: DLogits,
        wanted: Wanted,
        unscale: Float[Array, ""] | None,
    ) -> LinearGradients:
        t, h, v = operands.sizes(problem.layout)
        hv = problem.layout == "hv"
        grads = LinearGradients(
            dx=jnp.zeros((t, h), jnp.float32) if wanted.dx else None,
            dw=jnp.zeros(operands.w.shape, operands.w.dtype) if wanted.dw else None,
            dbias=jnp.zeros((v,), jnp.float32) if wanted.dbias else None,
        )
        if t == 0:
            return grads
        config = tuning.lookup(HopperConfig, heuristics.dlogits, "dlogits")
        padded = kernels.aligned(problem, operands)

        def one_split(start, size, grads):
            width = size + -size % kernels.BOX_COLS
            d = kernels.dlogits(
                problem, padded, coefficients, v, start, width, width != size, config
            )[:t, :size]
            part = sweep.take_vocab(operands, problem.layout, start, size)
            dx, dw, dbias = sweep.tile_gradients(problem, part, d, wanted)
            if unscale is not None:
                dw, dbias = jax.tree.map(lambda g: g * unscale, (dw, dbias))
            return LinearGradients(
                dx=None if dx is None else grads.dx + dx,
                dw=None
                if dw is None
                else sweep.put(grads.dw, dw.astype(grads.dw.dtype), start, 1 if hv else 0),
                dbias=None if dbias is None else sweep.put(grads.dbias, dbias, start),
            )

        split = heuristics.vocab_split(t, h, v)
        grads = sweep.tiled(v, split, one_split, grads)
        if unscale is not None and grads.dx is not None:
            grads = grads._replace(dx=grads.dx * unscale)
        return grads
