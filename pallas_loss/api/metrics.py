"""What a cross-entropy can report beside its value."""

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from pallas_loss._types import Array, Float, Int, RowLabels, RowMask, Rows
from pallas_loss.sharding import Placement


class Metrics(NamedTuple):
    """What a loss can report beside its value.

    Attributes:
        nll: the loss without its z-loss term, weighted and reduced as the loss is.
        z_loss: the z-loss term, likewise; the loss is ``nll + z_loss``.
        num_tokens: int32 scalar, the tokens that counted.
        accuracy: float32 scalar, the fraction of them whose prediction is the label; 0 if none.
        predictions: int32 ``[*B]``, the most probable class, the lowest on ties; -1 where the
            token did not count.
        lse: float32 ``[*B]``, ``log sum_v e^(z_v)``, differentiable; 0 where it did not count.
    """

    nll: Float[Array, "*B"]
    z_loss: Float[Array, "*B"]
    num_tokens: Int[Array, ""]
    accuracy: Float[Array, ""]
    predictions: Int[Array, "*B"]
    lse: Float[Array, "*B"]


class Tokens(Protocol):
    """A loss's inputs, as far as metrics need them."""

    @property
    def batch(self) -> tuple[int, ...]: ...
    @property
    def placement(self) -> Placement: ...
    @property
    def counted(self) -> RowMask: ...
    @property
    def labels(self) -> RowLabels: ...


def metrics_of(
    tokens: Tokens, nll: jax.Array, z_loss: jax.Array, argmax: RowLabels, lse: Rows
) -> Metrics:
    """From both terms, reduced, and from what was found of each row."""
    placement = tokens.placement
    unflatten = lambda v: placement.unflatten(v, tokens.batch)  # noqa: E731
    predictions = jnp.where(tokens.counted, argmax, -1)
    right = tokens.counted & (predictions == tokens.labels)
    count, correct = (placement.total(v.astype(jnp.int32)) for v in (tokens.counted, right))
    return Metrics(
        nll=nll,
        z_loss=z_loss,
        num_tokens=count,
        accuracy=correct.astype(jnp.float32) / jnp.maximum(count, 1).astype(jnp.float32),
        predictions=unflatten(predictions),
        lse=unflatten(jnp.where(tokens.counted, lse, 0.0)),
    )
