"""Replicated values in a ``shard_map`` without types of varying axes (``check_vma=False``).

JAX then takes each device's copy of such a value for a variable of its own, the derivative for that
of the sum of all devices' results, and adds the copies' gradients outside. A rule that works on
shards knows one whole cotangent, and the whole gradient of what it is given. So between the two:

* a result has n copies, and a shard is an argument of each: ``of_all_copies`` adds up their
  cotangents;
* a replicated argument has n copies, and the whole gradient is their sum: ``one_of_copies`` gives
  each an n-th part.

Both are the identity on values. Nothing passes over a shard's own gradient.
"""

from functools import partial

import jax
from jax import lax

from pallas_loss.autodiff.common import is_zero, values


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def of_all_copies[T](axes: tuple[str, ...], results: T) -> T:
    """``results``, the same on all of ``axes``; their cotangents are added up over these."""
    return results


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def one_of_copies[T](n: int, arguments: T) -> T:
    """``arguments``, of which there are ``n`` copies; each gets an n-th part of the gradient."""
    return arguments


def _forward(_, primals):
    return values(primals), None


def _add_up(axes: tuple[str, ...], _, cotangents):
    leaves, tree = jax.tree.flatten(cotangents)
    live = iter(lax.psum([g for g in leaves if not is_zero(g)], axes))
    return (jax.tree.unflatten(tree, [None if is_zero(g) else next(live) for g in leaves]),)


def _divide(n: int, _, cotangents):
    return (jax.tree.map(lambda g: None if is_zero(g) else g / n, cotangents),)


of_all_copies.defvjp(_forward, _add_up, symbolic_zeros=True)
one_of_copies.defvjp(_forward, _divide, symbolic_zeros=True)
