"""Over which axes of a ``shard_map`` a value varies, which is part of its type under ``check_vma``.

An array made from nothing is the same on every device. Where it is the start of a loop, it has to
be given the type of what the loop adds to it.
"""

import jax
import jax.numpy as jnp
from jax import lax


def varying(*trees) -> frozenset[str]:
    """The manual axes over which any of the arrays varies; none with ``check_vma=False``."""
    axes: frozenset[str] = frozenset()
    for leaf in jax.tree.leaves(trees):
        axes |= jax.typeof(leaf).mat.varying
    return axes


def vary[T](tree: T, axes) -> T:
    """The same values, typed as varying over ``axes`` too; its transpose sums over them."""

    def cast(leaf):
        missing = tuple(sorted(frozenset(axes) - varying(leaf)))
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(cast, tree)


def vary_like[T](tree: T, *like) -> T:
    """The same values, typed as varying where any of ``like`` does."""
    return vary(tree, varying(*like))


def shape_like(shape: jax.ShapeDtypeStruct, *like) -> jax.ShapeDtypeStruct:
    """The same, typed likewise: what ``pallas_call`` has to be told of an output."""
    if not varying(*like):
        return shape
    mat = jax.typeof(vary_like(jnp.zeros(()), *like)).mat
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, manual_axis_type=mat)
