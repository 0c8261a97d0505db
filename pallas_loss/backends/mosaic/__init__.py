"""Pallas kernels on the Mosaic GPU backend: logits live in registers and nowhere else."""

from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_loss import _device, tuning
from pallas_loss._types import Array, Candidates, Float, Rows
from pallas_loss._varying import vary_like
from pallas_loss.backends import exponentials, sweep
from pallas_loss.backends.base import (
    Backward,
    LinearGradients,
    LinearOperands,
    LinearProblem,
    Stored,
    Wanted,
)
from pallas_loss.backends.mosaic import compat, gemm, kernels
from pallas_loss.backends.mosaic.common import Config
from pallas_loss.losses import DLogits
from pallas_loss.row_sums import RowSums
from pallas_loss.tuning import BlackwellConfig, HopperConfig, blackwell, heuristics


class MosaicGpu:
    """The recompute plan on Hopper and on Blackwell, which differ in main loop and config alone.

    Forward: one kernel leaves the row sums of groups of column tiles, merged here. Backward: for
    each split of the vocabulary, a kernel writes d-logits ``[T, split]`` in the compute dtype, then
    ``dx += d w_split^T`` and ``dw_split = x^T d``.
    """

    name = "mosaic_gpu"
    prefers_in_forward = True
    skips_rows = True

    def unsupported(self, problem: LinearProblem, operands: LinearOperands) -> str | None:
        if problem.compute_dtype not in (jnp.bfloat16, jnp.float16):
            return (
                f"its tensor cores have no {problem.compute_dtype.name}; "
                "pass compute_dtype=jnp.bfloat16"
            )
        chip = _device.current_chip()
        if _capability_major() not in _CHIPS and not compat.interpreting():
            return (
                f"needs a Hopper GPU (sm_90) or a Blackwell B200 or B300 (sm_10x), not {chip.kind}"
            )
        return None

    @compat.in_32_bits
    def row_sums(self, problem: LinearProblem, operands: LinearOperands) -> RowSums:
        t, _, v = operands.sizes(problem.layout)
        if t == 0:
            return RowSums.start(0, problem.moments)
        # The sum that smoothing adds weighs the columns past the vocabulary by 0.
        weighed = v % 256 != 0 and "u" in problem.moments
        config = _config("row_sums", "row_sums", _extras(problem, operands) + weighed)
        parts, _ = kernels.row_sums(problem, kernels.aligned(problem, operands), v, config)
        return _computed(operands, parts.merge_parts())

    @compat.in_32_bits
    def store(self, problem: LinearProblem, operands: LinearOperands) -> tuple[RowSums, Stored]:
        t, _, v = operands.sizes(problem.layout)
        if t == 0:
            empty = Stored(jnp.zeros((0, v), jnp.bfloat16), jnp.zeros((1, 0), jnp.float32))
            return RowSums.start(0, problem.moments), empty
        config = _config("store", "dlogits", _extras(problem, operands))
        aligned = kernels.aligned(problem, operands)
        parts, stored = kernels.row_sums(problem, aligned, v, config, store=True)
        return _computed(operands, parts.merge_parts()), stored

    @compat.in_32_bits
    def exponentials(
        self, problem: LinearProblem, operands: LinearOperands, shift: Rows
    ) -> tuple[RowSums, Float[Array, "rows columns"]]:
        t, _, v = operands.sizes(problem.layout)
        if t == 0:
            start = RowSums.start(0, problem.moments, shift)
            return start, jnp.zeros((0, v), jnp.bfloat16)
        config = _config("exponentials", "exponentials", _extras(problem, operands))
        aligned = kernels.aligned(problem, operands)
        if operands.num_active is not None:
            # Every row, where XLA's products are to read them; those that are not there hold 0.
            every = _mostly_active(operands)
            aligned = aligned._replace(num_active=jnp.where(every, t, operands.num_active))
            shift = jnp.where(_active(operands), shift, kernels.FAR)
        parts, e = kernels.exponentials(problem, aligned, v, shift, config)
        sums = parts.merge_parts()._replace(z_label=operands.label_shift(shift))
        return _computed(operands, sums), e

    @compat.in_32_bits
    def from_exponentials(
        self,
        problem: LinearProblem,
        operands: LinearOperands,
        e: Float[Array, "rows columns"],
        coefficients: DLogits,
        wanted: Wanted,
        dw_dtype: jnp.dtype,
    ) -> LinearGradients:
        args = (problem, operands, e, coefficients)
        if operands.num_active is None or operands.sizes(problem.layout)[0] == 0:
            return exponentials.gradients(*args, wanted, dw_dtype)
        d, scale = exponentials.scaled_dlogits(*args)

        def product(wanted: Wanted) -> LinearGradients:
            args = (problem, operands, d, scale, wanted, dw_dtype)
            return lax.cond(
                _mostly_active(operands),
                lambda: exponentials.products(*args),
                lambda: _own_products(*args),
            )

        if _device.one_of_several():
            # Branches of their own: the sum of dx over devices goes on beside dw's product.
            dx = product(Wanted(wanted.dx, False, False)).dx
            dw = product(Wanted(False, wanted.dw, False)).dw
        else:  # each branch costs a round trip of the host
            dx, dw, _ = product(wanted)
        dbias = exponentials.sum_rows(problem, operands, d, scale) if wanted.dbias else None
        return LinearGradients(exponentials.scaled(dx, scale), dw, dbias)

    def candidate_logits(self, problem: LinearProblem, operands: LinearOperands) -> Candidates:
        return sweep.candidate_logits(problem, operands)

    @compat.in_32_bits
    def gradients(
        self, problem: LinearProblem, operands: LinearOperands, wanted: Wanted, backward: Backward
    ) -> LinearGradients:
        t, h, v = operands.sizes(problem.layout)
        padded = kernels.aligned(problem, operands)
        coefficients, unscale = backward.coefficients, backward.unscale
        if operands.num_active is not None:
            # What is left of the last tile must be finite in the products, and so 0 here.
            shift = jnp.where(_active(operands), coefficients.shift, kernels.FAR)
            backward = backward._replace(coefficients=coefficients._replace(shift=shift))
        dx = None
        if wanted.dx:
            dx = gemm.zero_dx(padded.x.shape, product_config("add_dx", *padded.x.shape))
        # Each split writes its part of dw: zeros would cost a write of V H elements.
        make = lax.empty if t else jnp.zeros
        dw = make(padded.w.shape, operands.w.dtype) if wanted.dw else None
        dbias = jnp.zeros((v,), jnp.float32) if wanted.dbias else None
        if t > 0:
            arrays = compat.untyped((padded, backward))
            run = partial(_sweep, problem, v, *arrays)
            grads = pl.run_state(run)(LinearGradients(dx, dw, dbias))
            dx, dw, dbias = vary_like(grads, operands, coefficients)
        if unscale is not None and dx is not None:
            dx = dx * unscale
        w_rows, w_cols = operands.w.shape
        return LinearGradients(
            dx=None if dx is None else dx[:t, :h],
            dw=None if dw is None else dw[:w_rows, :w_cols],
            dbias=dbias,
        )


# cuBLAS is 2 to 6% faster than the two products here that take a count (H200), and these are two
# thirds of the work: about what skipping one row in 32 saves.
_MOSTLY = 31 / 32


def _mostly_active(operands: LinearOperands) -> jax.Array:
    """Whether skipping the inactive rows would save less than the faster product of all."""
    return operands.num_active >= int(_MOSTLY * operands.x.shape[0])


def _active(operands: LinearOperands) -> jax.Array:
    return jnp.arange(operands.x.shape[0], dtype=jnp.int32) < operands.num_active


def _computed(operands: LinearOperands, sums: RowSums) -> RowSums:
    """``sums``; finite ones in the rows that no kernel may have written."""
    return sums if operands.num_active is None else sums.only(_active(operands))


def _own_products(
    problem: LinearProblem, operands: LinearOperands, d, scale, wanted: Wanted, dw_dtype
) -> LinearGradients:
    """``exponentials.products`` of the active rows; ``dx`` means nothing in the others."""
    t, h, v = operands.sizes(problem.layout)
    padded, counts = kernels.aligned(problem, operands), kernels.row_counts(operands)
    layout, size = problem.layout, d.shape[1]
    dx = dw = None
    if wanted.dx:
        config = product_config("add_dx", *padded.x.shape)
        dx = gemm.store_dx(d, padded.w, layout, config, counts)[:t, :h]
    if wanted.dw:
        x, width = padded.x, padded.x.shape[1]
        if scale is not None:
            x = exponentials.scaled(x.astype(jnp.float32), scale).astype(x.dtype)
        shape = (width, size) if layout == "hv" else (size, width)
        config = product_config("store_dw", *shape)
        dw = gemm.whole_dw(x, d, layout, dw_dtype, config, counts)
        dw = dw[:h, :v] if layout == "hv" else dw[:v, :h]
    return LinearGradients(dx, dw, None)


def _extras(problem: LinearProblem, operands: LinearOperands) -> int:
    """How much an epilogue does beside plain cross-entropy: it decides what fits in registers."""
    inputs = (operands.bias, operands.scale, operands.temperature)
    given = sum(v is not None for v in inputs) + (problem.transform.soft_cap is not None)
    # Class weights take a register a logit for as long as their sum takes.
    return given + len(problem.moments) + 3 * (operands.class_weights is not None)


# By the major compute capability: a kind of config, and the rules that choose one.
_CHIPS: dict[int, tuple[type, Any]] = {
    9: (HopperConfig, heuristics),
    10: (BlackwellConfig, blackwell),
}


def _capability_major() -> int | None:
    capability = _device.current_chip().capability
    return None if capability is None else capability[0]


def _chip() -> tuple[type, Any]:
    # The interpreter has no chip of its own, and plays a Hopper one.
    return _CHIPS.get(_capability_major() or 9, _CHIPS[9])


def _config(role: str, rule: str, *about) -> Config:
    """The config of the kernel ``role``; ``rule`` names the function that chooses it."""
    kind, rules = _chip()
    return tuning.lookup(kind, partial(getattr(rules, rule), *about), role)


def product_config(role: str, rows: int, cols: int) -> Config:
    """The config of the kernel ``role``, whose output is ``[rows, cols]``."""
    return _config(role, "product", rows, cols, _device.num_multiprocessors())


def _sweep(
    problem,
    vocab,
    operands,
    backward: Backward,
    grads: LinearGradients,
) -> None:
    """Adds to the gradients, given as refs, split by split; ``operands`` are aligned."""
    coefficients, unscale, stored, at_candidates = backward
    t, h = operands.x.shape
    layout = problem.layout
    extras = _extras(problem, operands) + sum(c is not None for c in coefficients[3:])
    dlogits_config = _config("dlogits", "dlogits", extras)
    marked = kernels.marked_slices(operands, vocab, dlogits_config)
    counts = kernels.row_counts(operands)

    def one_split(start, size, carry):
        width = size + -size % kernels.BOX_COLS
        mask = width != size
        if stored is None:
            args = (problem, operands, coefficients, marked, vocab, start, width, mask)
            d = kernels.dlogits(*args, dlogits_config)
        else:
            d = _stored_dlogits(problem, operands, coefficients, stored, start, size, width)
        if at_candidates is not None:
            d = sweep.add_candidates(d, operands.candidates, at_candidates, start)
        if grads.dx is not None:
            config = product_config("add_dx", t, h)
            gemm.add_dx(grads.dx, d, operands.w, layout, start, width, config, counts)
        if grads.dw is not None:
            config = product_config("store_dw", *((h, width) if layout == "hv" else (width, h)))
            args = (operands.x, d, layout, start, width, unscale, config, counts)
            gemm.store_dw(grads.dw, *args)
        if grads.dbias is not None:
            if counts:
                d = jnp.where(_active(operands)[:, None], d, 0)
            dbias = jnp.sum(d, axis=0, dtype=jnp.float32)[:size]
            grads.dbias[pl.ds(start, size)] = dbias if unscale is None else dbias * unscale
        return carry

    def product_time(rows: int, cols: int) -> float:
        return _chip()[1].product_time(rows, cols, _device.num_multiprocessors())

    split = heuristics.vocab_split(t, h, vocab, product_time, problem.lean)
    if split != vocab and split % dlogits_config.epilogue_n:
        raise ValueError(f"epilogue_n must divide the vocabulary split {split}: {dlogits_config}")
    sweep.tiled(vocab, split, one_split, ())


def _stored_dlogits(problem, operands, coefficients, stored, start, size, width) -> jax.Array:
    """What ``kernels.dlogits`` gives, from what the forward kept: one pass of XLA's."""
    t = operands.labels.shape[0]
    tile = sweep.take_vocab(operands, problem.layout, start, size)._replace(x=operands.x[:t])
    d = sweep.dlogits(problem, tile, coefficients, start, sweep.take_slices(stored, start, size))
    padding = ((0, operands.x.shape[0] - t), (0, width - size))
    return jnp.pad(d.astype(problem.compute_dtype), padding)
