"""What lies where: on one device, or as whole arrays on a mesh; ``manual`` is in a shard_map.

The entry points take ``vocab_axis`` and ``token_axes`` and ask a placement for rows from tokens and
back, sums over all tokens, operands as the derivative rule wants them, a backend for them, and a
look-up in an array of classes.
"""

import functools
import logging
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from pallas_loss._types import RowLabels, Rows
from pallas_loss.backends.base import LinearBackend, LinearOperands, LinearProblem
from pallas_loss.backends.rows import RowBackend, RowOperands
from pallas_loss.sharding.mesh import MeshLinear, lay, on_mesh, operand_specs
from pallas_loss.sharding.rows import MeshRows, ShardRows
from pallas_loss.sharding.shard import ShardLinear
from pallas_loss.sharding.widths import Axes, localized

_log = logging.getLogger("pallas_loss")


@dataclass(frozen=True)
class Local:
    """One device, or arrays whose placement is XLA's own business."""

    def share(self, t: int, v: int) -> tuple[int, int]:
        return t, v

    @property
    def axis_of_partial_sums(self) -> Axes:
        return ()

    @property
    def sequence(self) -> bool:
        return False

    def vocab(self, columns: int, vocab_size: int | None, of: str = "w") -> int:
        return checked_vocab(vocab_size, columns, of)

    def fit(self, by_class: jax.Array, vocab: int, along: int = -1) -> jax.Array:
        if by_class.shape[along] == vocab:
            return by_class
        return lax.slice_in_dim(by_class, 0, vocab, axis=along)

    def flatten(self, a: jax.Array, rank: int, columns: bool = False) -> jax.Array:
        return a.reshape(math.prod(a.shape[:rank]), *a.shape[rank:])

    def unflatten(self, rows: jax.Array, batch: tuple[int, ...]) -> jax.Array:
        return rows.reshape(batch + rows.shape[1:])

    def alike[T](self, tree: T) -> T:
        return tree

    def of_all_tokens(self, name: str, number: jax.Array | None) -> jax.Array | None:
        return number

    def total(self, per_row: jax.Array) -> jax.Array:
        return self.over_devices(jnp.sum(per_row, dtype=per_row.dtype))

    def over_devices(self, total: jax.Array) -> jax.Array:
        return total

    def enter(self, problem: LinearProblem, operands: LinearOperands, vocab: int) -> LinearOperands:
        fit = lambda v, along=0: None if v is None else self.fit(v, vocab, along)  # noqa: E731
        return operands._replace(
            w=fit(operands.w, 1 if problem.layout == "hv" else 0),
            bias=fit(operands.bias),
            class_weights=fit(operands.class_weights),
        )

    def enter_rows(self, operands: RowOperands) -> RowOperands:
        return operands

    def into[T](self, tree: T, *beside) -> T:
        return tree

    def out_of[T](self, tree: T) -> T:
        return tree

    def all_agree(self, flag: jax.Array) -> jax.Array:
        return flag

    def backend(self, inner: LinearBackend, vocab: int) -> LinearBackend:
        return inner

    @property
    def one_chunk(self) -> bool:
        return False

    def for_branches(
        self, backend: LinearBackend, problem: LinearProblem, operands: LinearOperands
    ) -> tuple[LinearBackend, LinearOperands]:
        return backend, operands

    def lay_gradients(
        self, backend: LinearBackend, problem: LinearProblem, grads: LinearOperands
    ) -> LinearOperands:
        return grads

    def row_backend(self, inner: RowBackend, vocab: int) -> RowBackend:
        return inner

    def look_up(self, per_class: jax.Array, labels: RowLabels) -> Rows:
        return per_class[jnp.maximum(labels, 0)]


LOCAL = Local()


@dataclass(frozen=True)
class OnMesh(Local):
    """Whole arrays under ``jax.set_mesh``; ``token_axes`` has one entry for each axis of B."""

    mesh: AbstractMesh
    vocab_axis: Axes
    token_axes: tuple[Axes, ...]
    hidden_axes: Axes = ()

    def share(self, t: int, v: int) -> tuple[int, int]:
        tokens = (self.mesh.shape[a] for a in self.tokens if a not in self.vocab_axis)
        return -(-t // math.prod(tokens)), -(-v // self.num_shards)

    @property
    def tokens(self) -> Axes:
        return tuple(name for axes in self.token_axes for name in axes)

    @property
    def sequence(self) -> bool:
        return bool(self.vocab_axis) and self.vocab_axis[0] in self.tokens

    @property
    def num_shards(self) -> int:
        return math.prod(self.mesh.shape[a] for a in self.vocab_axis)

    def fit(self, by_class: jax.Array, vocab: int, along: int = -1) -> jax.Array:
        extra = -by_class.shape[along] % self.num_shards
        if not extra:
            return by_class
        padding = [(0, 0)] * by_class.ndim
        padding[along] = (0, extra)
        return jnp.pad(by_class, padding)

    def flatten(self, a: jax.Array, rank: int, columns: bool = False) -> jax.Array:
        for i, (size, n) in enumerate(zip(a.shape, self._token_shards(rank), strict=False)):
            if size % n:
                raise ValueError(
                    f"axis {i} of the tokens {list(a.shape[:rank])} does not divide over the "
                    f"{n} devices of token_axes={self.token_axes}"
                )
        specs = self._specs(rank, columns)
        if rank == 1:
            return lay(self.mesh, a, specs[1])
        # A reshape of the whole array would move tokens between devices; each reshapes its own,
        # so that rows come in another order than the tokens'. No loss depends on it.
        to_rows = lambda v: v.reshape(math.prod(v.shape[:rank]), *v.shape[rank:])  # noqa: E731
        return on_mesh(self.mesh, to_rows, *specs, check_vma=True)(a)

    def unflatten(self, rows: jax.Array, batch: tuple[int, ...]) -> jax.Array:
        if len(batch) == 1:
            return rows
        here = tuple(b // n for b, n in zip(batch, self._token_shards(len(batch)), strict=True))
        to_tokens = lambda v: v.reshape(here + v.shape[1:])  # noqa: E731
        specs = self._specs(len(batch))[::-1]
        return on_mesh(self.mesh, to_tokens, *specs, check_vma=True)(rows)

    def enter(self, problem: LinearProblem, operands: LinearOperands, vocab: int) -> LinearOperands:
        operands = super().enter(problem, operands, vocab)
        if self.hidden_axes:
            _log_gather(self.hidden_axes, operands.w.size * operands.w.dtype.itemsize)
        specs = operand_specs(problem, operands, self.tokens, self.vocab_axis, self.hidden_axes)
        return lay(self.mesh, operands, specs)

    def backend(self, inner: LinearBackend, vocab: int) -> LinearBackend:
        shard = ShardLinear(
            inner,
            vocab,
            self.vocab_axis,
            self.num_shards,
            self.tokens,
            self.hidden_axes,
            self.sequence,
        )
        return MeshLinear(shard, self.mesh, self.tokens)

    @property
    def one_chunk(self) -> bool:
        # What a loop over chunks starts from is not typed for Explicit axes.
        named = {*self.tokens, *self.vocab_axis, *self.hidden_axes}
        explicit = AxisType.Explicit in self.mesh.axis_types
        return explicit or math.prod(self.mesh.shape[a] for a in named) > 1

    def for_branches(
        self, backend: LinearBackend, problem: LinearProblem, operands: LinearOperands
    ) -> tuple[LinearBackend, LinearOperands]:
        assert isinstance(backend, MeshLinear)
        if AxisType.Explicit not in self.mesh.axis_types:
            # XLA would gather a w that lies otherwise for each branch, and once more before them.
            specs = operand_specs(problem, operands, self.tokens, self.vocab_axis, self.hidden_axes)
            operands = operands._replace(w=lax.with_sharding_constraint(operands.w, specs.w))
        return backend.for_branches(problem, operands)

    def lay_gradients(
        self, backend: LinearBackend, problem: LinearProblem, grads: LinearOperands
    ) -> LinearOperands:
        assert isinstance(backend, MeshLinear)
        grads = backend.add_up(problem, grads)
        if AxisType.Explicit in self.mesh.axis_types:
            return grads  # their types say it
        specs = operand_specs(problem, grads, self.tokens, self.vocab_axis, self.hidden_axes)
        return jax.tree.map(lax.with_sharding_constraint, grads, specs)

    def row_backend(self, inner: RowBackend, vocab: int) -> RowBackend:
        shard = ShardRows(inner, vocab, self.vocab_axis, self.num_shards)
        return MeshRows(shard, self.mesh, self.tokens)

    def look_up(self, per_class: jax.Array, labels: RowLabels) -> Rows:
        per_class = self.fit(per_class, per_class.shape[0])
        specs = PartitionSpec(self.vocab_axis or None), PartitionSpec(self.tokens or None)
        run = functools.partial(look_up, axis=self.vocab_axis, sequence=self.sequence)
        return on_mesh(self.mesh, run, specs, specs[1])(per_class, labels)

    def _token_shards(self, rank: int) -> list[int]:
        sizes = [math.prod(self.mesh.shape[name] for name in axes) for axes in self.token_axes]
        return sizes + [1] * (rank - len(sizes))

    def _specs(self, rank: int, columns: bool = False) -> tuple[PartitionSpec, PartitionSpec]:
        """Of an array ``[*B, ...]`` with so many axes in B, and of its rows."""
        per_axis = tuple(axes or None for axes in self.token_axes)[:rank]
        if not columns:
            return PartitionSpec(*per_axis), PartitionSpec(self.tokens or None)
        vocab = self.vocab_axis or None
        batch = PartitionSpec(*per_axis, *[None] * (rank - len(per_axis)), vocab)
        return batch, PartitionSpec(self.tokens or None, vocab)


def checked_vocab(vocab_size: int | None, columns: int, of: str) -> int:
    """V, where ``of`` has so many columns."""
    if vocab_size is None:
        return columns
    if not 0 < vocab_size <= columns:
        raise ValueError(
            f"vocab_size must be in [1, {columns}], the columns of {of}; got {vocab_size}"
        )
    return vocab_size


def look_up(per_class: jax.Array, labels: RowLabels, axis: Axes, sequence: bool) -> Rows:
    """``per_class[label]`` inside a shard_map, of whose array this device has a shard."""
    if not axis:
        return per_class[jnp.maximum(labels, 0)]
    if sequence:
        labels = lax.all_gather(labels, axis, tiled=True)
    local = localized(labels, per_class.shape[0], axis)
    found = jnp.where(local < 0, 0.0, per_class[jnp.maximum(local, 0)])
    return lax.psum_scatter(found, axis, tiled=True) if sequence else lax.psum(found, axis)


@functools.cache
def _log_gather(axes: Axes, num_bytes: int) -> None:
    _log.info(
        "w is sharded on H over %s: each use gathers it, %.1f MiB on all devices together",
        axes,
        num_bytes / 2**20,
    )
