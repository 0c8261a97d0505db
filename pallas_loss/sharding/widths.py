"""Columns that pad a vocabulary: no shard sweeps them."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from pallas_loss._varying import vary_like

Axes = tuple[str, ...]


def on_live_columns(
    run: Callable, nothing: Callable, size: int, vocab: int, axis: Axes, num_shards: int, *args
):
    """``run(width, *args)`` with the live columns of this shard, a branch where shards differ.

    Shard ``i`` of ``num_shards`` over ``axis`` holds ``size`` columns from ``i size`` on, those
    past ``vocab`` being padding. ``run`` answers arrays that may be smaller than those of a whole
    shard; they are padded with zeros. ``nothing`` makes what a shard without a column answers,
    given the shapes. All vary as the arguments do: a kernel's outputs come without a type.

    Each branch is a program for its own static width, so no kernel masks a padding column and no
    soft cap brings one back. The shard that is short reads a copy of its live columns.
    """
    whole, rest = divmod(vocab, size)
    if whole >= num_shards:
        return vary_like(run(size, *args), args)
    widths = [size] * (whole > 0) + [rest] * (rest > 0)
    widths += [0] * (num_shards > whole + (rest > 0))
    like = jax.eval_shape(partial(run, size), *args)
    index = lax.axis_index(axis) if axis else jnp.int32(0)

    def branch(width: int):
        def answer(*args):
            out = jax.tree.map(_pad_to, run(width, *args), like) if width else nothing(like)
            return vary_like(out, args, index)

        return answer

    branches = [branch(width) for width in widths]
    if len(branches) == 1:
        return branches[0](*args)
    # Shards before `whole` are full, one may be part full, the others are empty.
    which = jnp.clip(index - whole + int(whole > 0), 0, len(widths) - 1)
    return lax.switch(which, branches, *args)


def localized(ids: jax.Array, size: int, axis: Axes) -> jax.Array:
    """Ids in the whole vocabulary as columns of this shard; -1 where it does not hold them."""
    local = ids - lax.axis_index(axis) * size
    return jnp.where((local >= 0) & (local < size), local, -1)


def _pad_to(v, like):
    if v.shape == like.shape:
        return v
    return jnp.pad(v, [(0, n - m) for m, n in zip(v.shape, like.shape, strict=True)])
