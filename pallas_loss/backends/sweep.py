"""A sweep over tiles of tokens and vocabulary in ``lax`` loops, in memory independent of V.

A ragged last tile is a call of its own with its live size: no operand is padded or copied.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_loss import tuning
from pallas_loss._types import Candidates, Layout, Rows, Tile
from pallas_loss._varying import vary_like
from pallas_loss.backends.base import (
    Backward,
    LinearGradients,
    LinearOperands,
    LinearProblem,
    Stored,
    Wanted,
)
from pallas_loss.losses import DLogits
from pallas_loss.row_sums import RowSums, shifted


def row_sums(problem: LinearProblem, operands: LinearOperands, config: tuning.XlaConfig) -> RowSums:
    """The sums of every row, tile by tile."""
    t, _, v = operands.sizes(problem.layout)

    def token_tile(start, size, sums):
        part = take_tokens(operands, start, size)

        def vocab_tile(v_start, v_size, acc):
            tile = take_vocab(part, problem.layout, v_start, v_size)
            z, _ = logits(problem, tile)
            return acc.fold(
                z, cols_from(z, v_start), tile.labels, problem.moments, class_weights_of(tile, z)
            )

        acc = vary_like(RowSums.start(size, problem.moments), operands)
        acc = tiled(v, config.vocab_tile, vocab_tile, acc)
        return jax.tree.map(lambda all_, new: put(all_, new, start), sums, acc)

    start = vary_like(RowSums.start(t, problem.moments), operands)
    return tiled(t, config.token_tile, token_tile, start)


def store(
    problem: LinearProblem, operands: LinearOperands, config: tuning.XlaConfig
) -> tuple[RowSums, Stored]:
    """``row_sums``, and ``e^(z - m)`` with one ``m`` a row and vocabulary tile."""
    t, _, v = operands.sizes(problem.layout)
    width = min(config.vocab_tile, v)
    slices = -(-v // width)
    stored = Stored(
        e=jnp.zeros((t, slices * width), jnp.bfloat16), m=jnp.zeros((slices, t), jnp.float32)
    )

    def vocab_tile(v_start, v_size, carry):
        part = take_vocab(operands, problem.layout, v_start, v_size)

        def token_tile(start, size, carry):
            sums, stored = carry
            tile = take_tokens(part, start, size)
            z, _ = logits(problem, tile)
            cols, labels = cols_from(z, v_start), tile.labels
            new = RowSums.of_tile(z, cols, labels, problem.moments, class_weights_of(tile, z))
            acc = jax.tree.map(lambda v: _take(v, start, size), sums).merge(new)
            e = jnp.exp(shifted(z, new.m)).astype(stored.e.dtype)
            stored = Stored(
                e=lax.dynamic_update_slice(stored.e, e, (start, v_start)),
                m=lax.dynamic_update_slice(stored.m, new.m[None], (v_start // width, start)),
            )
            return jax.tree.map(lambda all_, v: put(all_, v, start), sums, acc), stored

        return tiled(t, config.token_tile, token_tile, carry)

    start = RowSums.start(t, problem.moments)
    return tiled(v, width, vocab_tile, vary_like((start, stored), operands))


def exponentials(
    problem: LinearProblem, operands: LinearOperands, shift: Rows, config: tuning.XlaConfig
) -> tuple[RowSums, jax.Array]:
    """``row_sums`` relative to ``shift``, and ``[T, V]`` of ``e^(z - shift)`` times ``chain``."""
    t, _, v = operands.sizes(problem.layout)

    def token_tile(start, size, carry):
        part, here = take_tokens(operands, start, size), _take(shift, start, size)

        def vocab_tile(v_start, v_size, carry):
            acc, kept = carry
            tile = take_vocab(part, problem.layout, v_start, v_size)
            z, tanh = logits(problem, tile)
            cols, cw = cols_from(z, v_start), class_weights_of(tile, z)
            new, e = RowSums.of_exponentials(z, here, cols, tile.labels, problem.moments, cw)
            e = problem.transform.chain(e, tanh).astype(kept.dtype)
            return acc.merge(new), lax.dynamic_update_slice(kept, e, (start, v_start))

        sums, kept = carry
        acc = vary_like(RowSums.start(size, problem.moments, here), operands)
        acc, kept = tiled(v, config.vocab_tile, vocab_tile, (acc, kept))
        return jax.tree.map(lambda all_, new: put(all_, new, start), sums, acc), kept

    start = RowSums.start(t, problem.moments, shift)
    kept = jnp.zeros((t, v), problem.exponentials_dtype)
    start, kept = vary_like((start, kept), operands)
    sums, kept = tiled(t, config.token_tile, token_tile, (start, kept))
    return sums._replace(z_label=operands.label_shift(shift)), kept


def gradients(
    problem: LinearProblem,
    operands: LinearOperands,
    wanted: Wanted,
    backward: Backward,
    config: tuning.XlaConfig,
) -> LinearGradients:
    """The wanted gradients. Each tile of logits is formed again, each of ``dw`` written once."""
    coefficients, unscale, stored, at_candidates = backward
    t, h, v = operands.sizes(problem.layout)
    w = operands.w
    zeros = jnp.zeros
    grads = LinearGradients(
        dx=zeros((t, h), jnp.float32) if wanted.dx else None,
        dw=zeros(w.shape, w.dtype) if wanted.dw else None,
        dbias=zeros((v,), jnp.float32) if wanted.dbias else None,
    )
    grads = vary_like(grads, operands, coefficients)
    done = lambda acc, dtype: (acc if unscale is None else acc * unscale).astype(dtype)  # noqa: E731

    def vocab_tile(v_start, v_size, grads):
        part = take_vocab(operands, problem.layout, v_start, v_size)
        kept = None if stored is None else take_slices(stored, v_start, v_size)
        shape = (h, v_size) if problem.layout == "hv" else (v_size, h)
        acc = LinearGradients(
            dx=grads.dx,
            dw=zeros(shape, jnp.float32) if wanted.dw else None,
            dbias=zeros((v_size,), jnp.float32) if wanted.dbias else None,
        )
        acc = vary_like(acc, operands, coefficients)

        def token_tile(start, size, acc):
            tile = take_tokens(part, start, size)
            c = jax.tree.map(lambda r: _take(r, start, size), coefficients)
            here = None if kept is None else take_rows(kept, start, size)
            d = dlogits(problem, tile, c, v_start, here)
            if at_candidates is not None:
                d = add_candidates(d, tile.candidates, _take(at_candidates, start, size), v_start)
            dx, dw, dbias = tile_gradients(problem, tile, d, wanted)
            return LinearGradients(
                dx=None if dx is None else put(acc.dx, _take(acc.dx, start, size) + dx, start),
                dw=None if dw is None else acc.dw + dw,
                dbias=None if dbias is None else acc.dbias + dbias,
            )

        acc = tiled(t, config.token_tile, token_tile, acc)
        axis = 1 if problem.layout == "hv" else 0
        return LinearGradients(
            dx=acc.dx,
            dw=None if acc.dw is None else put(grads.dw, done(acc.dw, w.dtype), v_start, axis),
            dbias=None
            if acc.dbias is None
            else put(grads.dbias, done(acc.dbias, jnp.float32), v_start),
        )

    grads = tiled(v, config.vocab_tile, vocab_tile, grads)
    return grads._replace(dx=None if grads.dx is None else done(grads.dx, jnp.float32))


def logits(problem: LinearProblem, tile: LinearOperands) -> tuple[Tile, Tile | None]:
    """``transform(x @ w + b)`` of the whole of ``tile``, float32, and the soft cap's tanh."""
    raw = dot(tile.x, tile.w, problem, (1, 0 if problem.layout == "hv" else 1))
    if tile.bias is not None:
        raw = raw + tile.bias.astype(jnp.float32)[None, :]
    return problem.transform(raw, problem.transform.factors(tile.scale, tile.temperature))


def candidate_logits(problem: LinearProblem, operands: LinearOperands) -> jax.Array:
    """``z`` at each row's candidates, float32 ``[T, K]``: a gather of ``w`` and a dot."""
    return logits_at(problem, operands, operands.candidates)


def logits_at(problem: LinearProblem, operands: LinearOperands, columns: Candidates) -> Candidates:
    """``z`` at K columns a row; a negative one is taken for 0.

    Rows go by in chunks whose gathered weights take at most 256 MiB.
    """
    t, h, _ = operands.sizes(problem.layout)
    k = columns.shape[1]
    by = problem.transform.factors(operands.scale, operands.temperature)
    axis = 1 if problem.layout == "hv" else 0
    chunk = max(1, (128 << 20) // (k * h))

    def token_tile(start, size, z):
        ids = jnp.maximum(_take(columns, start, size), 0)
        w = jnp.take(operands.w, ids, axis=axis)  # [H, t, K] or [t, K, H]
        w = jnp.moveaxis(w, 0, -1) if axis else w
        raw = lax.dot_general(
            _take(operands.x, start, size).astype(problem.compute_dtype),
            w.astype(problem.compute_dtype),
            (((1,), (2,)), ((0,), (0,))),
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
        if operands.bias is not None:
            raw = raw + operands.bias.astype(jnp.float32)[ids]
        here = jax.tree.map(lambda f: _take(f, start, size) if jnp.ndim(f) else f, by)
        return put(z, problem.transform(raw, here)[0], start)

    start = vary_like(jnp.zeros((t, k), jnp.float32), operands)
    return tiled(t, chunk, token_tile, start)


def add_candidates(d: Tile, candidates, g, v_start) -> Tile:
    """``d`` with ``g`` added at the candidates' columns; a candidate named twice counts twice."""
    row = lax.broadcasted_iota(jnp.int32, candidates.shape, 0)
    # Past the end of a row a column is dropped; a negative one would wrap.
    col = jnp.where(candidates < v_start, d.shape[1], candidates - v_start)
    return d.at[row, col].add(g.astype(d.dtype), mode="drop")


def stored_logits(
    problem: LinearProblem, tile: LinearOperands, stored: Stored, size: int
) -> tuple[Tile, Tile | None]:
    """What ``logits`` gives, from what was stored of ``tile``'s rows and ``size`` columns."""
    z = jnp.log(stored.e.astype(jnp.float32))
    z = z + jnp.repeat(stored.m.T, stored.width, axis=1)
    by = problem.transform.factors(tile.scale, tile.temperature)
    if by.outer is None:
        return z[:, :size], None
    outer = jnp.broadcast_to(by.outer, tile.labels.shape)[:, None]
    # What underflowed when it was stored comes back as -inf, and tanh must not.
    return z[:, :size], jnp.clip(z / outer, -1.0, 1.0)[:, :size]


def dlogits(
    problem: LinearProblem,
    tile: LinearOperands,
    c: DLogits,
    v_start,
    stored: Stored | None = None,
) -> Tile:
    """d-logits of the whole of ``tile``, float32; from what was ``stored`` of it, if anything."""
    size = tile.sizes(problem.layout)[2]
    if stored is None:
        z, tanh = logits(problem, tile)
    else:
        z, tanh = stored_logits(problem, tile, stored, size)
    dz = c.tile(z, cols_from(z, v_start), tile.labels, class_weights_of(tile, z))
    return problem.transform.chain(dz, tanh)


def tile_gradients(
    problem: LinearProblem, tile: LinearOperands, d: Tile, wanted: Wanted
) -> LinearGradients:
    """The three products of d-logits, accumulated in float32."""
    hv = problem.layout == "hv"
    return LinearGradients(
        dx=dot(d, tile.w, problem, (1, 1 if hv else 0)) if wanted.dx else None,
        dw=None
        if not wanted.dw
        else dot(tile.x, d, problem, (0, 0))
        if hv
        else dot(d, tile.x, problem, (0, 0)),
        dbias=jnp.sum(d, axis=0, dtype=jnp.float32) if wanted.dbias else None,
    )


def take_tokens(operands: LinearOperands, start, size: int) -> LinearOperands:
    """The rows ``start : start + size`` of every operand that has rows."""
    temperature = operands.temperature
    if temperature is not None and jnp.ndim(temperature) == 1:
        temperature = _take(temperature, start, size)
    return operands._replace(
        x=_take(operands.x, start, size),
        labels=_take(operands.labels, start, size),
        temperature=temperature,
        candidates=None if operands.candidates is None else _take(operands.candidates, start, size),
        counted=None if operands.counted is None else _take(operands.counted, start, size),
        num_active=None
        if operands.num_active is None
        else jnp.clip(operands.num_active - start, 0, size),
    )


def take_per_row[Tree](tree: Tree, start, size: int) -> Tree:
    """The rows ``start : start + size`` of the arrays in it; scalars as they are."""
    return jax.tree.map(lambda v: _take(v, start, size) if jnp.ndim(v) else v, tree)


def take_vocab(operands: LinearOperands, layout: Layout, start, size: int) -> LinearOperands:
    """The columns ``start : start + size`` of every operand that has columns."""
    take = lambda v: None if v is None else _take(v, start, size)  # noqa: E731
    return operands._replace(
        w=_take(operands.w, start, size, axis=1 if layout == "hv" else 0),
        bias=take(operands.bias),
        class_weights=take(operands.class_weights),
    )


def take_slices(stored: Stored, start, size: int) -> Stored:
    """The whole slices that hold the columns ``start : start + size``; ``start`` begins one."""
    slices = -(-size // stored.width)
    return Stored(
        e=_take(stored.e, start, slices * stored.width, axis=1),
        m=_take(stored.m, start // stored.width, slices),
    )


def take_rows(stored: Stored, start, size: int) -> Stored:
    """The rows ``start : start + size``."""
    return Stored(e=_take(stored.e, start, size), m=_take(stored.m, start, size, axis=1))


def tiled[Carry](
    n: int, tile: int, body: Callable[..., Carry], carry: Carry, live: jax.Array | None = None
) -> Carry:
    """``carry = body(start, size, carry)`` over tiles of ``n``; ``size`` is static.

    Tiles that begin at or past ``live`` are skipped.
    """
    full, rest = divmod(n, tile)
    rounds = full if live is None else jnp.minimum((live + tile - 1) // tile, full)
    if full == 1 and live is None:
        carry = body(0, tile, carry)
    elif full > 0:
        carry = lax.fori_loop(0, rounds, lambda i, c: body(i * tile, tile, c), carry)
    if rest and live is not None:
        # A loop, for a branch would copy.
        rounds = jnp.where(live > full * tile, 1, 0)
        return lax.fori_loop(0, rounds, lambda _, c: body(full * tile, rest, c), carry)
    return body(full * tile, rest, carry) if rest else carry


def dot(a, b, problem: LinearProblem, contract: tuple[int, int], dtype=jnp.float32):
    """A product in the compute dtype, accumulated in float32, returned in ``dtype``."""
    # float32 is computed in float32: a GPU's default for it would be TF32.
    return lax.dot_general(
        a.astype(problem.compute_dtype),
        b.astype(problem.compute_dtype),
        (((contract[0],), (contract[1],)), ((), ())),
        precision=lax.Precision.HIGHEST if problem.compute_dtype == jnp.float32 else None,
        preferred_element_type=dtype,
    )


def cols_from(z: Tile, start) -> jax.Array:
    """The column of each element of a tile that begins at ``start``."""
    return lax.broadcasted_iota(jnp.int32, z.shape, 1) + jnp.int32(start)


def class_weights_of(tile: LinearOperands, z: Tile) -> Tile | None:
    """Those of the columns of ``tile``, if there are any."""
    cw = tile.class_weights
    return None if cw is None else lax.broadcast_in_dim(cw.astype(jnp.float32), z.shape, (1,))


def _take(v, start, size: int, axis: int = 0):
    if size == v.shape[axis]:
        return v
    return lax.dynamic_slice_in_dim(v, start, size, axis)


def put(whole, part, start, axis: int = 0):
    """``whole`` with ``part`` written at ``start`` along ``axis``."""
    if part.shape == whole.shape:
        return part
    return lax.dynamic_update_slice_in_dim(whole, part, start, axis)
