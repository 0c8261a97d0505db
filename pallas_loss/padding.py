"""Token counts rounded up, so that many of them share one compiled program."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_loss import validation
from pallas_loss._types import Array, Float, Int


def bucket_size(tokens: int) -> int:
    """The next power of two or midpoint between two: 1, 2, 3, 4, 6, 8, 12, 16, 24, ...

    >>> [bucket_size(n) for n in (0, 1, 3, 5, 20_000, 20_001, 24_577)]
    [0, 1, 3, 6, 24576, 24576, 32768]
    """
    if tokens < 2:
        return tokens
    power = 1 << (tokens - 1).bit_length()
    midpoint = power // 4 * 3
    return midpoint if tokens <= midpoint else power


def pad_to_bucket(
    x: Float[Array, "*B H"], labels: Int[Array, "*B"], ignore_index: int = -100
) -> tuple[Float[Array, "*P H"], Int[Array, "*P"]]:
    """``x`` and ``labels`` with their token axis padded to a power of two or a midpoint of two.

    The token axis is the last of ``*B``. What is added are zeros that count for nothing: labels of
    ``ignore_index``. The kernels skip such tokens (``implementation="mosaic_gpu"``), and of the
    lengths up to 2^n there are 2 n programs to compile. Pad before ``jax.jit``: inside, each length
    is traced anew before it is padded.

    Arrays of NumPy are padded by NumPy, on the host, and compile nothing.

    Args:
        x: hidden states ``[*B, H]``.
        labels: class ids ``[*B]``, or ``[*B, K]`` as ``fused_linear_logprob`` takes them.
        ignore_index: as the loss is told.

    Returns:
        ``(x, labels)``, at most half again as long.

    Raises:
        ValueError: the arrays disagree on ``*B``, or there is no token axis.
        TypeError: ``labels`` are not integers.

    >>> import numpy as np
    >>> x, labels = pad_to_bucket(np.ones((5, 2)), np.array([3, 1, 4, 1, 5]))
    >>> x.shape, labels.tolist()
    ((6, 2), [3, 1, 4, 1, 5, -100])
    """
    axis, size = token_axis(x, labels)
    added = bucket_size(size) - size
    return along(x, axis, added, 0), along(labels, axis, added, ignore_index)


def token_axis(x, labels) -> tuple[int, int]:
    """The axis of the tokens, in both, and their number."""
    validation.integer_labels(labels)
    if x.ndim < 2:
        raise ValueError(f"x must have a token axis, [*B, H]; got {validation.describe(x)}")
    if labels.shape[: x.ndim - 1] != x.shape[:-1] or labels.ndim > x.ndim:
        raise ValueError(
            f"labels must have shape {list(x.shape[:-1])}, or one more axis of candidates; x is "
            f"{validation.describe(x)}, labels are {validation.describe(labels)}"
        )
    return x.ndim - 2, x.shape[-2]


def along(v, axis: int, added: int, fill):
    """``v`` with so many ``fill`` added at the end of ``axis``."""
    if added == 0:
        return v
    padding = [(0, added if i == axis else 0) for i in range(v.ndim)]
    pad: Callable = np.pad if isinstance(v, np.ndarray) else jnp.pad
    return pad(v, padding, constant_values=fill)


# What a token that was added is told of itself, where an option is given token by token.
_PER_TOKEN = {"where": False, "weights": 0, "temperature": 1}


def in_buckets(function: Callable[..., Any], x, w, labels, **options: Any) -> Any:
    """``function(x, w, labels, **options)`` compiled once for all token counts of a bucket.

    Options given token by token are padded too, and what comes back token by token is cut.
    """
    axis, size = token_axis(x, labels)
    padded = pad_to_bucket(x, labels, options.get("ignore_index", -100))
    added = padded[0].shape[axis] - size
    for name, fill in _PER_TOKEN.items():
        v = options.get(name)
        if v is not None and jnp.ndim(v) == x.ndim - 1:
            options[name] = along(v, axis, added, fill)
    arrays = {k: v for k, v in options.items() if isinstance(v, jax.Array | np.ndarray)}
    static = tuple(sorted((k, v) for k, v in options.items() if k not in arrays))
    out = _compiled(function, static, padded[0], w, padded[1], arrays)
    cut = lambda v: jax.lax.slice_in_dim(v, 0, size, axis=axis) if v.ndim else v  # noqa: E731
    return jax.tree.map(cut, out)


@partial(jax.jit, static_argnums=(0, 1))
def _compiled(function, static, x, w, labels, arrays):
    return function(x, w, labels, **dict(static), **arrays)
