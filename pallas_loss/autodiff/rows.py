"""The derivative rules of losses from logits.

Two rules share the derivative ``dL/dlogits_tv = g_t dloss_t/dlogits_tv``, which the loss states
tile by tile (``losses.RowLoss``):

* ``weighted_total``, of ``sum_t g_t loss_t``. The factors ``g`` are known before the logits are
  read, so under differentiation one pass leaves the sums and the finished gradient, and the
  backward multiplies by the incoming scalar where it is not 1. ``d/dg_t`` is ``loss_t``.
* ``token_losses``, one cotangent a token: the forward keeps the sums, the backward reads again.

``z`` goes with 1/temperature, so ``dL/dtemperature = -(1/temperature) sum_t g_t sum_v z dloss/dz``.
Targets and class weights are constants.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_loss._types import Rows, Scalar
from pallas_loss.autodiff.common import first_order, is_zero, scaled, values
from pallas_loss.backends.rows import RowBackend, RowOperands, RowProblem, Sums


@dataclass(frozen=True)
class RowPlan:
    """Everything static about one call: what to compute and who computes it."""

    backend: RowBackend
    problem: RowProblem
    inplace: bool = False


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Residuals:
    """``gradient`` where the forward made it; else what the backward needs to make it."""

    losses: Rows | None
    gradient: jax.Array | None
    operands: RowOperands | None
    sums: Sums | None
    g: Rows | None
    by_temperature: Scalar | None
    perturbed: dict[str, bool] = field(metadata={"static": True})


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def weighted_total(plan: RowPlan, operands: RowOperands, g: Rows) -> tuple[Scalar, Sums]:
    """``sum_t g_t loss_t`` and, as constants, the sums of every row; a row of ``g = 0`` adds 0."""
    sums = plan.backend.sums(plan.problem, operands)
    return _total(plan, operands, sums, g)[0], sums


def _total(plan: RowPlan, operands: RowOperands, sums: Sums, g: Rows) -> tuple[Scalar, Rows]:
    losses = plan.problem.loss.value(sums, operands.facts)
    return jnp.sum(jnp.where(g == 0, 0.0, g * losses)), losses


def _total_forward(plan: RowPlan, primals: RowOperands, g):
    operands, perturbed = _split(primals)
    g_value = g.value
    gradient = None
    # float16 would lose what a loss scale in the cotangent is there to save.
    early = operands.logits.dtype != jnp.float16
    if perturbed["logits"] and early:
        sums, gradient = first_order(
            lambda o, g: plan.backend.sums_and_gradient(plan.problem, o, g, plan.inplace),
            operands, g_value,
        )  # fmt: skip
    else:
        sums = first_order(partial(plan.backend.sums, plan.problem), operands)
    total, losses = _total(plan, operands, sums, g_value)
    by_temperature = None
    if perturbed["temperature"]:
        by_temperature = first_order(partial(_by_temperature, plan), operands, sums, g_value)
    later = perturbed["logits"] and not early
    residuals = _Residuals(
        losses=losses if g.perturbed else None,
        gradient=gradient,
        operands=operands if later else None,
        sums=sums if later else None,
        g=g_value if later or g.perturbed else None,
        by_temperature=by_temperature,
        perturbed=perturbed,
    )
    return (total, sums), residuals


def _total_backward(plan: RowPlan, residuals: _Residuals, cotangents):
    g_total, _ = cotangents  # the API makes constants of the sums
    if is_zero(g_total):
        g_total = jnp.zeros((), jnp.float32)
    grads: dict[str, Any] = {}
    if residuals.gradient is not None:
        grads["logits"] = scaled(residuals.gradient, g_total)
    elif residuals.operands is not None:
        g = residuals.g * g_total
        grads["logits"] = _gradient(plan, residuals.operands, residuals.sums, g)
    if residuals.by_temperature is not None:
        grads["temperature"] = residuals.by_temperature * g_total
    dg = None
    if residuals.losses is not None:
        # A row that has no part in the loss may hold anything.
        dg = jnp.where(residuals.g == 0, 0.0, residuals.losses * g_total)
    return _cotangent(grads), dg


weighted_total.defvjp(_total_forward, _total_backward, symbolic_zeros=True)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def token_losses(plan: RowPlan, operands: RowOperands) -> tuple[Rows, Sums]:
    """The loss of every row and, as constants, the sums."""
    sums = plan.backend.sums(plan.problem, operands)
    return plan.problem.loss.value(sums, operands.facts), sums


def _tokens_forward(plan: RowPlan, primals: RowOperands):
    operands, perturbed = _split(primals)
    sums = first_order(partial(plan.backend.sums, plan.problem), operands)
    losses = plan.problem.loss.value(sums, operands.facts)
    return (losses, sums), _Residuals(None, None, operands, sums, None, None, perturbed)


def _tokens_backward(plan: RowPlan, residuals: _Residuals, cotangents):
    g, _ = cotangents
    operands, sums, grads = residuals.operands, residuals.sums, {}
    if is_zero(g):
        g = jnp.zeros_like(operands.logits[:, 0], jnp.float32)
    if residuals.perturbed["temperature"]:
        grads["temperature"] = first_order(partial(_by_temperature, plan), operands, sums, g)
    if residuals.perturbed["logits"]:
        grads["logits"] = _gradient(plan, operands, sums, g)
    return (_cotangent(grads),)


token_losses.defvjp(_tokens_forward, _tokens_backward, symbolic_zeros=True)


def _split(primals: RowOperands) -> tuple[RowOperands, dict[str, bool]]:
    operands = values(primals)
    perturbed = {
        name: getattr(getattr(primals, name), "perturbed", False)
        for name in ("logits", "temperature")
    }
    return operands, perturbed


def _cotangent(grads: dict[str, Any]) -> RowOperands:
    return RowOperands(**{"logits": None, **grads})


def _gradient(plan: RowPlan, operands: RowOperands, sums: Sums, g: Rows) -> jax.Array:
    run = lambda o, s, g: plan.backend.gradient(plan.problem, o, s, g, plan.inplace)  # noqa: E731
    return first_order(run, operands, sums, g)


def _by_temperature(plan: RowPlan, operands: RowOperands, sums: Sums, g: Rows) -> Scalar:
    dot_z = plan.backend.dot_z(plan.problem, operands, sums, g)
    return -dot_z / operands.temperature
