"""The kernels: a tile is ``[1, block]`` of one row; the mathematics is ``losses``'."""

from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_loss._types import Rows
from pallas_loss._varying import shape_like
from pallas_loss.backends.rows import (
    RowOperands,
    RowProblem,
    Sums,
    factors_of,
    gradient_tile,
    slope_of,
    tiles_of,
)
from pallas_loss.losses import LogitFactors, RowFacts
from pallas_loss.tuning import TritonRowConfig


def sums(
    triton: ModuleType, problem: RowProblem, operands: RowOperands, config: TritonRowConfig
) -> Sums:
    """The sums of every row, a program each."""
    arrays = _arrays(problem, operands)
    out, treedef = _sums_out(problem, operands)
    vocab, factors = operands.logits.shape[1], _static_factors(problem, operands)

    def sums_kernel(*refs):
        ins, outs = _named(arrays, refs), refs[len(arrays) :]
        row = _Row(triton, problem, vocab, factors, config, ins, pl.program_id(0))
        for ref, v in zip(outs, jax.tree.leaves(row.sums()), strict=True):
            ref[pl.ds(row.row, 1)] = v

    made = _call(triton, sums_kernel, (len(operands.logits),), out, arrays, {}, config)
    return jax.tree.unflatten(treedef, made)


def sums_and_gradient(
    triton: ModuleType,
    problem: RowProblem,
    operands: RowOperands,
    g: Rows,
    inplace: bool,
    config: TritonRowConfig,
) -> tuple[Sums, jax.Array]:
    """Both, a program for each row."""
    arrays = _arrays(problem, operands) | {"g": g, "g_slope": g * slope_of(problem, operands)}
    out, treedef = _sums_out(problem, operands)
    vocab, factors = operands.logits.shape[1], _static_factors(problem, operands)

    def row_kernel(*refs):
        ins, (d_ref, *outs) = _named(arrays, refs), refs[len(arrays) :]
        row = _Row(triton, problem, vocab, factors, config, ins, pl.program_id(0))
        found = row.sums()
        for ref, v in zip(outs, jax.tree.leaves(found), strict=True):
            ref[pl.ds(row.row, 1)] = v
        d = problem.loss.dlogits(found, row.facts, row.read("g_slope"))
        blocks = pl.cdiv(vocab, config.block)

        def store(i, _):
            row.store_gradient(d_ref, blocks - 1 - i, d)

        lax.fori_loop(0, blocks, store, None)

    d_out = jax.ShapeDtypeStruct(operands.logits.shape, operands.logits.dtype)
    aliases = {0: 0} if inplace else {}
    grid = (len(operands.logits),)
    d, *made = _call(triton, row_kernel, grid, [d_out, *out], arrays, aliases, config)
    return jax.tree.unflatten(treedef, made), d


def gradient(
    triton: ModuleType,
    problem: RowProblem,
    operands: RowOperands,
    kept: Sums,
    g: Rows,
    inplace: bool,
    config: TritonRowConfig,
) -> jax.Array:
    """The gradient from kept sums, a program for each block of each row."""
    coefficients = problem.loss.dlogits(kept, operands.facts, g * slope_of(problem, operands))
    leaves, treedef = jax.tree.flatten(coefficients)
    names = [f"coefficient{i}" for i in range(len(leaves))]
    arrays = _arrays(problem, operands) | {"g": g} | dict(zip(names, leaves, strict=True))
    (t, vocab), factors = operands.logits.shape, _static_factors(problem, operands)

    def gradient_kernel(*refs):
        ins, d_ref = _named(arrays, refs), refs[len(arrays)]
        row = _Row(triton, problem, vocab, factors, config, ins, pl.program_id(0))
        d = jax.tree.unflatten(treedef, [row.read(name) for name in names])
        row.store_gradient(d_ref, pl.program_id(1), d)

    out = [jax.ShapeDtypeStruct((t, vocab), operands.logits.dtype)]
    aliases = {0: 0} if inplace else {}
    grid = (t, pl.cdiv(vocab, config.block))
    return _call(triton, gradient_kernel, grid, out, arrays, aliases, config)[0]


class _Row(NamedTuple):
    """One row as a program sees it."""

    triton: ModuleType
    problem: RowProblem
    vocab: int
    factors: tuple[LogitFactors, ...]  # None stands for those that are read
    config: TritonRowConfig
    refs: dict[str, Any]
    row: Any

    def read(self, name: str) -> jax.Array:
        """This row's value, ``[1]``."""
        return self.refs[name][pl.ds(self.row, 1)]

    @property
    def facts(self) -> RowFacts:
        return RowFacts(*(self.read(n) if n in self.refs else None for n in RowFacts._fields))

    def sums(self) -> Sums:
        """The sums over all blocks."""
        loss, moments = self.problem.loss, self.problem.moments
        labels = self.facts.labels

        # From no block on: JAX 0.12 refuses a slice that begins at a static 0 and is longer than
        # the row, masked or not.
        def add(i, found):
            tiles, cols, _, cw = self.tile(i)
            return loss.fold(found, tiles.z, tiles.t, cols, labels, moments, cw)

        blocks = pl.cdiv(self.vocab, self.config.block)
        return lax.fori_loop(0, blocks, add, loss.start(1, moments))

    def store_gradient(self, d_ref, block, coefficients) -> None:
        tiles, cols, live, cw = self.tile(block)
        d = gradient_tile(
            self.problem, coefficients, tiles, cols, self.facts.labels, cw, self.read("g")
        )
        here = d_ref.at[pl.ds(self.row, 1), pl.ds(block * self.config.block, self.config.block)]
        self.triton.store(here, d.astype(d_ref.dtype), mask=live)

    def tile(self, block):
        """``(tiles, columns, which are real, class weights)``."""
        size, vocab = self.config.block, self.vocab
        start = block * size
        cols = start + lax.broadcasted_iota(jnp.int32, (1, size), 1)
        live = cols < vocab
        load = self.triton.load
        row, here = pl.ds(self.row, 1), pl.ds(start, size)
        logits, target = (
            load(self.refs[n].at[row, here], mask=live, other=0.0) if n in self.refs else None
            for n in ("logits", "target")
        )
        factors = tuple(
            LogitFactors(*(
                self.refs[f"{n}.{k}"][pl.ds(0, 1)] if f"{n}.{k}" in self.refs else f
                for k, f in both._asdict().items()
            ))
            for n, both in enumerate(self.factors)
        )  # fmt: skip
        exact = None if vocab % size == 0 else live
        tiles = tiles_of(self.problem, logits, target, factors, live=exact)
        cw = None
        if "class_weights" in self.refs:
            cw = load(self.refs["class_weights"].at[here], mask=live[0], other=0.0)[None]
        elif exact is not None and "u" in self.problem.moments and target is None:
            cw = jnp.where(live, 1.0, 0.0)
        return tiles, cols, live, cw


def _static_factors(problem: RowProblem, operands: RowOperands) -> tuple[LogitFactors, ...]:
    """The factors with None for those that are traced."""
    return tuple(
        LogitFactors(*(f if isinstance(f, float) else None for f in both))
        for both in factors_of(problem, operands)
    )


def _arrays(problem: RowProblem, operands: RowOperands) -> dict[str, jax.Array]:
    """What a kernel reads, by name; the logits come first."""
    given = {"logits": operands.logits, "target": operands.target}
    given |= {"class_weights": operands.class_weights, "labels": operands.labels}
    given |= {"label_weight": operands.label_weight}
    traced = {
        f"{n}.{k}": jnp.reshape(f, (1,))
        for n, both in enumerate(factors_of(problem, operands))
        for k, f in both._asdict().items()
        if f is not None and not isinstance(f, float)
    }
    return {name: v for name, v in given.items() if v is not None} | traced


def _named(arrays: dict[str, jax.Array], refs) -> dict[str, Any]:
    return dict(zip(arrays, refs, strict=False))


def _sums_out(problem: RowProblem, operands: RowOperands):
    """The shapes of the sums' fields, and their tree."""
    fields, treedef = jax.tree.flatten(problem.loss.start(1, problem.moments))
    t = operands.logits.shape[0]
    return [jax.ShapeDtypeStruct((t,), f.dtype) for f in fields], treedef


def _call(triton, kernel, grid, out, arrays, aliases, config: TritonRowConfig):
    return pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=[shape_like(v, arrays) for v in out],
        input_output_aliases=aliases,
        compiler_params=triton.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=config.interpret,
        name=kernel.__name__,
    )(*arrays.values())
