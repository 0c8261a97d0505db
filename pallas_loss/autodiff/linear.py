"""The derivative rule of losses from hidden states.

Forward: one sweep leaves the row sums, and the statistics are functions
of those. Backward: the cotangents of the statistics become the per-row coefficients of d-logits
``d = dL/d(x @ w + b)`` (``losses.DLogits``), the backend forms ``d`` tile by tile, from logits that
it makes again or from what a plan with ``store`` kept of them, and returns

    dx = d w^T      dw = x^T d      db = sum_t d

The two scalars of the logits need no sweep of their own:

    z goes with 1/temperature:  dL/dtemperature = -(1/temperature) sum_f g_f sum_v z_v df/dz_v
    and with scale:             dL/dscale = (1/scale) (the same sums)

A soft cap stands between scale and z; then ``dL/dscale = (<x, dx> + <b, db>) / scale`` (Euler).
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_loss._types import Candidates, Rows, Scalar
from pallas_loss._varying import varying
from pallas_loss.autodiff.common import first_order, is_zero, values
from pallas_loss.backends.base import (
    Backward,
    LinearBackend,
    LinearOperands,
    LinearProblem,
    Stored,
    Wanted,
)
from pallas_loss.losses import CandidateLogProb, DLogits, Softmax, Statistic, combined_dlogits
from pallas_loss.row_sums import RowSums

RowStatistics = dict[str, Rows]
CANDIDATES = CandidateLogProb()


@dataclass(frozen=True)
class LinearPlan:
    """Everything static about one call: what to compute and who computes it.

    ``vocab`` is V, of which the operands at hand may be one shard. ``vocab_axes`` are then the
    axes over which the rule adds up what it forms from ``bias`` itself.
    """

    backend: LinearBackend
    problem: LinearProblem
    statistics: tuple[Statistic, ...]
    vocab: int
    argmax: bool = False
    store: bool = False
    vocab_axes: tuple[str, ...] = ()

    @property
    def soft_capped(self) -> bool:
        return self.problem.transform.soft_cap is not None

    def problem_for(self, dot_z: bool) -> LinearProblem:
        """The problem with the moments that the statistics, and their ``dot_z``, need."""
        moments = frozenset({"argmax"}) if self.argmax else frozenset[str]()
        for f in self.statistics:
            moments |= f.moments | (f.temperature_moments if dot_z else frozenset())
        return replace(self.problem, moments=moments)


class Perturbed(NamedTuple):
    """Which operands are being differentiated."""

    x: bool
    w: bool
    bias: bool
    scale: bool
    temperature: bool

    @classmethod
    def of(cls, primals: LinearOperands) -> "Perturbed":
        return cls(*(getattr(getattr(primals, f), "perturbed", False) for f in cls._fields))

    def needs_dot_z(self, plan: LinearPlan) -> bool:
        """Whether ``dot_z`` of the statistics is needed."""
        return self.temperature or (self.scale and not plan.soft_capped)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Residuals:
    operands: LinearOperands
    sums: RowSums
    stored: Stored | None
    z_candidates: Candidates | None
    perturbed: Perturbed = field(metadata={"static": True})


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def row_statistics(plan: LinearPlan, operands: LinearOperands) -> RowStatistics:
    """The plan's statistics by name, each ``[T]`` float32, and ``"argmax"`` int32 if it asks."""
    sums = plan.backend.row_sums(plan.problem_for(dot_z=False), operands)
    return finish(plan, operands, sums, _z_candidates(plan, operands))


def _forward(plan: LinearPlan, primals: LinearOperands):
    operands = values(primals)
    perturbed = Perturbed.of(primals)
    problem = plan.problem_for(perturbed.needs_dot_z(plan))
    if plan.store:
        sums, stored = first_order(partial(plan.backend.store, problem), operands)
    else:
        sums, stored = first_order(partial(plan.backend.row_sums, problem), operands), None
    z_candidates = _z_candidates(plan, operands)
    residuals = _Residuals(operands, sums, stored, z_candidates, perturbed)
    return finish(plan, operands, sums, z_candidates), residuals


def _backward(plan: LinearPlan, residuals: _Residuals, cotangents):
    operands, perturbed = residuals.operands, residuals.perturbed
    live = live_cotangents(cotangents)
    if not live:
        return (jax.tree.map(jnp.zeros_like, operands)._replace(labels=None, counted=None),)
    return (
        gradients(
            plan, operands, perturbed, residuals.sums, live, residuals.stored,
            residuals.z_candidates,
        ),
    )  # fmt: skip


row_statistics.defvjp(_forward, _backward, symbolic_zeros=True)


def live_cotangents(cotangents: RowStatistics) -> RowStatistics:
    """Those of the differentiable statistics that are not known to be 0."""
    return {k: g for k, g in cotangents.items() if not is_zero(g) and k != "argmax"}


def gradients(
    plan: LinearPlan,
    operands: LinearOperands,
    perturbed: Perturbed,
    sums: RowSums,
    live: RowStatistics,
    stored: Stored | None = None,
    z_candidates: Candidates | None = None,
) -> LinearOperands:
    """The gradient of every perturbed operand, from cotangents of the statistics."""
    p = softmax(plan, operands, sums)
    transform = plan.problem.transform
    coefficients = row_coefficients(plan, operands, p, live)
    g_candidates = at_candidates = None
    if CANDIDATES.name in live:
        slope = transform.slope(operands.scale, operands.temperature)
        g_candidates = CANDIDATES.cotangent(live[CANDIDATES.name], operands.candidates)
        by = transform.factors(operands.scale, operands.temperature)
        coefficients += CANDIDATES.dlogits(p, g_candidates).scaled(slope)
        at_candidates = CANDIDATES.at_candidates(g_candidates, z_candidates, by)
        at_candidates *= jnp.broadcast_to(slope, p.sums.m.shape)[:, None]
    unscale = None
    if plan.problem.compute_dtype == jnp.float16:
        terms = [c for c in coefficients[1:] if c is not None]
        if at_candidates is not None:
            terms.append(jnp.sum(jnp.abs(at_candidates), axis=1))
        scale = _float16_scale(terms)
        coefficients, unscale = coefficients.scaled(scale), 1 / scale
        at_candidates = None if at_candidates is None else at_candidates * scale

    euler = perturbed.scale and plan.soft_capped
    wanted = Wanted(
        dx=perturbed.x or euler,
        dw=perturbed.w,
        dbias=perturbed.bias or (euler and operands.bias is not None),
    )
    dx = dw = dbias = None
    if any(wanted):
        dx, dw, dbias = first_order(
            lambda o, b: plan.backend.gradients(plan.problem, o, wanted, b),
            operands,
            Backward(coefficients, unscale, stored, at_candidates),
        )

    grads = LinearOperands(
        x=dx.astype(operands.x.dtype) if perturbed.x else None,
        w=dw,
        labels=None,
        bias=dbias.astype(operands.bias.dtype) if perturbed.bias else None,
    )
    if euler:
        # Of an x that varies over the vocabulary's axes, dx is this device's part.
        parts = varying(dx) & frozenset(plan.vocab_axes)
        total = _added_up(jnp.sum(operands.x.astype(jnp.float32) * dx), tuple(sorted(parts)))
        if dbias is not None:
            # A removed class, -inf, has no gradient.
            b = jnp.where(dbias == 0, 0.0, operands.bias.astype(jnp.float32))
            total += _added_up(jnp.sum(b * dbias), plan.vocab_axes)
        grads = grads._replace(scale=total / operands.scale)
    if perturbed.needs_dot_z(plan):
        dot_z = statistics_dot_z(plan, p, live)
        if g_candidates is not None:
            dot_z += CANDIDATES.dot_z(p, z_candidates, g_candidates)
        grads = with_factors(plan, grads, operands, perturbed, dot_z)
    return grads


def _added_up(part: Scalar, axes: tuple[str, ...]) -> Scalar:
    return lax.psum(part, axes) if axes else part


def row_coefficients(
    plan: LinearPlan, operands: LinearOperands, p: Softmax, live: RowStatistics
) -> DLogits:
    """The coefficients of ``dL/d(x @ w + b)``, up to the soft cap's slope."""
    slope = plan.problem.transform.slope(operands.scale, operands.temperature)
    return combined_dlogits(plan.statistics, p, live).scaled(slope)


def statistics_dot_z(plan: LinearPlan, p: Softmax, live: RowStatistics) -> Rows:
    """``sum_f g_f sum_v z_v df/dz_v``."""
    # Where a token has no cotangent its label may be a removed class, at -inf.
    terms = [
        jnp.where(live[f.name] == 0, 0.0, live[f.name] * f.dot_z(p))
        for f in plan.statistics
        if f.name in live
    ]
    return sum(terms, start=jnp.zeros_like(p.sums.m))


def with_factors(
    plan: LinearPlan,
    grads: LinearOperands,
    operands: LinearOperands,
    perturbed: Perturbed,
    dot_z: Rows,
) -> LinearOperands:
    """``grads`` with those of the logits' two scalars that follow from ``dot_z``."""
    if perturbed.temperature:
        per_row = -dot_z / operands.temperature
        total = per_row if jnp.ndim(operands.temperature) else jnp.sum(per_row)
        grads = grads._replace(temperature=total)
    if perturbed.scale and not plan.soft_capped:
        grads = grads._replace(scale=jnp.sum(dot_z) / operands.scale)
    return grads


def softmax(plan: LinearPlan, operands: LinearOperands, sums: RowSums) -> Softmax:
    """What the statistics share, of every row."""
    return Softmax(sums, operands.labels, plan.vocab)


def _z_candidates(plan: LinearPlan, operands: LinearOperands) -> Candidates | None:
    if operands.candidates is None:
        return None
    return first_order(partial(plan.backend.candidate_logits, plan.problem), operands)


def finish(
    plan: LinearPlan, operands: LinearOperands, sums: RowSums, z_candidates: Candidates | None
) -> RowStatistics:
    """The statistics, from the sums."""
    p = softmax(plan, operands, sums)
    stats: RowStatistics = {f.name: f.value(p) for f in plan.statistics}
    if plan.argmax:
        stats["argmax"] = sums.argmax
    if z_candidates is not None:
        stats[CANDIDATES.name] = CANDIDATES.value(p, z_candidates, operands.candidates)
    return stats


def _float16_scale(coefficients: list[Rows]):
    """A power of two that lifts d-logits clear of float16's smallest numbers, 6e-8.

    No d-logit is larger than a sum of its row's coefficients.
    """
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(c), initial=0.0) for c in coefficients]))
    usable = (largest > 0) & jnp.isfinite(largest)
    exponent = jnp.floor(jnp.log2(jnp.where(usable, 16384.0 / largest, 1.0)))
    return jnp.exp2(jnp.clip(exponent, -100, 100))
