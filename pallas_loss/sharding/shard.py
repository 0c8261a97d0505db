"""Losses from hidden states over a split vocabulary, on one shard: a backend that wraps another."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from pallas_loss._errors import UnsupportedError
from pallas_loss._types import Array, Candidates, Float, Rows
from pallas_loss._varying import vary_like, varying
from pallas_loss.backends import sweep
from pallas_loss.backends.base import (
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

Axes = tuple[str, ...]
NO_IN_FORWARD = "inside a shard_map gradients are recomputed: backward='recompute' or 'auto'"
# Who adds up what every device has of a gradient; see ShardLinear.
Sums = Literal["own", "by type", "by transposition"]


@dataclass(frozen=True)
class ShardLinear:
    """Answers for the whole vocabulary where this code runs on one shard: in a shard_map.

    ``inner`` sweeps the local columns. ``labels`` and ``candidates`` are ids in ``[0, vocab)``;
    shard ``i`` of ``n`` holds the columns from ``i size`` on, those past ``vocab`` being padding
    that no product sees. With ``sequence`` each device of the vocabulary axis also holds a slice
    of the tokens: ``x`` is gathered over that axis, twice, and ``dx`` is scattered.

    A device's partial sums are not yet gradients. ``dx`` misses the other columns, ``dw`` and
    ``dbias`` the other tokens. What has to be added, and where, is a question of calculus:

    * ``"own"``: the rule of differentiation stands outside, on whole arrays. Cotangents are whole,
      so every sum is taken here: ``dx`` over the vocabulary, ``dw`` over the tokens.
    * ``"by type"``: the rule stands inside, and types say over which axes a value varies. A
      gradient has the type of its argument. ``x`` does not vary over the vocabulary axis, so its
      gradient is summed here, in float32. ``w`` was cast to vary over the axes of the tokens when
      it entered the rule, and the transpose of that cast is the sum.
    * ``"by transposition"``: inside, without types. JAX then takes each device's copy of a
      replicated value for a variable of its own, the derivative for that of the sum of all
      devices' results, and adds the copies' gradients outside. So the coefficients are summed
      over the vocabulary axis, each shard being an argument of every device's result; ``dw`` is
      left to JAX; and each copy of ``x`` gets an n-th part of the sum that is taken in float32.
    """

    inner: LinearBackend
    vocab: int
    axis: Axes = ()
    num_shards: int = 1
    token_axes: Axes = ()
    hidden_axes: Axes = ()
    sequence: bool = False
    sums: Sums = "own"

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
        return self._merged(problem, operands, self._over_widths(_row_sums, problem, operands))

    def store(self, problem: LinearProblem, operands: LinearOperands) -> tuple[RowSums, Stored]:
        operands = self._localized(problem, operands)
        sums, stored = self._over_widths(_store, problem, operands)
        return self._merged(problem, operands, sums), stored

    def exponentials(
        self, problem: LinearProblem, operands: LinearOperands, shift: Rows
    ) -> tuple[RowSums, Float[Array, "rows columns"]]:
        operands = self._localized(problem, operands)
        if self.sequence:
            shift = lax.all_gather(shift, self.axis, tiled=True)
        sums, e = self._over_widths(_exponentials, problem, operands, shift)
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
        """For rules that stand outside, ``"own"``."""
        here = self._localized(problem, operands)
        if self.sequence:
            coefficients, _, _ = self._shared(coefficients, None, None)
        call = partial(_from_exponentials, wanted, dw_dtype)
        dx, dw, dbias = self._over_widths(call, problem, here, e, coefficients)
        if dx is not None and self.axis:
            add = partial(lax.psum_scatter, tiled=True) if self.sequence else lax.psum
            dx = add(dx, self.axis)
        dw, dbias = self._over_tokens(problem, dw, dbias)
        return LinearGradients(dx, dw, dbias)

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
        self,
        problem: LinearProblem,
        operands: LinearOperands,
        coefficients: DLogits,
        wanted: Wanted,
        unscale: Float[Array, ""] | None,
        stored: Stored | None,
        at_candidates: Float[Array, "T K"] | None,
    ) -> LinearGradients:
        x_varies = bool(varying(operands.x) & frozenset(self.axis))
        here = self._localized(problem, operands)
        if self.axis and (self.sequence or self.sums == "by transposition"):
            coefficients, at_candidates, unscale = self._shared(
                coefficients, at_candidates, unscale
            )
        args = (coefficients, unscale, stored, at_candidates)
        grads = self._over_widths(partial(_gradients, wanted), problem, here, *args)
        dx, dw, dbias = grads
        if dx is not None and self.axis:
            if self.sequence:
                dx = lax.psum_scatter(dx, self.axis, tiled=True)
            elif self.sums == "by transposition":
                dx = lax.psum(dx, self.axis) / self.num_shards
            elif not x_varies:
                dx = lax.psum(dx, self.axis)
        if self.sums == "own":
            dw, dbias = self._over_tokens(problem, dw, dbias)
        return LinearGradients(dx, dw, dbias)

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
        size = operands.sizes(problem.layout)[2]
        start = lax.axis_index(self.axis) * size

        def local(ids):
            inside = (ids >= start) & (ids < start + size)
            return jnp.where(inside, ids - start, -1)

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

    def _shared(self, coefficients: DLogits, at_candidates, unscale):
        """The coefficients of all the rows that this shard sweeps, of every device's result."""
        shift, *given = coefficients
        if unscale is not None:
            # Devices may have chosen different powers of two; all take the largest unit.
            unit = lax.pmax(unscale, self.axis)
            if not self.sequence:
                unit = unit * self.num_shards  # so that a sum of n stays in range
            scaled = lambda v: v if v is None else v * (unscale / unit)  # noqa: E731
            given, at_candidates, unscale = [*map(scaled, given)], scaled(at_candidates), unit
        if self.sequence:
            gather = lambda v: lax.all_gather(v, self.axis, axis=v.ndim - 1, tiled=True)  # noqa: E731
            present = [shift, *(v for v in given if v is not None)]
            rows = iter(gather(jnp.stack(present)))
            shift, *given = (None if v is None else next(rows) for v in (shift, *given))
            if at_candidates is not None:
                at_candidates = gather(at_candidates.T).T
        else:
            given, at_candidates = lax.psum((given, at_candidates), self.axis)
        return DLogits(shift, *given), at_candidates, unscale

    def _over_tokens(self, problem: LinearProblem, dw, dbias):
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
        """``call`` on the live columns of this shard, which is a branch where shards differ.

        Each branch is a program for its own static width, so no kernel masks a padding column and
        no soft cap brings one back. The shard that is short reads a copy of its live columns.
        """
        size = operands.sizes(problem.layout)[2]
        whole, rest = divmod(self.vocab, size)
        if whole >= self.num_shards:
            return call(self.inner, problem, operands, *args)
        widths = [size] * (whole > 0) + [rest] * (rest > 0)
        widths += [0] * (self.num_shards > whole + (rest > 0))
        like = jax.eval_shape(partial(call, self.inner, problem), operands, *args)
        index = lax.axis_index(self.axis) if self.axis else jnp.int32(0)

        def branch(width: int):
            def run(operands, *args):
                if width:
                    live = _live(problem, operands, width)
                    args = [_cut(self.inner, problem, live, v) for v in args]
                    out = jax.tree.map(_pad_to, call(self.inner, problem, live, *args), like)
                else:
                    out = _nothing(problem, like)
                return vary_like(out, operands, args, index)

            return run

        branches = [branch(width) for width in widths]
        if len(branches) == 1:
            return branches[0](operands, *args)
        # Shards before `whole` are full, one may be part full, the others are empty.
        which = jnp.clip(index - whole + int(whole > 0), 0, len(widths) - 1)
        return lax.switch(which, branches, operands, *args)


def _row_sums(backend: LinearBackend, problem: LinearProblem, operands: LinearOperands) -> RowSums:
    return backend.row_sums(problem, operands)


def _store(
    backend: LinearBackend, problem: LinearProblem, operands: LinearOperands
) -> tuple[RowSums, Stored]:
    return backend.store(problem, operands)


def _exponentials(
    backend: LinearBackend, problem: LinearProblem, operands: LinearOperands, shift: Rows
) -> tuple[RowSums, jax.Array]:
    return backend.exponentials(problem, operands, shift)


def _from_exponentials(
    wanted: Wanted,
    dw_dtype: jnp.dtype,
    backend: LinearBackend,
    problem: LinearProblem,
    operands: LinearOperands,
    e: jax.Array,
    coefficients: DLogits,
) -> LinearGradients:
    return backend.from_exponentials(problem, operands, e, coefficients, wanted, dw_dtype)


def _gradients(
    wanted: Wanted,
    backend: LinearBackend,
    problem: LinearProblem,
    operands: LinearOperands,
    coefficients: DLogits,
    *rest,
) -> LinearGradients:
    return backend.gradients(problem, operands, coefficients, wanted, *rest)


def _live(problem: LinearProblem, operands: LinearOperands, width: int) -> LinearOperands:
    """The first ``width`` columns."""
    return sweep.take_vocab(operands, problem.layout, 0, width)


def _cut(backend: LinearBackend, problem: LinearProblem, operands: LinearOperands, arg):
    """What a short shard stored, without the padding that made it as large as the others'."""
    if not isinstance(arg, Stored):
        return arg
    _, like = jax.eval_shape(partial(backend.store, problem), operands)
    if like.width != arg.width:
        raise UnsupportedError(
            f"what the forward stores of {operands.sizes(problem.layout)[2]} columns, the last "
            f"shard's, is sliced by {like.width} and that of the other shards by {arg.width}; "
            "pad the vocabulary to a multiple of the axis, or use backward='recompute'"
        )
    return jax.tree.map(lambda v, s: v[: s.shape[0], : s.shape[1]], arg, like)


def _pad_to(v, like):
    return jnp.pad(v, [(0, n - m) for m, n in zip(v.shape, like.shape, strict=True)])


def _nothing(problem: LinearProblem, like):
    """What a shard without a column answers."""
    is_sums = lambda v: isinstance(v, RowSums)  # noqa: E731
    return jax.tree.map(
        lambda v: (
            RowSums.start(v.m.shape[0], problem.moments)
            if is_sums(v)
            else jnp.zeros(v.shape, v.dtype)
        ),
        like,
        is_leaf=is_sums,
    )
