"""The launches: pads what must be whole tiles, names the inputs, calls the main loop."""

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp

from pallas_loss._types import Rows
from pallas_loss.backends.base import LinearOperands, LinearProblem, Stored
from pallas_loss.backends.mosaic import hopper, products
from pallas_loss.backends.mosaic.common import Config, Ref, launch, row_tiles
from pallas_loss.backends.mosaic.epilogues import (
    FACTORS,
    DLogitsEpilogue,
    ExponentialsEpilogue,
    LogitTiles,
    RowSumsEpilogue,
    StoringEpilogue,
)
from pallas_loss.losses import DLogits
from pallas_loss.row_sums import RowSums

# A TMA copy moves swizzled 8 x 64 boxes, and an array must hold whole ones.
BOX_ROWS, BOX_COLS = 8, 64
FAR = 3e38  # a shift that makes 0 of any exponential


def aligned(problem: LinearProblem, operands: LinearOperands) -> LinearOperands:
    """``x`` and ``w`` in the compute dtype, padded with zeros to whole boxes.

    Nothing is copied where T is a multiple of 8, H one of 64, V one of 8 (of 64 in the layout
    ``"hv"``) and the dtype agrees. A padded ``w`` costs a copy of it: V H 2 bytes and the time to
    move twice as many.
    """
    pad = lambda a, m, n: jnp.pad(  # noqa: E731
        a.astype(problem.compute_dtype), ((0, -a.shape[0] % m), (0, -a.shape[1] % n))
    )
    w_rows = BOX_COLS if problem.layout == "hv" else BOX_ROWS
    return operands._replace(
        x=pad(operands.x, BOX_ROWS, BOX_COLS), w=pad(operands.w, w_rows, BOX_COLS)
    )


def row_counts(operands: LinearOperands) -> tuple[jax.Array, ...]:
    """How many rows the kernels compute at least, ``[1]``, or nothing where they compute all.

    One row at least, so that every sum has a term; the rows past ``num_active`` are 0.
    """
    if operands.num_active is None:
        return ()
    return (jnp.maximum(operands.num_active, 1).astype(jnp.int32).reshape(1),)


def marked_slices(operands: LinearOperands, vocab: int, config: Config) -> jax.Array:
    """Which slices of a warpgroup's tiles hold a label or pass the vocabulary's end.

    int32 by row and column of slices, for every column that a launch over a split may reach.
    """
    rows, cols = config.tiles(operands.labels.shape[0], vocab)
    slices = jnp.arange((cols + 1) * config.block_n // config.epilogue_n)
    past = (slices >= vocab // config.epilogue_n).astype(jnp.int32)
    marks = jnp.broadcast_to(past, (rows * config.block_m // config.tile_m, slices.size))
    row = jnp.arange(operands.labels.shape[0], dtype=jnp.int32) // config.tile_m
    # A label that no column matches, -1, marks the last slice, which has no column either.
    return marks.at[row, operands.labels // config.epilogue_n].set(1)


def row_sums(
    problem: LinearProblem,
    operands: LinearOperands,
    vocab: int,
    config: Config,
    store: bool = False,
) -> tuple[RowSums, Stored | None]:
    """The sums of groups of column tiles, each field ``[parts, T]``; ``operands`` are aligned.

    ``store`` also keeps ``e^(z - m)``, with one ``m`` for each slice of the epilogue.
    """
    t = operands.labels.shape[0]
    tiles = config.tiles(t, vocab)
    mask = vocab % config.block_n != 0
    marked = marked_slices(operands, vocab, config)
    inputs = _Inputs(problem, operands, config, tiles, vocab, mask, marked)

    treedef, out_type = _sums_type(RowSums.start(0, problem.moments), tiles, config)
    num_fields = len(out_type)
    if store:
        columns = tiles[1] * config.block_n
        slices = (columns // config.epilogue_n, tiles[0] * config.block_m)
        of = jax.ShapeDtypeStruct
        out_type += [of((operands.x.shape[0], columns), jnp.bfloat16), of(slices, jnp.float32)]

    def row_sums_kernel(*refs):
        x, w, logit_tiles, here, out = inputs.unpack(refs)
        sums, kept = out[:num_fields], out[num_fields:]
        epilogue = RowSumsEpilogue(logit_tiles, jax.tree.unflatten(treedef, sums))
        if kept:
            epilogue = StoringEpilogue(epilogue, *kept)
        products.matmul(*_sides(problem, x, w), x.shape[1], here, config, epilogue)

    name = "store" if store else "row_sums"
    out = launch(row_sums_kernel, inputs.arrays, tuple(out_type), config, name)
    sums = jax.tree.unflatten(treedef, [v[:, :t] for v in out[:num_fields]])
    if not store:
        return sums, None
    e, m = out[num_fields:]
    return sums, Stored(e[:t], m[:, :t])


def exponentials(
    problem: LinearProblem,
    operands: LinearOperands,
    vocab: int,
    shift: Rows,
    config: Config,
) -> tuple[RowSums, jax.Array]:
    """``row_sums`` relative to ``shift``, but for ``z_label``, and ``e^(z - shift)``.

    The exponentials are ``[T, V]`` rounded up to whole boxes, 0 or finite past the real T and V.
    """
    t = operands.labels.shape[0]
    tiles = config.tiles(t, vocab)
    mask = vocab % config.block_n != 0
    marked = marked_slices(operands, vocab, config)
    inputs = _Inputs(problem, operands, config, tiles, vocab, mask, marked, shift=shift)
    # The shift is known, and so is what it makes of z_label.
    start = RowSums.start(0, problem.moments, shift[:0])._replace(m=None, z_label=None)
    treedef, out_type = _sums_type(start, tiles, config)
    columns = vocab + -vocab % BOX_COLS
    e_type = jax.ShapeDtypeStruct((operands.x.shape[0], columns), jnp.bfloat16)

    def exponentials_kernel(*refs):
        x, w, logit_tiles, here, (*sums, e) = inputs.unpack(refs)
        epilogue = RowSumsEpilogue(logit_tiles, jax.tree.unflatten(treedef, sums))
        epilogue = ExponentialsEpilogue(epilogue, e)
        products.matmul(*_sides(problem, x, w), x.shape[1], here, config, epilogue)

    out_type = (*out_type, e_type)
    *sums, e = launch(exponentials_kernel, inputs.arrays, out_type, config, "exponentials")
    parts = jax.tree.unflatten(treedef, [v[:, :t] for v in sums])
    m = jnp.broadcast_to(shift, parts.s.shape)
    return parts._replace(m=m, z_label=m), e


def dlogits(
    problem: LinearProblem,
    operands: LinearOperands,
    coefficients: DLogits,
    marked: jax.Array,
    vocab: int,
    first: jax.Array | int,
    split: int,
    mask: bool,
    config: Config,
) -> jax.Array:
    """d-logits of the columns ``first : first + split``, ``[T, split]`` in the compute dtype.

    T is that of the aligned operands; a row past the real T is 0. ``split`` is a multiple of 64.
    ``mask`` is needed where it reaches past the vocabulary: such a column then holds 0.
    ``marked`` is ``marked_slices``; ``first`` is a multiple of the config's ``epilogue_n``.
    """
    t = operands.x.shape[0]
    tiles = config.tiles(t, split)
    inputs = _Inputs(problem, operands, config, tiles, vocab, mask, marked, coefficients)

    def dlogits_kernel(first_gmem, *refs):
        x, w, logit_tiles, here, (out,) = inputs.unpack(refs)
        first = first_gmem[0]
        x_side, w_side = _sides(problem, x, w)
        epilogue = DLogitsEpilogue(logit_tiles, first, out)
        w_side = w_side._replace(first=first)
        products.matmul(x_side, w_side, x.shape[1], here, config, epilogue)

    out_type = jax.ShapeDtypeStruct((t, split), problem.compute_dtype)
    first = jnp.full((1,), first, jnp.int32)
    return launch(dlogits_kernel, (first, *inputs.arrays), out_type, config, "dlogits")


def _sums_type(like: RowSums, tiles: tuple[int, int], config: Config):
    """How to put a kernel's row sums together from its outputs, and the types of those."""
    parts = pl.cdiv(tiles[1], config.group) * (2 if config.split == "n" else 1)
    rows = tiles[0] * config.block_m
    fields, treedef = jax.tree.flatten(like)
    return treedef, [jax.ShapeDtypeStruct((parts, rows), v.dtype) for v in fields]


def _sides(problem: LinearProblem, x: Ref, w: Ref) -> tuple[hopper.Side, hopper.Side]:
    return hopper.Side(x, k_minor=True), hopper.Side(w, k_minor=problem.layout == "vh")


class _Inputs:
    """The arrays of a launch and, inside the kernel, their refs by name.

    ``mask`` says that tiles may reach past the vocabulary into columns that are kept.
    """

    def __init__(
        self,
        problem: LinearProblem,
        operands: LinearOperands,
        config: Config,
        tiles: tuple[int, int],
        vocab: int,
        mask: bool,
        marked: jax.Array,
        coefficients: DLogits | None = None,
        shift: Rows | None = None,
    ):
        self.problem, self.config, self.tiles = problem, config, tiles
        self.vocab = vocab if mask else None
        t = operands.labels.shape[0]
        rows: dict[str, jax.Array] = {"labels": operands.labels}
        factors = problem.transform.factors(operands.scale, operands.temperature)
        traced = {
            name: f
            for name, f in zip(FACTORS, factors, strict=True)
            if f is not None and not isinstance(f, float)
        }
        self.factors = factors._replace(**dict.fromkeys(traced))
        rows |= {name: jnp.broadcast_to(f, (t,)) for name, f in traced.items()}
        if coefficients is not None:
            rows |= {name: c for name, c in coefficients._asdict().items() if c is not None}
        if shift is not None:
            rows["shift"] = shift
        cols = {"bias": operands.bias, "class_weights": operands.class_weights}
        if mask and "u" in problem.moments and operands.class_weights is None:
            cols["present"] = jnp.ones((vocab,), jnp.float32)

        pad_t = tiles[0] * config.block_m - t
        # A launch over a split may start anywhere, so its last tile may end this far past V.
        pad_v = tiles[1] * config.block_n
        # In the rows past T a factor of 0 would make NaN of a removed class, -inf, and what is
        # kept of them is to be finite.
        fill: dict[str, float] = {"labels": -1, "shift": FAR, **dict.fromkeys(FACTORS, 1)}
        self.rows = {
            name: jnp.pad(v, (0, pad_t), constant_values=fill.get(name, 0))
            for name, v in rows.items()
        }
        self.cols = {
            name: jnp.pad(v.astype(jnp.float32), (0, pad_v))
            for name, v in cols.items()
            if v is not None
        }
        arrays = (*self.rows.values(), *self.cols.values())
        self.counts = row_counts(operands)
        self.arrays = (*self.counts, operands.x, operands.w, marked, *arrays)

    def unpack(self, refs):
        """``(x, w, logit tiles, how many tiles are wanted, outputs)``."""
        counts, (x, w, marked, *rest) = refs[: len(self.counts)], refs[len(self.counts) :]
        here = row_tiles(self.tiles, self.config, counts[0] if counts else None)
        per_row = dict(zip(self.rows, rest, strict=False))
        per_col = dict(zip(self.cols, rest[len(self.rows) :], strict=False))
        outputs = rest[len(self.rows) + len(self.cols) :]
        tiles = LogitTiles(
            self.problem, self.config, self.factors, self.vocab, per_row, per_col, marked
        )
        return x, w, tiles, here, outputs
