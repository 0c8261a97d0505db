"""The reduction of per-token values."""

import jax.numpy as jnp

from pallas_loss._types import Reduction


def reduce(per_token, reduction: Reduction, normalizer, batch: tuple[int, ...]):
    """``per_token [T]`` as the caller wants it; a mean over nothing is 0."""
    if reduction == "none":
        return per_token.reshape(batch)
    total = jnp.sum(per_token)
    if reduction == "sum":
        return total
    empty = normalizer == 0
    return jnp.where(empty, 0.0, total / jnp.where(empty, 1.0, normalizer))
