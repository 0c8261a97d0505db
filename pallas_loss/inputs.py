"""From a caller's arguments to operands: checks, flattening, masks. Shared by the public losses."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_loss import select, sharding, validation
from pallas_loss._types import Array, Bool, RowLabels, RowMask, Rows
from pallas_loss.autodiff import LinearPlan
from pallas_loss.backends.base import LinearOperands, LinearProblem
from pallas_loss.losses import LogitTransform, Statistic


@dataclass(frozen=True)
class LinearInputs:
    """A loss from hidden states, flattened to rows.

    ``counted`` says which tokens count; the ``x`` of the others is 0 and their label is 0.
    ``taking_part`` says which of a token's K labels do. ``weights``, and ``label_weights``, looked
    up in the class weights, are factors of the tokens' losses. T counts the tokens at hand,
    ``vocab`` all columns of the head; ``placement`` says what is elsewhere.
    """

    batch: tuple[int, ...]
    problem: LinearProblem
    operands: LinearOperands
    counted: RowMask
    taking_part: Bool[Array, "T K"]
    weights: Rows | None
    label_weights: Rows | None
    vocab: int
    placement: sharding.Placement
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
        backend = self.placement.backend(backend, self.vocab)
        axes = self.placement.axis_of_partial_sums
        return LinearPlan(backend, self.problem, wanted, self.vocab, argmax, store, axes)

    def zero_uncounted(self, per_row: jax.Array) -> jax.Array:
        """``per_row`` with 0 where the token does not count."""
        return jnp.where(self.counted, per_row, jnp.zeros((), per_row.dtype))

    def zero_absent(self, per_label: jax.Array) -> jax.Array:
        """``per_label [T, K]`` with 0 where the label does not take part."""
        return jnp.where(self.taking_part, per_label, jnp.zeros((), per_label.dtype))

    def unflatten(self, per_row: jax.Array) -> jax.Array:
        """``[T, ...]`` as ``[*B, ...]``."""
        return self.placement.unflatten(per_row, self.batch)

    def total(self, per_row: jax.Array) -> jax.Array:
        """The sum over all tokens, those of other devices included."""
        return self.placement.total(per_row)


def linear_inputs(
    x,
    w,
    labels,
    *,
    bias=None,
    where=None,
    weights=None,
    class_weights=None,
    class_weights_by_column: bool = False,
    ignore_index: int,
    logit_soft_cap,
    logit_scale,
    temperature,
    temperature_per_token: bool = False,
    candidates: bool = False,
    w_layout,
    compute_dtype,
    vocab_axis,
    token_axes,
    vocab_size,
    implementation,
) -> LinearInputs:
    """Checks the arguments and lays them out.

    With ``candidates``, ``labels`` may be ``[*B, K]``. ``class_weights_by_column`` says that they
    weigh the columns too, not only the labels.
    """
    x, w = validation.floating("x", x), validation.floating("w", w)
    labels = validation.array("labels", labels)
    with_candidates = candidates and labels.ndim == x.ndim
    one_each = labels[..., 0] if with_candidates and labels.shape[-1] else labels
    columns = validation.linear_shapes(x, w, one_each, w_layout)[2]
    batch = one_each.shape
    validation.one_of("implementation", implementation, (None, *select.implementations()))
    ignore_index = validation.static_integer("ignore_index", ignore_index)
    if bias is not None:
        bias = validation.floating("bias", bias)
        validation.of_shape("bias", bias, (columns,), f"V of w {validation.describe(w)}")
    class_weights = validation.per_class_constants("class_weights", class_weights, columns)
    if vocab_size is not None:
        vocab_size = validation.static_integer("vocab_size", vocab_size)

    class_dim = 1 if w_layout == "hv" else 0
    placement = sharding.find(x, len(batch), w, class_dim, vocab_axis, token_axes)
    vocab = placement.vocab(columns, vocab_size)
    flatten = lambda a: placement.flatten(placement.alike(a), len(batch))  # noqa: E731
    rows = flatten(labels if with_candidates else one_each[..., None])
    y, ignored = validation.split_labels(rows, vocab, ignore_index)
    taking_part = ~ignored
    counted = jnp.any(taking_part, axis=1)
    if where is not None:
        counted &= flatten(mask(where, batch, "as labels"))
    if weights is not None:
        weights = validation.floating("weights", weights)
        validation.of_shape("weights", weights, batch, "as labels")
        weights = flatten(weights.astype(jnp.float32))
        counted &= weights != 0

    static_scale, scale = validation.number_or_scalar("logit_scale", logit_scale)
    if static_scale == 0:
        raise ValueError("logit_scale must not be 0")
    if temperature_per_token and jnp.ndim(temperature):
        tau = validation.floating("temperature", temperature)
        validation.of_shape("temperature", tau, batch, "as labels, or a scalar")
        static_tau, tau = 1.0, jnp.where(counted, flatten(tau.astype(jnp.float32)), 1.0)
    else:
        static_tau, tau = validation.number_or_scalar("temperature", temperature)
    validation.positive("temperature", static_tau)
    logit_soft_cap = validation.soft_cap(logit_soft_cap)
    dtype = jnp.dtype(jnp.promote_types(x.dtype, w.dtype))
    if compute_dtype is not None:
        dtype = validation.dtype("compute_dtype", compute_dtype)
    one_label = None if with_candidates else jnp.where(counted, y[:, 0], 0)
    label_weights = None
    if class_weights is not None:
        label_weights = placement.look_up(class_weights, one_label)
    operands = LinearOperands(
        # 0 * NaN is NaN, so a row that does not count must not reach a product.
        x=jnp.where(counted[:, None], placement.flatten(x, len(batch)), jnp.zeros((), x.dtype)),
        w=w,
        # With candidates no column is told apart in the sweep.
        labels=jnp.full_like(counted, -1, jnp.int32) if one_label is None else one_label,
        bias=bias,
        class_weights=class_weights if class_weights_by_column else None,
        scale=scale,
        temperature=tau,
        candidates=jnp.where(taking_part, y, 0) if with_candidates else None,
        counted=counted,
    )
    transform = LogitTransform(static_scale, static_tau, logit_soft_cap)
    problem = LinearProblem(w_layout, dtype, transform)
    taking_part &= counted[:, None]
    return LinearInputs(
        batch,
        problem,
        placement.enter(problem, operands, vocab),
        counted,
        taking_part,
        weights,
        label_weights,
        vocab,
        placement,
        implementation,
    )


def mask(where, batch: tuple[int, ...], why: str) -> Bool[Array, "*B"]:
    """``where`` as a mask; ``why`` says where its shape comes from."""
    where = validation.array("where", where)
    validation.of_shape("where", where, batch, why)
    if where.dtype != bool and not jnp.issubdtype(where.dtype, jnp.integer):
        raise TypeError(
            f"where must be bool or integers, got {validation.describe(where)}; "
            "a floating factor per token is weights="
        )
    return where.astype(bool)
