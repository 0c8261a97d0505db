"""What lies where: on one device, in a caller's shard_map, or as whole arrays on a mesh.

The entry points take ``vocab_axis`` and ``token_axes`` and ask a placement five things: rows from
tokens and back, sums over all tokens, operands as the derivative rule wants them, a backend for
them, and a look-up in an array of classes.
"""

import functools
import logging
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from pallas_loss._errors import UnsupportedError
from pallas_loss._types import RowLabels, Rows
from pallas_loss._varying import vary, varying
from pallas_loss.backends.base import LinearBackend, LinearOperands, LinearProblem
from pallas_loss.backends.rows import RowBackend
from pallas_loss.sharding.mesh import MeshLinear, lay, on_mesh, operand_specs
from pallas_loss.sharding.rows import MeshRows, ShardRows
from pallas_loss.sharding.shard import NO_IN_FORWARD, Axes, ShardLinear, Sums

_log = logging.getLogger("pallas_loss")


@dataclass(frozen=True)
class Local:
    """One device, or arrays whose placement is XLA's own business."""

    @property
    def no_in_forward(self) -> str | None:
        return None

    def share(self, t: int, v: int) -> tuple[int, int]:
        return t, v

    @property
    def axis_of_partial_sums(self) -> Axes:
        return ()

    def vocab(self, columns: int, vocab_size: int | None) -> int:
        return _checked(vocab_size, columns)

    def flatten(self, a: jax.Array, rank: int, columns: bool = False) -> jax.Array:
        return a.reshape(math.prod(a.shape[:rank]), *a.shape[rank:])

    def unflatten(self, rows: jax.Array, batch: tuple[int, ...]) -> jax.Array:
        return rows.reshape(batch + rows.shape[1:])

    def total(self, per_row: jax.Array) -> jax.Array:
        return jnp.sum(per_row, dtype=per_row.dtype)

    def enter(self, problem: LinearProblem, operands: LinearOperands, vocab: int) -> LinearOperands:
        columns = operands.sizes(problem.layout)[2]
        if vocab == columns:
            return operands
        along = 1 if problem.layout == "hv" else 0
        cut = lambda v: None if v is None else v[:vocab]  # noqa: E731
        return operands._replace(
            w=lax.slice_in_dim(operands.w, 0, vocab, axis=along),
            bias=cut(operands.bias),
            class_weights=cut(operands.class_weights),
        )

    def backend(self, inner: LinearBackend, vocab: int) -> LinearBackend:
        return inner

    def lay_gradients(self, problem: LinearProblem, grads: LinearOperands) -> LinearOperands:
        return grads

    def row_backend(self, inner: RowBackend) -> RowBackend:
        return inner

    def check_columns(self, columns: int) -> None:
        pass

    def look_up(self, per_class: jax.Array, labels: RowLabels) -> Rows:
        return per_class[jnp.maximum(labels, 0)]


LOCAL = Local()


@dataclass(frozen=True)
class Manual(Local):
    """Inside the caller's shard_map: arrays are this device's shards.

    ``typed`` says that values have types of varying axes (``check_vma=True``).
    """

    axis: Axes = ()
    num_shards: int = 1
    token_axes: Axes = ()
    typed: bool = True

    @property
    def no_in_forward(self) -> str | None:
        return NO_IN_FORWARD if self.typed or self.axis or self.token_axes else None

    @property
    def axis_of_partial_sums(self) -> Axes:
        return self.axis if self.typed and not self.sequence else ()

    @property
    def sequence(self) -> bool:
        return bool(self.axis) and self.axis[0] in self.token_axes

    def vocab(self, columns: int, vocab_size: int | None) -> int:
        if vocab_size is not None:
            vocab_size = _checked(vocab_size, columns * self.num_shards)
            if self.num_shards > 1 and vocab_size <= columns:
                raise ValueError(
                    f"w holds all of vocab_size={vocab_size} on each device ({columns} columns), "
                    f"but vocab_axis={self.axis} splits it over {self.num_shards}: pass each "
                    "device its shard"
                )
            return vocab_size
        if self.num_shards > 1 and not self.typed:
            raise ValueError(
                "in shard_map(check_vma=False) nothing tells a shard of w from the whole of it: "
                f"pass vocab_size=, the size of the whole vocabulary ({columns} columns are here, "
                f"and vocab_axis={self.axis} has {self.num_shards} devices)"
            )
        return columns * self.num_shards

    def total(self, per_row: jax.Array) -> jax.Array:
        here = jnp.sum(per_row, dtype=per_row.dtype)
        return lax.psum(here, self.token_axes) if self.token_axes else here

    def enter(self, problem: LinearProblem, operands: LinearOperands, vocab: int) -> LinearOperands:
        if not self.typed:
            return operands
        axis = frozenset(self.axis)
        split = frozenset(self.token_axes)
        if self.num_shards > 1 and not axis <= varying(operands.w):
            raise ValueError(
                f"w is the same on all {self.num_shards} devices of vocab_axis={self.axis}: pass "
                "each its shard (in_specs), or leave vocab_axis out"
            )
        if missing := split - varying(operands.x):
            raise ValueError(
                f"x is the same on all devices of {sorted(missing)}, named in token_axes: its "
                "tokens would be counted once for each"
            )
        if not self.sequence:
            operands = operands._replace(**self._equal_over_vocab(operands))
        by_token = varying(operands) - (frozenset() if self.sequence else axis)
        rows = ("x", "labels", "temperature", "scale", "candidates", "counted")
        columns = ("w", "bias", "class_weights")
        cast = {k: vary(getattr(operands, k), by_token) for k in rows}
        cast |= {k: vary(getattr(operands, k), by_token | axis) for k in columns}
        return LinearOperands(**cast)

    def _equal_over_vocab(self, operands: LinearOperands) -> dict[str, Any]:
        """Rows that every shard has to have, typed so; the values were equal before."""
        axis = frozenset(self.axis)
        typed: dict[str, Any] = {}
        for name in ("labels", "candidates", "temperature", "scale", "counted"):
            v = getattr(operands, name)
            if over := tuple(sorted(varying(v) & axis)):
                if name == "counted":
                    typed[name] = lax.pmax(v.astype(jnp.int32), over) > 0
                    continue
                mean = jnp.issubdtype(v.dtype, jnp.floating)
                typed[name] = lax.pmean(v, over) if mean else lax.pmax(v, over)
        return typed

    def backend(self, inner: LinearBackend, vocab: int) -> LinearBackend:
        sums: Sums = "by type" if self.typed else "by transposition"
        return ShardLinear(
            inner, vocab, self.axis, self.num_shards, self.token_axes, (), self.sequence, sums
        )

    def check_columns(self, columns: int) -> None:
        if self.axis or self.token_axes:
            raise UnsupportedError(
                "losses from logits take vocab_axis and token_axes under jax.set_mesh, not in a "
                "shard_map where these axes are manual: call them outside of it"
            )

    def look_up(self, per_class: jax.Array, labels: RowLabels) -> Rows:
        return _look_up(per_class, labels, self.axis, self.sequence)


@dataclass(frozen=True)
class OnMesh:
    """Whole arrays under ``jax.set_mesh``; ``token_axes`` has one entry for each axis of B."""

    mesh: AbstractMesh
    vocab_axis: Axes
    token_axes: tuple[Axes, ...]
    hidden_axes: Axes = ()

    @property
    def no_in_forward(self) -> str | None:
        return None

    def share(self, t: int, v: int) -> tuple[int, int]:
        tokens = (self.mesh.shape[a] for a in self.tokens if a not in self.vocab_axis)
        return -(-t // math.prod(tokens)), -(-v // self.num_shards)

    @property
    def axis_of_partial_sums(self) -> Axes:
        return ()

    @property
    def tokens(self) -> Axes:
        return tuple(name for axes in self.token_axes for name in axes)

    @property
    def sequence(self) -> bool:
        return bool(self.vocab_axis) and self.vocab_axis[0] in self.tokens

    @property
    def num_shards(self) -> int:
        return math.prod(self.mesh.shape[a] for a in self.vocab_axis)

    def vocab(self, columns: int, vocab_size: int | None) -> int:
        return _checked(vocab_size, columns)

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

    def total(self, per_row: jax.Array) -> jax.Array:
        return jnp.sum(per_row, dtype=per_row.dtype)

    def enter(self, problem: LinearProblem, operands: LinearOperands, vocab: int) -> LinearOperands:
        columns = operands.sizes(problem.layout)[2]
        if extra := -columns % self.num_shards:
            along = 1 if problem.layout == "hv" else 0
            pad = lambda v: None if v is None else jnp.pad(v, (0, extra))  # noqa: E731
            operands = operands._replace(
                w=jnp.pad(operands.w, [(0, extra if i == along else 0) for i in range(2)]),
                bias=pad(operands.bias),
                class_weights=pad(operands.class_weights),
            )
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

    def lay_gradients(self, problem: LinearProblem, grads: LinearOperands) -> LinearOperands:
        if AxisType.Explicit in self.mesh.axis_types:
            return grads  # their types say it
        specs = operand_specs(problem, grads, self.tokens, self.vocab_axis, self.hidden_axes)
        return jax.tree.map(lax.with_sharding_constraint, grads, specs)

    def row_backend(self, inner: RowBackend) -> RowBackend:
        return MeshRows(ShardRows(inner, self.vocab_axis), self.mesh, self.tokens)

    def check_columns(self, columns: int) -> None:
        if self.sequence:
            raise ValueError(
                f"logits cannot have vocab_axis={self.vocab_axis} in token_axes too: it splits "
                "their columns"
            )
        if columns % self.num_shards:
            raise ValueError(
                f"the {columns} columns of logits do not divide over the {self.num_shards} devices "
                f"of vocab_axis={self.vocab_axis}: pad them with -inf, and targets likewise"
            )

    def look_up(self, per_class: jax.Array, labels: RowLabels) -> Rows:
        per_class = jnp.pad(per_class, (0, -per_class.shape[0] % self.num_shards))
        specs = PartitionSpec(self.vocab_axis or None), PartitionSpec(self.tokens or None)
        run = functools.partial(_look_up, axis=self.vocab_axis, sequence=self.sequence)
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


def _checked(vocab_size: int | None, columns: int) -> int:
    if vocab_size is None:
        return columns
    if not 0 < vocab_size <= columns:
        raise ValueError(f"vocab_size must be in [1, {columns}], w's columns; got {vocab_size}")
    return vocab_size


def _look_up(per_class: jax.Array, labels: RowLabels, axis: Axes, sequence: bool) -> Rows:
    if not axis:
        return per_class[jnp.maximum(labels, 0)]
    if sequence:
        labels = lax.all_gather(labels, axis, tiled=True)
    size = per_class.shape[0]
    local = labels - lax.axis_index(axis) * size
    here = (local >= 0) & (local < size)
    found = jnp.where(here, per_class[jnp.clip(local, 0, size - 1)], 0.0)
    return lax.psum_scatter(found, axis, tiled=True) if sequence else lax.psum(found, axis)


@functools.cache
def _log_gather(axes: Axes, num_bytes: int) -> None:
    _log.info(
        "w is sharded on H over %s: each use gathers it, %.1f MiB on all devices together",
        axes,
        num_bytes / 2**20,
    )
