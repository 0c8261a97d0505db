"""What the rules share."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero


def first_order(f: Callable[..., Any], *args):
    """``f(*args)``; differentiating it raises."""
    guarded = jax.custom_jvp(f)

    def refuse(primals, tangents):
        raise TypeError(
            "pallas_loss losses are differentiable once, in reverse mode: second derivatives and "
            "forward mode are not available"
        )

    guarded.defjvp(refuse)
    return guarded(*args)


def values[T](primals: T) -> T:
    """The arrays that a rule with ``symbolic_zeros`` is given."""
    is_primal = lambda v: hasattr(v, "perturbed")  # noqa: E731
    return jax.tree.map(lambda p: p.value, primals, is_leaf=is_primal)


def is_zero(g) -> bool:
    """Whether a cotangent is known to be 0."""
    return isinstance(g, SymbolicZero) or g.dtype == jax.dtypes.float0


def scaled[T](tree: T, g: jax.Array) -> T:
    """``g * tree``, computed where ``g`` is not 1; where it is, nothing is read or written.

    A loop of one round or none, whose carry is updated in place: the branches of ``lax.cond``
    would copy. A constant 1, which is what ``jax.grad`` of the loss itself passes, leaves nothing
    of it in the compiled program.
    """
    times = lambda v: (v.astype(jnp.float32) * g).astype(v.dtype)  # noqa: E731
    rounds = jnp.where(g == 1, 0, 1)
    return lax.fori_loop(0, rounds, lambda _, carry: jax.tree.map(times, carry), tree)
