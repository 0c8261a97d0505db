"""Losses from logits by Pallas's Triton lowering, for GPUs before Hopper."""

import importlib
from types import ModuleType

import jax.numpy as jnp

from pallas_loss import _device, tuning
from pallas_loss._errors import UnsupportedError
from pallas_loss._types import Array, Float, Rows, Scalar
from pallas_loss.backends import row_sweep
from pallas_loss.backends.rows import RowOperands, RowProblem, Sums
from pallas_loss.backends.triton import rows
from pallas_loss.tuning import TritonRowConfig, heuristics

_REMEDY = (
    "this JAX has no Triton lowering of Pallas (jax.experimental.pallas.triton); "
    "install JAX 0.11 or 0.12, or pass implementation='xla'"
)


def lowering() -> ModuleType:
    """``jax.experimental.pallas.triton``.

    Raises:
        UnsupportedError: this JAX has none.
    """
    try:
        return importlib.import_module("jax.experimental.pallas.triton")
    except ImportError as error:
        raise UnsupportedError(_REMEDY) from error


class RowTriton:
    """One program a row: its sums block by block, then its gradient in reverse order.

    What the second sweep reads first is what the first read last, and still in L2. Where rows are
    few, sums and gradient are two launches, the second with a program for each block.
    """

    name = "triton"

    def unsupported(self, problem: RowProblem, operands: RowOperands) -> str | None:
        try:
            lowering()
        except UnsupportedError as error:
            return str(error)
        chip = _device.current_chip()
        if not _config(operands).interpret and chip.platform not in ("gpu", "cuda"):
            return f"needs an NVIDIA GPU, not {chip.kind}"
        if operands.logits.size >= 2**31:
            return f"its offsets have 32 bits, and there are {operands.logits.size} logits"
        return None

    def sums(self, problem: RowProblem, operands: RowOperands) -> Sums:
        if operands.logits.shape[0] == 0:
            return problem.loss.start(0, problem.moments)
        return rows.sums(lowering(), problem, operands, _config(operands))

    def sums_and_gradient(
        self, problem: RowProblem, operands: RowOperands, g: Rows, inplace: bool
    ) -> tuple[Sums, Float[Array, "T V"]]:
        config = _config(operands)
        if operands.logits.shape[0] == 0:
            return problem.loss.start(0, problem.moments), jnp.zeros_like(operands.logits)
        if config.fused:
            return rows.sums_and_gradient(lowering(), problem, operands, g, inplace, config)
        sums = self.sums(problem, operands)
        return sums, self.gradient(problem, operands, sums, g, inplace)

    def dot_z(self, problem: RowProblem, operands: RowOperands, sums: Sums, g: Rows) -> Scalar:
        return row_sweep.dot_z(problem, operands, sums, g)

    def gradient(
        self, problem: RowProblem, operands: RowOperands, sums: Sums, g: Rows, inplace: bool
    ) -> Float[Array, "T V"]:
        if operands.logits.shape[0] == 0:
            return jnp.zeros_like(operands.logits)
        return rows.gradient(lowering(), problem, operands, sums, g, inplace, _config(operands))


def _config(operands: RowOperands) -> TritonRowConfig:
    t, v = operands.logits.shape
    return tuning.lookup(TritonRowConfig, lambda: heuristics.triton_rows(t, v))
