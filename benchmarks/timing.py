"""Clocks of JAX programs: the device's by CUPTI, and the host's."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.rounds import Clock, batch_clock


def host_clock(call: Callable[[], Any], batch_ms: float = 30.0, most: int = 8) -> Clock:
    """``batch_clock`` of a call that returns arrays of JAX."""
    return batch_clock(call, jax.block_until_ready, batch_ms, most)


def kernel_clock(compiled: jax.stages.Compiled, args: Sequence[Any]) -> Clock:
    """Milliseconds a call by CUPTI: the sum over its kernels.

    Each sample is preceded by an untimed call. Gaps and memory copies do not count.
    """
    from jax.experimental.mosaic.gpu import profiler

    measured = profiler.Cupti(finalize=False).measure(compiled)

    def clock() -> float:
        _, ms = measured(*args)
        if not ms:
            raise RuntimeError("CUPTI recorded no kernel")
        return float(ms)

    return clock


def no_kernel_clock() -> str | None:
    """Why there is no ``kernel_clock`` here, or None."""
    if jax.default_backend() != "gpu":
        return f"the platform is {jax.default_backend()}"
    x = jnp.ones((256, 256))
    try:
        kernel_clock(jax.jit(lambda x: x @ x).lower(x).compile(), (x,))()
    except Exception as error:  # whatever is wrong with CUPTI, the host clock remains
        return f"{type(error).__name__}: {error}"
    return None
