"""From a caller's arguments to operands: checks, flattening, masks. Shared by the public losses."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_loss import select, validation
from pallas_loss._types import Array, Bool, RowLabels, RowMask, Rows
from pallas_loss.autodiff import LinearPlan
from pallas_loss.backends.base import LinearOperands, LinearProblem
from pallas_loss.losses import LogitTransform, Statistic


@dataclass(frozen=True)
class LinearInputs:
    """A loss from hidden states, flattened to rows.

    ``counted`` says which tokens count; the ``x`` of the others is 0 and their label is 0.
    ``taking_part`` says which of a token's K labels do.
    """

    batch: tuple[int, ...]
    problem: LinearProblem
    operands: LinearOperands
    counted: RowMask
    taking_part: Bool[Array, "T K"]
    implementation: str | None

    @property
    def labels(self) -> RowLabels:
        """int32; -1 where a label that counts is out of range."""
        return self.operands.labels

    def plan(
        self, wanted: tuple[Statistic, ...], *, argmax: bool = False, store: bool = False
    ) -> LinearPlan:
        """What computes these statistics: the backend is picked here."""
        backend = select.linear_backend(self.implementation, self.problem, self.operands)
        return LinearPlan(backend, self.problem, wanted, argmax, store)

    def zero_uncounted(self, per_row: jax.Array) -> jax.Array:
        """``per_row`` with 0 where the token does not count."""
        return jnp.where(self.counted, per_row, jnp.zeros((), per_row.dtype))

    def zero_absent(self, per_label: jax.Array) -> jax.Array:
        """``per_label [T, K]`` with 0 where the label does not take part."""
        return jnp.where(self.taking_part, per_label, jnp.zeros((), per_label.dtype))

    def unflatten(self, per_row: jax.Array) -> jax.Array:
        """``[T, ...]`` as ``[*B, ...]``."""
        return per_row.reshape(self.batch + per_row.shape[1:])


def linear_inputs(
    x,
    w,
    labels,
    *,
    bias=None,
    where=None,
    weights: Rows | None = None,
    class_weights=None,
    ignore_index: int,
    logit_soft_cap,
    logit_scale,
    temperature,
    temperature_per_token: bool = False,
    candidates: bool = False,
    w_layout,
    compute_dtype,
    implementation,
) -> LinearInputs:
    """Checks the arguments and lays them out; ``weights`` and ``class_weights`` are checked.

    With ``candidates``, ``labels`` may be ``[*B, K]``.
    """
    x, w = validation.floating("x", x), validation.floating("w", w)
    labels = validation.array("labels", labels)
    with_candidates = candidates and labels.ndim == x.ndim
    one_each = labels[..., 0] if with_candidates and labels.shape[-1] else labels
    num_tokens, h, v = validation.linear_shapes(x, w, one_each, w_layout)
    batch = one_each.shape
    validation.one_of("implementation", implementation, (None, *select.implementations()))
    ignore_index = validation.static_integer("ignore_index", ignore_index)
    if bias is not None:
        bias = validation.floating("bias", bias)
        validation.of_shape("bias", bias, (v,), f"V of w {validation.describe(w)}")

    per_token = labels.shape[-1] if with_candidates else 1
    rows = labels.reshape(num_tokens, per_token)
    y, ignored = validation.split_labels(rows, v, ignore_index)
    taking_part = ~ignored
    counted = jnp.any(taking_part, axis=1)
    if where is not None:
        counted &= mask(where, batch, "as labels")
    if weights is not None:
        counted &= weights != 0

    static_scale, scale = validation.number_or_scalar("logit_scale", logit_scale)
    if static_scale == 0:
        raise ValueError("logit_scale must not be 0")
    if temperature_per_token and jnp.ndim(temperature):
        tau = validation.floating("temperature", temperature)
        validation.of_shape("temperature", tau, batch, "as labels, or a scalar")
        static_tau, tau = 1.0, jnp.where(counted, tau.astype(jnp.float32).reshape(-1), 1.0)
    else:
        static_tau, tau = validation.number_or_scalar("temperature", temperature)
    validation.positive("temperature", static_tau)
    if logit_soft_cap is not None:
        logit_soft_cap = validation.positive(
            "logit_soft_cap", validation.static_number("logit_soft_cap", logit_soft_cap)
        )
    dtype = jnp.dtype(jnp.promote_types(x.dtype, w.dtype))
    if compute_dtype is not None:
        dtype = validation.dtype("compute_dtype", compute_dtype)
    operands = LinearOperands(
        # 0 * NaN is NaN, so a row that does not count must not reach a product.
        x=jnp.where(counted[:, None], x.reshape(num_tokens, h), jnp.zeros((), x.dtype)),
        w=w,
        # With candidates no column is told apart in the sweep.
        labels=jnp.full((num_tokens,), -1) if with_candidates else jnp.where(counted, y[:, 0], 0),
        bias=bias,
        class_weights=class_weights,
        scale=scale,
        temperature=tau,
        candidates=jnp.where(taking_part, y, 0) if with_candidates else None,
    )
    transform = LogitTransform(static_scale, static_tau, logit_soft_cap)
    problem = LinearProblem(w_layout, dtype, transform)
    taking_part &= counted[:, None]
    return LinearInputs(batch, problem, operands, counted, taking_part, implementation)


def mask(where, batch: tuple[int, ...], why: str) -> RowMask:
    """``where`` as a flat mask; ``why`` says where its shape comes from."""
    where = validation.array("where", where)
    validation.of_shape("where", where, batch, why)
    if where.dtype != bool and not jnp.issubdtype(where.dtype, jnp.integer):
        raise TypeError(
            f"where must be bool or integers, got {validation.describe(where)}; "
            "a floating factor per token is weights="
        )
    return where.astype(bool).reshape(-1)
