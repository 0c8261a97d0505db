"""Losses from hidden states over a split vocabulary, on one shard: a backend that wraps another."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from pallas_loss._errors import UnsupportedError
from pallas_loss._types import Array, Candidates, Float, Rows
from pallas_loss._varying import varying
from pallas_loss.backends import sweep
from pallas_loss.backends.base import (
    Backward,
    LinearBackend,
    LinearGradients,
    LinearOperands,
    LinearProblem,
    Stored,
    Wanted,
)
from pallas_loss.losses import DLogits
from pallas_loss.row_sums import RowSums
from pallas_loss.sharding.merge import merge_over_axis
from pallas_loss.sharding.widths import Axes, localized, on_live_columns


@dataclass(frozen=True)
class ShardLinear:
    """Answers for the whole vocabulary where this code runs on one shard: in a shard_map.

    ``inner`` sweeps the local columns. ``labels`` and ``candidates`` are ids in ``[0, vocab)``;
    shard ``i`` of ``n`` holds the columns from ``i size`` on, those past ``vocab`` being padding
    that no product sees. With ``sequence`` each device of the vocabulary axis also holds a slice
    of the tokens: ``x`` is gathered over that axis, twice, and ``dx`` is scattered.

    A device's partial sums are not yet gradients. ``dx`` misses the other columns, and gets them
    here, in float32. ``dw`` and ``dbias`` miss the other tokens. With ``rule_outside``, where the
    rule of differentiation works on whole arrays, they too are summed here. Where it stands inside,
    JAX does that, which differentiates with respect to a ``w`` that is the same for all tokens.
    """

    inner: LinearBackend
    vocab: int
    axis: Axes = ()
    num_shards: int = 1
    token_axes: Axes = ()
    hidden_axes: Axes = ()
    sequence: bool = False
    rule_outside: bool = True

    skips_rows = False  # of its own accord: what it wraps is told which count

    @property
    def prefers_in_forward(self) -> bool:
        return self.inner.prefers_in_forward

    @property
    def name(self) -> str:
        return self.inner.name

    def unsupported(self, problem: LinearProblem, operands: LinearOperands) -> str | None:
        return self.inner.unsupported(problem, operands)

    def row_sums(self, problem: LinearProblem, operands: LinearOperands) -> RowSums:
        operands = self._localized(problem, operands)
        sums = self._over_widths(lambda b, *args: b.row_sums(*args), problem, operands)
        return self._merged(problem, operands, sums)

    def store(self, problem: LinearProblem, operands: LinearOperands) -> tuple[RowSums, Stored]:
        operands = self._localized(problem, operands)
        sums, stored = self._over_widths(lambda b, *args: b.store(*args), problem, operands)
        return self._merged(problem, operands, sums), stored

    def exponentials(
        self, problem: LinearProblem, operands: LinearOperands, shift: Rows
    ) -> tuple[RowSums, Float[Array, "rows columns"]]:
        operands = self._localized(problem, operands)
        if self.sequence:
            shift = lax.all_gather(shift, self.axis, tiled=True)
        call = lambda b, *args: b.exponentials(*args)  # noqa: E731
        sums, e = self._over_widths(call, problem, operands, shift)
        return self._merged(problem, operands, sums), e

    def from_exponentials(
        self,
        problem: LinearProblem,
        operands: LinearOperands,
        e: Float[Array, "rows columns"],
        coefficients: DLogits,
        wanted: Wanted,
        dw_dtype: jnp.dtype,
    ) -> LinearGradients:
        here = self._localized(problem, operands)
        if self.sequence:
            coefficients = self._gathered(Backward(coefficients)).coefficients

        def call(backend: LinearBackend, problem, operands, e, coefficients):
            return backend.from_exponentials(problem, operands, e, coefficients, wanted, dw_dtype)

        grads = self._over_widths(call, problem, here, e, coefficients)
        return self._summed(problem, operands, grads)

    def candidate_logits(self, problem: LinearProblem, operands: LinearOperands) -> Candidates:
        here = self._localized(problem, operands)
        z = self.inner.candidate_logits(problem, here)
        if not self.axis:
            return z
        z = jnp.where(here.candidates < 0, 0.0, z)
        if self.sequence:
            return lax.psum_scatter(z, self.axis, tiled=True)
        return lax.psum(z, self.axis)

    def gradients(
        self, problem: LinearProblem, operands: LinearOperands, wanted: Wanted, backward: Backward
    ) -> LinearGradients:
        here = self._localized(problem, operands)
        if self.sequence:
            backward = self._gathered(backward)

        def call(backend: LinearBackend, problem, operands, backward):
            return backend.gradients(problem, operands, wanted, backward)

        grads = self._over_widths(call, problem, here, backward)
        return self._summed(problem, operands, grads)

    def _localized(self, problem: LinearProblem, operands: LinearOperands) -> LinearOperands:
        """What this shard sweeps: all tokens of its row of the mesh, ids counted from its start."""
        hv = problem.layout == "hv"
        if self.hidden_axes:
            w = lax.all_gather(operands.w, self.hidden_axes, axis=0 if hv else 1, tiled=True)
            operands = operands._replace(w=w)
        if not self.axis:
            return operands
        if self.sequence:
            gather = lambda v: lax.all_gather(v, self.axis, tiled=True)  # noqa: E731
            tau = operands.temperature
            operands = operands._replace(
                x=gather(operands.x),
                labels=gather(operands.labels),
                temperature=gather(tau) if tau is not None and jnp.ndim(tau) else tau,
                candidates=None if operands.candidates is None else gather(operands.candidates),
                counted=None if operands.counted is None else gather(operands.counted),
            )
        local = partial(localized, size=operands.sizes(problem.layout)[2], axis=self.axis)
        return operands._replace(
            labels=local(operands.labels),
            candidates=None if operands.candidates is None else local(operands.candidates),
        )

    def _merged(self, problem: LinearProblem, operands: LinearOperands, sums: RowSums) -> RowSums:
        if not self.axis:
            return sums
        if sums.argmax is not None:
            start = lax.axis_index(self.axis) * operands.sizes(problem.layout)[2]
            sums = sums._replace(argmax=sums.argmax + start)
        return merge_over_axis(sums, self.axis, self.sequence, RowSums.merge_parts)

    def _gathered(self, backward: Backward) -> Backward:
        """With the coefficients of all the rows that this shard sweeps."""
        (shift, *given), unscale, stored, at_candidates = backward
        if unscale is not None:
            # Devices may have chosen different powers of two; all take the largest unit.
            unit = lax.pmax(unscale, self.axis)
            scaled = lambda v: v if v is None else v * (unscale / unit)  # noqa: E731
            given, at_candidates, unscale = [*map(scaled, given)], scaled(at_candidates), unit
        gather = lambda v: lax.all_gather(v, self.axis, axis=v.ndim - 1, tiled=True)  # noqa: E731
        present = [shift, *(v for v in given if v is not None)]
        rows = iter(gather(jnp.stack(present)))
        shift, *given = (None if v is None else next(rows) for v in (shift, *given))
        if at_candidates is not None:
            at_candidates = gather(at_candidates.T).T
        return Backward(DLogits(shift, *given), unscale, stored, at_candidates)

    def _summed(
        self, problem: LinearProblem, operands: LinearOperands, grads: LinearGradients
    ) -> LinearGradients:
        """This shard's part of gradients, with the parts of other shards that belong to it."""
        dx, dw, dbias = grads
        if dx is not None and self.sequence:
            dx = lax.psum_scatter(dx, self.axis, tiled=True)
        elif dx is not None and self.axis and not varying(operands.x) & frozenset(self.axis):
            dx = lax.psum(dx, self.axis)
        if self.rule_outside:
            dw, dbias = self.over_tokens(problem, dw, dbias)
        return LinearGradients(dx, dw, dbias)

    def over_tokens(self, problem: LinearProblem, dw, dbias):
        """The two, summed over the tokens of all devices; this one's part of H."""
        rest = tuple(a for a in self.token_axes if a not in self.hidden_axes + self.axis)
        dw, dbias = lax.psum((dw, dbias), rest) if rest else (dw, dbias)
        if not self.hidden_axes:
            return dw, dbias
        split = tuple(a for a in self.hidden_axes if a in self.token_axes)
        if split and dbias is not None:
            dbias = lax.psum(dbias, split)
        if dw is not None:
            along = 0 if problem.layout == "hv" else 1
            for name in self.hidden_axes:
                if name in split:
                    dw = lax.psum_scatter(dw, name, scatter_dimension=along, tiled=True)
                else:
                    size = dw.shape[along] // lax.axis_size(name)
                    start = lax.axis_index(name) * size
                    dw = lax.dynamic_slice_in_dim(dw, start, size, along)
        return dw, dbias

    def _over_widths(self, call: Callable, problem: LinearProblem, operands: LinearOperands, *args):
        """``call`` on the live columns of this shard."""
        size = operands.sizes(problem.layout)[2]

        def run(width: int, operands, *args):
            if width == size:
                return call(self.inner, problem, operands, *args)
            live = sweep.take_vocab(operands, problem.layout, 0, width)
            return call(
                self.inner, problem, live, *(_cut(self.inner, problem, live, v) for v in args)
            )

        shape = size, self.vocab, self.axis, self.num_shards
        return on_live_columns(run, partial(_nothing, problem), *shape, operands, *args)


def _cut(backend: LinearBackend, problem: LinearProblem, operands: LinearOperands, arg):
    """What a short shard stored, without the padding that made it as large as the others'."""
    if not isinstance(arg, Backward) or arg.stored is None:
        return arg
    stored = arg.stored
    _, like = jax.eval_shape(partial(backend.store, problem), operands)
    if like.width != stored.width:
        raise UnsupportedError(
            f"what the forward stores of {operands.sizes(problem.layout)[2]} columns, the last "
            f"shard's, is sliced by {like.width} and that of the other shards by {stored.width}; "
            "pad the vocabulary to a multiple of the axis, or use backward='recompute'"
        )
    cut = jax.tree.map(lambda v, s: v[: s.shape[0], : s.shape[1]], stored, like)
    return arg._replace(stored=cut)


def _nothing(problem: LinearProblem, like):
    """What a shard without a column answers."""
    is_sums = lambda v: isinstance(v, RowSums)  # noqa: E731

    def no_sums(like: RowSums) -> RowSums:
        sums = RowSums.start(like.m.shape[0], problem.moments)
        return sums if like.top is None else sums._replace(top=sums.m)

    return jax.tree.map(
        lambda v: no_sums(v) if is_sums(v) else jnp.zeros(v.shape, v.dtype), like, is_leaf=is_sums
    )
