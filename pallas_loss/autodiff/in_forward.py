"""The rule of a loss that is one number: its gradients are made in the forward, in three products.

A custom_vjp's forward rule runs under differentiation only, and where the loss is a scalar, every
token's cotangent is known there but for one common factor. For a chunk of tokens the backend keeps
``E = e^(z - z_y)``, the label's own logit being known from a gather and a dot. The row sums of
``E`` give the statistics, those the loss's cotangents, and those the coefficients of d-logits:

    d = alpha E, but at_label at y        dx = alpha * (E w^T)    dw = (alpha * x)^T E

so once the label's entry of ``E`` is ``at_label / alpha`` nothing of size ``[T, V]`` is touched
between the sweep and two plain products. For cross-entropy that entry is ``-s``, and the loss is
``log1p(s)``: both exact for confident tokens. What adds to every column (label smoothing) takes one
pass over ``E`` to make ``d``.

The backward multiplies by the incoming scalar. Cotangents of the statistics, which come beside it,
add a recomputing backward.

``E`` overflows where some logit is far above the label's. Such a row shows in its ``s``; one is
enough for the whole call to be computed again by the recompute plan, whose shift is the maximum.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from pallas_loss._types import Rows, Scalar
from pallas_loss._varying import vary_like
from pallas_loss.autodiff import linear
from pallas_loss.autodiff.common import first_order, is_zero, scaled, values
from pallas_loss.autodiff.linear import LinearPlan, Perturbed, RowStatistics
from pallas_loss.backends import sweep
from pallas_loss.backends.active import Order
from pallas_loss.backends.base import (
    LinearBackend,
    LinearGradients,
    LinearOperands,
    LinearProblem,
    Wanted,
)
from pallas_loss.losses import DLogits
from pallas_loss.row_sums import RowSums

# Of a row's sum. Its reciprocal times x is to stay a normal bfloat16, and those end at 2^-126.
LARGEST_SUM = 2.0**80


class ReducedLoss(Protocol):
    """A scalar loss as a sum over tokens; hashable. ``factors`` are arrays, per token or scalar."""

    def value(self, stats: RowStatistics, factors: Any) -> Scalar:
        """The loss."""
        ...

    def shares(self, stats: RowStatistics, factors: Any) -> Rows:
        """Each token's part of it, a function of its own statistics and factors."""
        ...


class Placement(Protocol):
    """Where arrays lie; hashable."""

    def for_branches(
        self, backend: LinearBackend, problem: LinearProblem, operands: LinearOperands
    ) -> tuple[LinearBackend, LinearOperands]:
        """The two as all branches of a conditional are to use them."""
        ...

    def lay_gradients(
        self, backend: LinearBackend, problem: LinearProblem, grads: LinearOperands
    ) -> LinearOperands:
        """The gradients of such a branch, each where its argument lies."""
        ...

    def all_agree(self, flag: jax.Array) -> jax.Array:
        """Whether it is True on all devices that have to take the same branch."""
        ...


@dataclass(frozen=True)
class InForwardPlan:
    """A linear plan, the loss made of its statistics, and how many tokens go by at a time."""

    linear: LinearPlan
    loss: ReducedLoss
    token_chunk: int
    placement: Placement

    def cotangents(self, stats: RowStatistics, factors) -> RowStatistics:
        """``dloss/dstatistic`` of each row."""
        wanted = {f.name: stats[f.name] for f in self.linear.statistics}
        return jax.grad(lambda s: jnp.sum(self.loss.shares(s, factors)))(wanted)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Residuals:
    operands: LinearOperands
    factors: Any
    sums: RowSums
    grads: LinearOperands
    perturbed: Perturbed = field(metadata={"static": True})


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def reduced_loss(
    plan: InForwardPlan, operands: LinearOperands, factors
) -> tuple[Scalar, RowStatistics]:
    """The loss, and the statistics of ``linear.row_statistics``."""
    sums = plan.linear.backend.row_sums(plan.linear.problem_for(dot_z=False), operands)
    stats = linear.finish(plan.linear, operands, sums, None)
    return plan.loss.value(stats, factors), stats


def _forward(plan: InForwardPlan, primals: LinearOperands, factor_primals):
    operands, factors = values(primals), values(factor_primals)
    perturbed = Perturbed.of(primals)
    sums, grads = first_order(partial(_sums_and_gradients, plan, perturbed), operands, factors)
    stats = linear.finish(plan.linear, operands, sums, None)
    residuals = _Residuals(operands, factors, sums, grads, perturbed)
    return (plan.loss.value(stats, factors), stats), residuals


def _backward(plan: InForwardPlan, residuals: _Residuals, cotangents):
    g, stats_cotangents = cotangents
    operands, perturbed = residuals.operands, residuals.perturbed
    live = linear.live_cotangents(stats_cotangents)
    grads = jax.tree.map(jnp.zeros_like, residuals.grads)
    factors = jax.tree.map(lambda _: None, residuals.factors)
    stats = linear.finish(plan.linear, operands, residuals.sums, None)
    if not is_zero(g):
        grads = first_order(scaled, residuals.grads, g)
        factors = _factor_gradients(plan, stats, residuals.factors, g)
    if live:
        more = linear.gradients(plan.linear, operands, perturbed, residuals.sums, live)
        grads = jax.tree.map(jnp.add, grads, more)
    return grads, factors


reduced_loss.defvjp(_forward, _backward, symbolic_zeros=True)


def _factor_gradients(plan: InForwardPlan, stats: RowStatistics, factors, g):
    """``g dloss/dfactors``; None where a factor is not a floating array."""
    leaves, treedef = jax.tree.flatten(factors)
    floating = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]

    def value(moving):
        moving = iter(moving)
        merged = [next(moving) if f else v for f, v in zip(floating, leaves, strict=True)]
        return plan.loss.value(stats, jax.tree.unflatten(treedef, merged))

    found = iter(jax.grad(value)([v for f, v in zip(floating, leaves, strict=True) if f]))
    return jax.tree.unflatten(treedef, [g * next(found) if f else None for f in floating])


def _sums_and_gradients(
    plan: InForwardPlan, perturbed: Perturbed, operands: LinearOperands, factors
) -> tuple[RowSums, LinearOperands]:
    """The sums of every row, and the gradients of the loss."""
    if operands.counted is not None and plan.linear.backend.skips_rows:
        order = Order.of(operands.counted)
        args = order.take_operands(operands), order.take_each(factors)
        sums, grads = _sums_and_gradients(plan, perturbed, *args)
        dx = None if grads.x is None else order.put(grads.x)
        return order.put_sums(sums), grads._replace(x=dx)
    problem = plan.linear.problem_for(perturbed.needs_dot_z(plan.linear))
    products = perturbed._replace(scale=False, temperature=False)
    if any(products):
        backend, inside = plan.placement.for_branches(plan.linear.backend, problem, operands)
        inner = replace(plan, linear=replace(plan.linear, backend=backend))
        in_pieces = 0 < plan.token_chunk < operands.labels.shape[0]
        make = _InChunks if in_pieces else _AtOnce
        sums, grads = make(inner, problem, products).sums_and_gradients(inside, factors)
        # XLA lays the results of a branch as it likes: it would gather dw on every device.
        grads = plan.placement.lay_gradients(plan.linear.backend, problem, grads)
    else:
        sums = plan.linear.backend.row_sums(problem, operands)
        grads = LinearOperands(x=None, w=None, labels=None)
    if perturbed.scale or perturbed.temperature:
        live = plan.cotangents(linear.finish(plan.linear, operands, sums, None), factors)
        p = linear.softmax(plan.linear, operands, sums)
        dot_z = linear.statistics_dot_z(plan.linear, p, live)
        grads = linear.with_factors(plan.linear, grads, operands, perturbed, dot_z)
    return sums, grads


class _Kept(NamedTuple):
    """What a sweep left; ``in_range`` says whether no row overflowed."""

    in_range: jax.Array
    sums: RowSums
    e: jax.Array
    coefficients: DLogits


@dataclass(frozen=True)
class _Way:
    """How the sums, and the gradients of ``x``, ``w`` and the bias, of one call are made."""

    plan: InForwardPlan
    problem: LinearProblem
    products: Perturbed

    def shift(self, operands: LinearOperands) -> Rows:
        """The label's own logit."""
        at_labels = operands._replace(candidates=operands.labels[:, None])
        z = self.plan.linear.backend.candidate_logits(self.problem, at_labels)[:, 0]
        # A removed class as label, or a masked row where class 0 is removed.
        return jnp.where(jnp.isfinite(z), z, 0.0)

    def keep(self, operands: LinearOperands, factors, shift: Rows) -> _Kept:
        """The first product, and all that is known without another."""
        plan = self.plan.linear
        sums, e = plan.backend.exponentials(self.problem, operands, shift)
        live = self.plan.cotangents(linear.finish(plan, operands, sums, None), factors)
        p = linear.softmax(plan, operands, sums)
        c = linear.row_coefficients(plan, operands, p, live)
        # Where alpha is 0 and at_label is not, their quotient does not exist.
        fine = (sums.s < LARGEST_SUM) & ((c.alpha != 0) | (c.at_label == 0))
        c = _chained(self.problem, operands, sums, c)
        return _Kept(jnp.all(fine), sums._replace(top=None), e, c)

    def gradients(
        self, operands: LinearOperands, kept: _Kept, dw_dtype: jnp.dtype
    ) -> LinearGradients:
        """The other products."""
        wanted = Wanted(self.products.x, self.products.w, self.products.bias)
        args = (operands, kept.e, kept.coefficients, wanted, dw_dtype)
        return self.plan.linear.backend.from_exponentials(self.problem, *args)

    def recomputed(
        self, operands: LinearOperands, factors, lean: bool = False
    ) -> tuple[RowSums, LinearOperands]:
        """All by the other plan."""
        plan = self.plan.linear
        plan = replace(plan, problem=replace(plan.problem, lean=lean))
        sums = plan.backend.row_sums(self.problem, operands)
        live = self.plan.cotangents(linear.finish(plan, operands, sums, None), factors)
        return sums, linear.gradients(plan, operands, self.products, sums, live)


class _AtOnce(_Way):
    """All tokens go by together.

    The products wait for the guard, not it for them: the host, which XLA asks to choose a branch,
    is then ahead of the device again before the call ends.
    """

    def sums_and_gradients(
        self, operands: LinearOperands, factors
    ) -> tuple[RowSums, LinearOperands]:
        kept = self.keep(operands, factors, self.shift(operands))

        def made():
            grads = self.gradients(operands, kept, operands.w.dtype)
            return kept.sums, _laid_out(operands, grads)

        in_range = self.plan.placement.all_agree(kept.in_range)
        # The exponentials are still there in the other branch.
        return lax.cond(in_range, made, lambda: self.recomputed(operands, factors, lean=True))


class _Carry(NamedTuple):
    in_range: jax.Array
    sums: RowSums
    grads: LinearGradients


class _InChunks(_Way):
    """A chunk of tokens goes by at a time; ``dw`` adds up in float32."""

    def sums_and_gradients(
        self, operands: LinearOperands, factors
    ) -> tuple[RowSums, LinearOperands]:
        shift = self.shift(operands)

        def chunk(start, size, carry: _Carry) -> _Carry:
            # One chunk's exponentials are alive at a time: the next waits for what this one leaves.
            x, in_range = lax.optimization_barrier((operands.x, carry.in_range))
            part = sweep.take_tokens(operands._replace(x=x), start, size)
            kept = self.keep(part, *sweep.take_per_row((factors, shift), start, size))
            dx, dw, dbias = self.gradients(part, kept, jnp.dtype(jnp.float32))
            put = lambda all_, new: sweep.put(all_, new.astype(all_.dtype), start)  # noqa: E731
            sums, grads = carry.sums, carry.grads
            return _Carry(
                in_range & kept.in_range,
                jax.tree.map(put, sums, kept.sums),
                LinearGradients(
                    dx=None if dx is None else put(grads.dx, dx),
                    dw=None if dw is None else grads.dw + dw,
                    dbias=None if dbias is None else grads.dbias + dbias,
                ),
            )

        t, live = operands.labels.shape[0], operands.num_active
        found = sweep.tiled(t, self.plan.token_chunk, chunk, self.nothing(operands), live)
        return lax.cond(
            self.plan.placement.all_agree(found.in_range),
            lambda: (found.sums, _laid_out(operands, found.grads)),
            lambda: self.recomputed(operands, factors),
        )

    def nothing(self, operands: LinearOperands) -> _Carry:
        """Before the first chunk."""
        (t, h, v), f32 = operands.sizes(self.problem.layout), jnp.float32
        wanted, labels = self.products, operands.labels
        zeros = LinearGradients(
            dx=jnp.zeros((t, h), operands.x.dtype) if wanted.x else None,
            dw=jnp.zeros(operands.w.shape, f32) if wanted.w else None,
            dbias=jnp.zeros((v,), f32) if wanted.bias else None,
        )
        return _Carry(
            in_range=vary_like(jnp.array(True), labels),
            sums=vary_like(RowSums.start(t, self.problem.moments), labels),
            grads=LinearGradients(
                dx=vary_like(zeros.dx, operands.x),
                dw=vary_like(zeros.dw, operands.w),
                dbias=vary_like(zeros.dbias, operands.bias),
            ),
        )


def _laid_out(operands: LinearOperands, grads: LinearGradients) -> LinearOperands:
    """The gradients, each in its argument's dtype."""
    cast = lambda g, like: None if g is None else g.astype(like.dtype)  # noqa: E731
    return LinearOperands(
        x=cast(grads.dx, operands.x),
        w=cast(grads.dw, operands.w),
        labels=None,
        bias=cast(grads.dbias, operands.bias),
    )


def _chained(problem: LinearProblem, part: LinearOperands, sums: RowSums, c: DLogits) -> DLogits:
    """``c`` with the soft cap's slope at the label; the exponentials have theirs."""
    outer = problem.transform.factors(part.scale, part.temperature).outer
    if outer is None:
        return c
    # A bad label has no logit, and its row is NaN.
    tanh = jnp.where(part.labels < 0, 0.0, sums.z_label / outer)
    return c._replace(at_label=problem.transform.chain(c.at_label, tanh))
