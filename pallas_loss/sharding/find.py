"""Which placement a call has: what its arguments name, its arrays' types tell, or the context."""

import functools
import logging
import math

import jax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from pallas_loss._errors import UnsupportedError
from pallas_loss._varying import varying
from pallas_loss.sharding.base import Placement
from pallas_loss.sharding.manual import Manual
from pallas_loss.sharding.placement import LOCAL, OnMesh
from pallas_loss.sharding.widths import Axes

_log = logging.getLogger("pallas_loss")


def find(
    per_token: jax.Array,
    rank: int,
    per_class: jax.Array,
    class_dim: int,
    vocab_axis: str | Axes | None,
    token_axes,
) -> Placement:
    """The placement that the arguments name, the types tell or the context is in.

    ``per_token`` is ``[*B, ...]`` with ``rank`` axes in B; ``class_dim`` is the axis of the
    vocabulary in ``per_class``, which for a loss on logits is the same array.

    Raises:
        TypeError, ValueError: an axis is not a name, is not one of the mesh's, or is named twice.
        UnsupportedError: some of the axes named are manual and others are not.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axis = _names("vocab_axis", vocab_axis)
    per_axis = _per_axis(token_axes, rank)
    tokens = tuple(name for names in per_axis for name in names)
    named = (*axis, *(t for t in tokens if t not in axis))
    if unknown := [a for a in named if a not in mesh.axis_names]:
        where = f"has axes {mesh.axis_names}" if mesh.axis_names else "is not there"
        raise ValueError(
            f"vocab_axis and token_axes name {unknown}, but the mesh {where}: call under "
            "jax.set_mesh(mesh) or in a shard_map"
        )
    if len(set(tokens)) != len(tokens) or len(set(axis)) != len(axis):
        raise ValueError(f"an axis is named twice: {vocab_axis=}, {token_axes=}")
    if set(axis) & set(tokens) and not set(axis) <= set(tokens):
        raise ValueError(
            f"token_axes must hold all of vocab_axis or none: {vocab_axis=}, {token_axes=}"
        )
    manual = [a for a in named if a in mesh.manual_axes]
    if manual and len(manual) < len(named):
        raise UnsupportedError(
            f"of vocab_axis and token_axes {named} only {manual} are manual in this shard_map; "
            "make all of them manual (axis_names)"
        )
    if manual or (mesh.manual_axes and not named):
        num_shards = math.prod(mesh.shape[a] for a in axis)
        typed = bool(varying(lax.axis_index(mesh.manual_axes)))
        return Manual(axis, num_shards, tokens, typed)
    if mesh.manual_axes:
        raise UnsupportedError(
            f"vocab_axis and token_axes {named} are left to the compiler in a shard_map over "
            f"{mesh.manual_axes}; make them manual too (axis_names)"
        )
    hidden: Axes = ()
    if AxisType.Explicit in mesh.axis_types:
        by_class = _typed_axes(per_class)
        # What is named stands; what a type tells gives way to it, and columns give way to tokens.
        if not tokens:
            per_axis = tuple(_without(axis, axes) for axes in _typed_axes(per_token)[:rank])
            tokens = tuple(name for names in per_axis for name in names)
        if not axis:
            axis = by_class[class_dim]
            if not set(axis) <= set(tokens):
                if shared := tuple(a for a in axis if a in tokens):
                    _log_moved_columns(axis, shared)
                axis = _without(tokens, axis)
        if per_class is not per_token:
            others = (a for i, axes in enumerate(by_class) if i != class_dim for a in axes)
            hidden = _without(axis, tuple(others))
    if not (axis or tokens or hidden):
        if mesh.size > 1:
            _warn_of_unnamed_axes(mesh)
        return LOCAL
    return OnMesh(mesh, axis, per_axis, hidden)


@functools.cache
def _warn_of_unnamed_axes(mesh: AbstractMesh) -> None:
    _log.warning(
        "a loss on a mesh of %d devices names neither vocab_axis nor token_axes of %s: XLA may "
        "gather its arguments and repeat its work on each",
        mesh.size,
        mesh.axis_names,
    )


@functools.cache
def _log_moved_columns(axes: Axes, shared: Axes) -> None:
    _log.info(
        "the columns of w are sharded over %s, of which %s split the tokens: each call gathers "
        "them over these",
        axes,
        shared,
    )


def _names(argument: str, value) -> Axes:
    names = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(names, tuple | list) or not all(isinstance(n, str) for n in names):
        raise TypeError(f"{argument} must name mesh axes, got {value!r}")
    return tuple(names)


def _without(taken: Axes, axes: Axes) -> Axes:
    return tuple(a for a in axes if a not in taken)


def _per_axis(token_axes, rank: int) -> tuple[Axes, ...]:
    """One tuple of names for each axis of the tokens; all of them for the one axis of ``[T]``."""
    if isinstance(token_axes, str):
        token_axes = (token_axes,)
    if not isinstance(token_axes, tuple | list | PartitionSpec):
        raise TypeError(f"token_axes must be a tuple of mesh axes, got {token_axes!r}")
    entries = tuple(_names("token_axes", entry) for entry in token_axes)
    if rank == 1:
        return (tuple(name for names in entries for name in names),)
    if len(entries) > rank:
        raise ValueError(
            f"token_axes={token_axes} has an entry for each axis of labels, which has {rank}; "
            "several mesh axes for one go in a tuple of their own"
        )
    return entries


def _typed_axes(a: jax.Array) -> tuple[Axes, ...]:
    """The mesh axes of each of an array's, where its type says."""
    spec = tuple(jax.typeof(a).sharding.spec)
    spec += (None,) * (a.ndim - len(spec))
    return tuple(_names("", entry) for entry in spec)
