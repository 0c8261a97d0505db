"""From a caller's arguments to operands: checks, flattening, masks. Shared by the public losses."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_loss import select, validation
from pallas_loss._types import RowLabels, RowMask, Rows
from pallas_loss.autodiff import LinearPlan, RowStatistics, row_statistics
from pallas_loss.backends.base import LinearOperands, LinearProblem
from pallas_loss.losses import LogitTransform, Statistic


@dataclass(frozen=True)
class LinearInputs:
    """A loss from hidden states, flattened to rows.

    ``counted`` says which tokens count; the ``x`` of the others is 0 and their label is 0.
    """

    batch: tuple[int, ...]
    problem: LinearProblem
    operands: LinearOperands
    counted: RowMask
    implementation: str | None

    @property
    def labels(self) -> RowLabels:
        """int32; -1 where a label that counts is out of range."""
        return self.operands.labels

    def statistics(
        self, wanted: tuple[Statistic, ...], *, argmax: bool = False, store: bool = False
    ) -> RowStatistics:
        """The wanted statistics by name, each ``[T]``, of all rows, counted or not."""
        backend = select.linear_backend(self.implementation, self.problem, self.operands)
        plan = LinearPlan(backend, self.problem, wanted, argmax, store)
        return row_statistics(plan, self.operands)

    def zero_uncounted(self, per_row: jax.Array) -> jax.Array:
        """``per_row`` with 0 where the token does not count."""
        return jnp.where(self.counted, per_row, jnp.zeros((), per_row.dtype))

    def unflatten(self, per_row: jax.Array) -> jax.Array:
        """``[T]`` as ``[*B]``."""
        return per_row.reshape(self.batch)


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
    w_layout,
    compute_dtype,
    implementation,
) -> LinearInputs:
    """Checks the arguments and lays them out. ``weights`` and ``class_weights`` are checked."""
    x, w = validation.floating("x", x), validation.floating("w", w)
    labels = validation.array("labels", labels)
    num_tokens, h, v = validation.linear_shapes(x, w, labels, w_layout)
    batch = labels.shape
    validation.one_of("implementation", implementation, (None, *select.implementations()))
    ignore_index = validation.static_integer("ignore_index", ignore_index)
    if bias is not None:
        bias = validation.floating("bias", bias)
        validation.of_shape("bias", bias, (v,), f"V of w {validation.describe(w)}")

    y, ignored = validation.split_labels(labels.reshape(-1), v, ignore_index)
    counted = ~ignored
    if where is not None:
        counted &= _mask(where, batch)
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
        labels=jnp.where(counted, y, 0),
        bias=bias,
        class_weights=class_weights,
        scale=scale,
        temperature=tau,
    )
    transform = LogitTransform(static_scale, static_tau, logit_soft_cap)
    problem = LinearProblem(w_layout, dtype, transform)
    return LinearInputs(batch, problem, operands, counted, implementation)


def _mask(where, batch) -> RowMask:
    where = validation.array("where", where)
    validation.of_shape("where", where, batch, "as labels")
    if where.dtype != bool and not jnp.issubdtype(where.dtype, jnp.integer):
        raise TypeError(
            f"where must be bool or integers, got {validation.describe(where)}; "
            "a floating factor per token is weights="
        )
    return where.astype(bool).reshape(-1)
