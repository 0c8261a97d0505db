"""Losses from hidden states as whole arrays on a mesh: a shard_map around each question."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from pallas_loss._types import Array, Candidates, Float, Rows
from pallas_loss.backends.base import (
    Backward,
    LinearGradients,
    LinearOperands,
    LinearProblem,
    Stored,
    Wanted,
)
from pallas_loss.losses import DLogits
from pallas_loss.row_sums import RowSums
from pallas_loss.sharding.shard import ShardLinear
from pallas_loss.sharding.widths import Axes


@dataclass(frozen=True)
class MeshLinear:
    """Answers on whole arrays under ``jit``: each method is a ``shard_map`` of a ``ShardLinear``.

    The derivative rule stands outside, so nothing is differentiated through a collective, and
    types of varying axes play no part. ``tokens`` are the axes that split the rows.

    ``in_parts`` leaves ``dw`` as each device made it, ``[devices that split the rows, *w.shape]``.
    """

    shard: ShardLinear
    mesh: AbstractMesh
    tokens: Axes = ()
    in_parts: bool = False

    skips_rows = False

    @property
    def prefers_in_forward(self) -> bool:
        return self.shard.prefers_in_forward

    @property
    def name(self) -> str:
        return self.shard.name

    def unsupported(self, problem: LinearProblem, operands: LinearOperands) -> str | None:
        return self.shard.unsupported(problem, operands)

    def row_sums(self, problem: LinearProblem, operands: LinearOperands) -> RowSums:
        run = partial(self.shard.row_sums, problem)
        return self._spread(run, self._rows(), (operands, self._operands(problem, operands)))

    def store(self, problem: LinearProblem, operands: LinearOperands) -> tuple[RowSums, Stored]:
        run = partial(self.shard.store, problem)
        out = self._rows(), self._stored()
        return self._spread(run, out, (operands, self._operands(problem, operands)))

    def exponentials(
        self, problem: LinearProblem, operands: LinearOperands, shift: Rows
    ) -> tuple[RowSums, Float[Array, "rows columns"]]:
        run = partial(self.shard.exponentials, problem)
        specs = self._operands(problem, operands)
        out = self._rows(), self._of_all_columns()
        return self._spread(run, out, (operands, specs), (shift, self._rows()))

    def from_exponentials(
        self,
        problem: LinearProblem,
        operands: LinearOperands,
        e: Float[Array, "rows columns"],
        coefficients: DLogits,
        wanted: Wanted,
        dw_dtype: jnp.dtype,
    ) -> LinearGradients:
        def run(shard, operands, e, coefficients):
            args = (operands, e, coefficients, wanted, dw_dtype)
            return shard.from_exponentials(problem, *args)

        return self._spread_gradients(
            run,
            problem,
            (operands, self._operands(problem, operands)),
            (e, self._of_all_columns()),
            (coefficients, self._rows()),
        )

    def candidate_logits(self, problem: LinearProblem, operands: LinearOperands) -> Candidates:
        run = partial(self.shard.candidate_logits, problem)
        return self._spread(run, self._rows(), (operands, self._operands(problem, operands)))

    def gradients(
        self, problem: LinearProblem, operands: LinearOperands, wanted: Wanted, backward: Backward
    ) -> LinearGradients:
        def run(shard, operands, *fields):
            return shard.gradients(problem, operands, wanted, Backward(*fields))

        rows, stored = self._rows(), backward.stored
        return self._spread_gradients(
            run,
            problem,
            (operands, self._operands(problem, operands)),
            (backward.coefficients, rows),
            (backward.unscale, PartitionSpec()),
            (stored, None if stored is None else self._stored()),
            (backward.at_candidates, rows),
        )

    def for_branches(
        self, problem: LinearProblem, operands: LinearOperands
    ) -> tuple["MeshLinear", LinearOperands]:
        """This and the operands as all branches of a conditional are to use them.

        A ``w`` that is sharded on H is gathered before them, once, and ``dw`` left in parts:
        ``add_up`` after the branch can go on beside what comes next.
        """
        if not self._adds_up:
            return self, operands
        hidden = self.shard.hidden_axes
        alone = replace(self, shard=replace(self.shard, hidden_axes=()), in_parts=True)
        if hidden:
            along = 0 if problem.layout == "hv" else 1
            gather = partial(jax.lax.all_gather, axis_name=hidden, axis=along, tiled=True)
            specs = self._operands(problem, operands).w, alone._operands(problem, operands).w
            operands = operands._replace(w=on_mesh(self.mesh, gather, *specs)(operands.w))
        return alone, operands

    def add_up(self, problem: LinearProblem, grads: LinearOperands) -> LinearOperands:
        """The gradients, of those that the backend ``for_branches`` made."""
        if not self._adds_up or grads.w is None:
            return grads
        run = lambda part: self.shard.over_tokens(problem, part[0], None)[0]  # noqa: E731
        specs = self._part(problem), self._operands(problem, grads).w
        return grads._replace(w=on_mesh(self.mesh, run, *specs)(grads.w))

    @property
    def _adds_up(self) -> bool:
        axes = {*self._row_axes, *self.shard.hidden_axes}
        return math.prod(self.mesh.shape[a] for a in axes) > 1

    @property
    def _row_axes(self) -> Axes:
        """The axes over which devices have other rows, and so other parts of ``dw``."""
        return tuple(a for a in self.tokens if a not in self.shard.axis)

    def _spread_gradients(self, run: Callable, problem: LinearProblem, *inputs) -> LinearGradients:
        """``run(shard, ...)`` on every device; the first of the inputs are the operands."""
        specs = inputs[0][1]
        out: Any = LinearGradients(dx=specs.x, dw=specs.w, dbias=specs.bias)
        if not self.in_parts:
            return self._spread(partial(run, self.shard), out, *inputs)

        def parts(*args):
            dx, dw, dbias = run(replace(self.shard, rule_outside=False), *args)
            _, dbias = self.shard.over_tokens(problem, None, dbias)
            return LinearGradients(dx, None if dw is None else dw[None], dbias)

        return self._spread(parts, out._replace(dw=self._part(problem)), *inputs)

    def _part(self, problem: LinearProblem) -> PartitionSpec:
        """Of ``dw`` in parts: none of them is split along H."""
        w = (None, self.shard.axis or None)
        return PartitionSpec(self._row_axes or None, *(w if problem.layout == "hv" else w[::-1]))

    def _spread(self, run: Callable, out_specs, *inputs):
        values, specs = zip(*inputs, strict=True)
        return on_mesh(self.mesh, run, specs, out_specs)(*values)

    def _rows(self) -> PartitionSpec:
        return PartitionSpec(self.tokens or None)

    def _of_all_columns(self) -> PartitionSpec:
        """Of ``[T, V]``: with sequence parallelism a device has all the tokens of its columns."""
        return PartitionSpec(self._row_axes or None, self.shard.axis or None)

    def _stored(self) -> Any:
        e = self._of_all_columns()
        specs: Any = e, PartitionSpec(*e[::-1])
        return Stored(*specs)

    def _operands(self, problem: LinearProblem, operands: LinearOperands) -> LinearOperands:
        return operand_specs(
            problem, operands, self.tokens, self.shard.axis, self.shard.hidden_axes
        )


def on_mesh(mesh: AbstractMesh, f: Callable, in_specs, out_specs, check_vma: bool = False):
    """``f`` on every device's blocks of whole arrays, which are laid out so."""
    spread = jax.shard_map(
        f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma
    )
    one = isinstance(in_specs, PartitionSpec)
    return lambda *args: spread(*lay(mesh, args, (in_specs,) if one else in_specs))


def lay(mesh: AbstractMesh, tree, specs):
    """``tree`` with these specs in its type, as to Explicit axes; to others jit sees."""
    if AxisType.Explicit not in mesh.axis_types:
        return tree
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))

    def explicit(entry):
        names = (entry,) if isinstance(entry, str) else entry or ()
        return tuple(a for a in names if kinds[a] == AxisType.Explicit) or None

    def lay_one(spec: PartitionSpec, part):
        spec = PartitionSpec(*map(explicit, spec))
        return jax.tree.map(lambda v: jax.sharding.reshard(v, spec), part)

    return jax.tree.map(lay_one, specs, tree, is_leaf=lambda v: isinstance(v, PartitionSpec))


def operand_specs(
    problem: LinearProblem, operands: LinearOperands, tokens: Axes, axis: Axes, hidden: Axes
) -> Any:
    """How the operands of a loss from hidden states lie on a mesh."""
    rows, columns = PartitionSpec(tokens or None), PartitionSpec(axis or None)
    w = (hidden or None, axis or None)
    per_token = operands.temperature is not None and jnp.ndim(operands.temperature) == 1
    specs: dict[str, Any] = dict(
        x=PartitionSpec(tokens or None, None),
        w=PartitionSpec(*(w if problem.layout == "hv" else w[::-1])),
        labels=rows,
        bias=columns,
        class_weights=columns,
        scale=PartitionSpec(),
        temperature=rows if per_token else PartitionSpec(),
        candidates=rows,
        counted=rows,
        num_active=None,
    )
    absent = {k: None for k in specs if getattr(operands, k) is None}
    return LinearOperands(**(specs | absent))
