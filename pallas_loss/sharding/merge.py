"""The merge of row sums over a mesh axis: one collective, whatever was asked for."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_loss._varying import varying


def merge_over_axis[T](
    part: T, axis: tuple[str, ...], scatter: bool, merge_parts: Callable[[T], T]
) -> T:
    """Every device's part of the columns, merged on each of them; for the inside of a shard_map.

    ``part`` is a pytree of ``[T]`` vectors of 4 bytes an element, and ``merge_parts`` merges parts
    stacked along a leading axis, in the order of their columns.

    The vectors travel stacked, ``[fields, T]`` bits, and each device merges all parts in the order
    of the axis: one latency where a maximum and a sum would take two, and the same bits on every
    device whatever algorithm moves them. With ``scatter``, where each device holds a slice of the
    tokens, it receives the parts of its own slice only.
    """
    leaves, tree = jax.tree.flatten(part)
    stack = jnp.stack([lax.bitcast_convert_type(v, jnp.int32) for v in leaves])
    if scatter:
        n = lax.axis_size(axis)
        by_owner = stack.reshape(len(leaves), n, -1).swapaxes(0, 1)
        parts = lax.all_to_all(by_owner, axis, split_axis=0, concat_axis=0, tiled=True)
    else:
        to = "invarying" if varying(stack) else "varying"
        parts = lax.all_gather(stack, axis, to=to)
    stacked = [lax.bitcast_convert_type(parts[:, i], leaf.dtype) for i, leaf in enumerate(leaves)]
    return merge_parts(jax.tree.unflatten(tree, stacked))
