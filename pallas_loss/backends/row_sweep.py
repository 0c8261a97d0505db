"""Losses from logits in XLA's own operations, some rows at a time.

What is live beside the logits and the gradient is one float32 tile of rows.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_loss import tuning
from pallas_loss._types import Rows, Scalar
from pallas_loss._varying import vary_like
from pallas_loss.backends.rows import (
    RowOperands,
    RowProblem,
    Sums,
    factors_of,
    gradient_tile,
    slope_of,
    tiles_of,
)
from pallas_loss.backends.sweep import put, tiled


def sums(problem: RowProblem, operands: RowOperands, rows: int) -> Sums:
    """The sums of every row, ``rows`` rows at a time."""
    t = operands.logits.shape[0]

    def some_rows(start, size, all_sums):
        part = take(operands, start, size)
        new = _sums(problem, part, _tile(problem, part))
        return jax.tree.map(lambda whole, part: put(whole, part, start), all_sums, new)

    return tiled(t, rows, some_rows, _no_sums(problem, operands))


def sums_and_gradient(
    problem: RowProblem, operands: RowOperands, g: Rows, inplace: bool, rows: int
):
    """The sums and the gradient, ``rows`` rows at a time; ``inplace``, over the logits."""
    t = operands.logits.shape[0]

    def some_rows(start, size, carry):
        all_sums, d = carry
        part = take(operands._replace(logits=d) if inplace else operands, start, size)
        tile = _tile(problem, part)
        new = _sums(problem, part, tile)
        here = _gradient(problem, part, tile, new, lax.dynamic_slice(g, (start,), (size,)))
        all_sums = jax.tree.map(lambda whole, part: put(whole, part, start), all_sums, new)
        return all_sums, put(d, here, start)

    start = _no_sums(problem, operands), _written_over(operands, inplace)
    return tiled(t, rows, some_rows, start)


def gradient(
    problem: RowProblem, operands: RowOperands, kept: Sums, g: Rows, inplace: bool, rows: int
):
    """The gradient from kept sums, ``rows`` rows at a time; ``inplace``, over the logits."""

    def some_rows(start, size, d):
        part = take(operands._replace(logits=d) if inplace else operands, start, size)
        here = jax.tree.map(lambda v: lax.dynamic_slice(v, (start,), (size,)), (kept, g))
        return put(d, _gradient(problem, part, _tile(problem, part), *here), start)

    return tiled(len(g), rows, some_rows, _written_over(operands, inplace))


def row_tile(operands: RowOperands) -> int:
    """As many rows as one tile of XLA's config has elements."""
    config = tuning.lookup(tuning.XlaConfig, tuning.XlaConfig)
    return max(config.token_tile * config.vocab_tile // operands.logits.shape[1], 1)


def dot_z(problem: RowProblem, operands: RowOperands, kept: Sums, g: Rows) -> Scalar:
    """``sum_t g_t sum_v z dloss_t/dz``, some rows at a time."""

    def some_rows(start, size, total):
        part = take(operands, start, size)
        here, g_here = jax.tree.map(lambda v: lax.dynamic_slice(v, (start,), (size,)), (kept, g))
        tiles, cols, cw = _tile(problem, part)
        d = problem.loss.dlogits(here, part.facts, g_here)
        d = problem.loss.tile(d, tiles.z, tiles.t, cols, part.labels, cw)
        live = (d != 0) & (g_here != 0)[:, None]
        return total + jnp.sum(jnp.where(live, d * tiles.z, 0.0))

    start = vary_like(jnp.zeros((), jnp.float32), operands)
    return tiled(len(g), row_tile(operands), some_rows, start)


def take(operands: RowOperands, start, size: int) -> RowOperands:
    """The operands of ``size`` rows from ``start`` on."""
    per_row = ("logits", "target", "labels", "label_weight", "ids")
    given = {n: v for n in per_row if (v := getattr(operands, n)) is not None}
    parts = {n: lax.dynamic_slice_in_dim(v, start, size) for n, v in given.items()}
    return operands._replace(**parts)


def _written_over(operands: RowOperands, inplace: bool) -> jax.Array:
    if inplace:
        return operands.logits
    return vary_like(jnp.zeros_like(operands.logits), operands)


def _no_sums(problem: RowProblem, operands: RowOperands) -> Sums:
    start = problem.loss.start(operands.logits.shape[0], problem.moments)
    return vary_like(start, operands)


def _tile(problem: RowProblem, part: RowOperands):
    """``(tiles, cols, class weights)`` of some rows, whole."""
    tiles = tiles_of(problem, part.logits, part.target, factors_of(problem, part))
    shape = tiles.z.shape
    cw = part.class_weights
    cw = None if cw is None else lax.broadcast_in_dim(cw, shape, (1,))
    return tiles, lax.broadcasted_iota(jnp.int32, shape, 1), cw


def _sums(problem: RowProblem, part: RowOperands, tile) -> Sums:
    tiles, cols, cw = tile
    none = _no_sums(problem, part)
    return problem.loss.fold(none, tiles.z, tiles.t, cols, part.labels, problem.moments, cw)


def _gradient(problem: RowProblem, part: RowOperands, tile, here: Sums, g: Rows):
    tiles, cols, cw = tile
    coefficients = problem.loss.dlogits(here, part.facts, g * slope_of(problem, part))
    d = gradient_tile(problem, coefficients, tiles, cols, part.labels, cw, g)
    return d.astype(part.logits.dtype)
