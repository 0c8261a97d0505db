"""What differs between JAX versions, and what JAX does not say in public."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax._src import config

from pallas_loss._varying import varying


def interpreting() -> bool:
    """Whether kernels traced here run in the interpreter (``force_gpu_interpret_mode``)."""
    return config.pallas_tpu_interpret_mode_context_manager.value is not None


def untyped[T](tree: T) -> T:
    """The same arrays without types of varying axes, which a kernel's references cannot have.

    What comes of them has to be given its type again. ``plgpu.kernel`` drops types so too. The
    product with one is an operation whose result has none; XLA removes it.
    """
    if not varying(tree):
        return tree
    with config._check_vma(False):
        return jax.tree.map(lambda v: v * jnp.ones((), v.dtype), tree)


def in_32_bits[**P, R](launch: Callable[P, R]) -> Callable[P, R]:
    """``launch``, traced without ``jax_enable_x64``.

    Under it a kernel's Python integers become int64, which do not mix with the int32 of its axes.
    """

    @functools.wraps(launch)
    def traced(*args: P.args, **kwargs: P.kwargs) -> R:
        with jax.enable_x64(False):
            return launch(*args, **kwargs)

    return traced


def store_few(ref: Any, value: jax.Array) -> None:
    """``ref[...] = value``, of less than whole cache lines of global memory.

    JAX 0.12 refuses these in an assignment, and asks for ``plgpu.store(optimized=False)``. JAX 0.11
    has no such function: there an assignment stores anything.
    """
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value
