"""From a caller's arguments to the operands of a loss from logits, and its reduction."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_loss import select, sharding, validation
from pallas_loss._types import Array, Float, Reduction, RowLabels, RowMask, Rows, Scalar
from pallas_loss.autodiff import RowPlan, token_losses, weighted_total
from pallas_loss.backends.rows import RowOperands, RowProblem, Sums
from pallas_loss.inputs import mask
from pallas_loss.losses import LogitTransform, RowLoss, divided


@dataclass(frozen=True)
class RowInputs:
    """A loss from logits, flattened to rows. ``weights`` are 0 where a token does not count."""

    batch: tuple[int, ...]
    placement: sharding.Placement
    problem: RowProblem
    operands: RowOperands
    counted: RowMask
    weights: Rows
    reduction: Reduction
    normalizer: Scalar | None
    inplace: bool
    vocab: int
    implementation: str | None

    @property
    def labels(self) -> RowLabels | None:
        """int32; -1 where a label that counts is out of range."""
        return self.operands.labels

    def loss(self) -> tuple[Float[Array, "*B"], Sums]:
        """The reduced loss and, as constants, the sums of every row."""
        backend = select.row_backend(self.implementation, self.problem, self.operands)
        backend = self.placement.row_backend(backend, self.vocab)
        plan = RowPlan(backend, self.problem, self.inplace)
        if self.reduction == "none":
            losses, sums = self.placement.out_of(token_losses(plan, self.operands))
            weighted = jnp.where(self.counted, self.weights * losses, 0.0)
            value = self.placement.unflatten(weighted, self.batch)
        else:
            g = self.placement.into(self.factors, self.operands)
            value, sums = self.placement.out_of(weighted_total(plan, self.operands, g))
            value = self.placement.over_devices(value)
        return value, jax.lax.stop_gradient(sums)

    @property
    def denominator(self) -> Scalar | None:
        """The mean's."""
        if self.reduction != "mean" or self.normalizer is not None:
            return self.normalizer
        cw = self.operands.label_weight
        return self.placement.total(self.weights if cw is None else self.weights * cw)

    @property
    def factors(self) -> Rows:
        """``g`` in the reduced loss ``sum_t g_t loss_t``; a mean over nothing is 0."""
        return divided(self.weights, self.denominator)


def row_inputs(
    loss: RowLoss,
    logits,
    *,
    target=None,
    target_kind: str = "none",
    labels=None,
    where=None,
    weights=None,
    class_weights=None,
    label_weights=None,
    ignore_index: int,
    logit_soft_cap=None,
    temperature=1.0,
    target_temperature=None,
    reduction: Reduction,
    normalizer,
    inplace: bool,
    argmax: bool = False,
    vocab_axis=None,
    token_axes=(),
    vocab_size=None,
    implementation: str | None,
) -> RowInputs:
    """Checks the arguments and lays them out.

    ``labels`` are those of a hard-label loss, or without one mark tokens that do not count;
    ``label_weights [V]`` weigh the former.
    """
    logits = validation.floating("logits", logits)
    if logits.ndim < 1 or logits.shape[-1] == 0:
        raise ValueError(
            f"logits must have shape [*B, V] with V > 0; got {validation.describe(logits)}"
        )
    *batch, columns = logits.shape
    batch, rank = tuple(batch), len(batch)
    placement = sharding.find(logits, rank, logits, rank, vocab_axis, token_axes)
    if placement.sequence:
        raise ValueError(
            f"an axis of logits' columns cannot be in token_axes too: {vocab_axis=}, {token_axes=}"
        )
    if vocab_size is not None:
        vocab_size = validation.static_integer("vocab_size", vocab_size)
    v = placement.vocab(columns, vocab_size, "logits")
    by_column = lambda a: placement.flatten(placement.fit(a, v), rank, columns=True)  # noqa: E731
    flatten = lambda a: placement.flatten(placement.alike(a), rank)  # noqa: E731
    validation.one_of("implementation", implementation, (None, *select.row_implementations()))
    validation.one_of("reduction", reduction, ("mean", "sum", "none"))
    ignore_index = validation.static_integer("ignore_index", ignore_index)
    if not isinstance(inplace, bool):
        raise TypeError(f"inplace must be a bool, got {inplace!r}")
    normalizer = validation.mean_normalizer(normalizer, reduction)
    normalizer = placement.of_all_tokens("normalizer", normalizer)
    if target is not None:
        validation.of_shape(_target_name(target_kind), target, logits.shape, "as logits")
        target = by_column(jax.lax.stop_gradient(target))

    ones = flatten(jnp.ones(batch, jnp.float32))
    counted = ones > 0
    safe = None
    if labels is not None:
        labels = validation.array("labels", labels)
        validation.integer_labels(labels)
        validation.of_shape("labels", labels, batch, f"logits are {validation.describe(logits)}")
        y, ignored = validation.split_labels(flatten(labels), v, ignore_index)
        counted &= ~ignored
        safe = y
    if where is not None:
        counted &= flatten(mask(where, batch, "as the tokens of logits"))
    if weights is None:
        weights = ones
    else:
        weights = validation.floating("weights", weights)
        validation.of_shape("weights", weights, batch, "as the tokens of logits")
        weights = flatten(weights.astype(jnp.float32))
        counted &= weights != 0
    hard = target is None
    labels = jnp.where(counted, safe, 0) if hard else None
    label_weight = None
    if label_weights is not None:
        label_weight = placement.look_up(label_weights, labels)

    logit_soft_cap = validation.soft_cap(logit_soft_cap)
    static_tau, tau = _temperature("temperature", temperature)
    if target_temperature is None:
        static_target, target_tau = static_tau, tau
    else:
        static_target, target_tau = _temperature("target_temperature", target_temperature)
    if target_kind != "logits":
        static_target, target_tau = 1.0, None
    problem = RowProblem(
        loss=sharding.counting(loss, v),
        transform=LogitTransform(1.0, static_tau, logit_soft_cap),
        target_transform=LogitTransform(1.0, static_target),
        target=target_kind,
        argmax=argmax,
    )
    operands = RowOperands(
        logits=by_column(logits),
        target=target,
        labels=labels,
        label_weight=label_weight,
        class_weights=None if class_weights is None else placement.fit(class_weights, v),
        temperature=tau,
        target_temperature=None if target_tau is None else jax.lax.stop_gradient(target_tau),
    )
    return RowInputs(
        batch=batch,
        placement=placement,
        problem=problem,
        operands=placement.enter_rows(operands),
        counted=counted,
        weights=jnp.where(counted, weights, 0.0),
        reduction=reduction,
        normalizer=normalizer,
        inplace=inplace,
        vocab=v,
        implementation=implementation,
    )


def _target_name(kind: str) -> str:
    return "target_probs" if kind == "probs" else "target_logits"


def _temperature(name: str, value) -> tuple[float, Scalar | None]:
    static, traced = validation.number_or_scalar(name, value)
    return validation.positive(name, static), traced
