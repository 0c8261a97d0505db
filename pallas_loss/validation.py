"""Checks of the arguments, before any work. A message names the argument and prints the value."""

from numbers import Integral, Real

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify
from jax.typing import ArrayLike

from pallas_loss._types import Int, Layout

FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32)


def describe(a) -> str:
    """``float32[4, 8]``."""
    return f"{a.dtype}{list(a.shape)}"


def array(name: str, a) -> jax.Array:
    """``a`` as an array, or TypeError."""
    try:
        return jnp.asarray(a)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be an array, got {type(a).__name__}: {error}") from None


def floating(name: str, a) -> jax.Array:
    """An array of one of the supported floating dtypes."""
    a = array(name, a)
    if a.dtype not in FLOATS:
        allowed = ", ".join(jnp.dtype(d).name for d in FLOATS)
        raise TypeError(f"{name} must have dtype {allowed}; got {describe(a)}")
    return a


def of_shape(name: str, a, shape: tuple[int, ...], why: str) -> None:
    """Raises unless ``a`` has this shape; ``why`` says where the shape comes from."""
    if a.shape != shape:
        raise ValueError(f"{name} must have shape {list(shape)} ({why}); got {describe(a)}")


def linear_shapes(x, w, labels, layout: Layout) -> tuple[int, int, int]:
    """``(T, H, V)`` of a loss from hidden states, or ValueError."""
    if layout not in ("hv", "vh"):
        raise ValueError(f"w_layout must be 'hv' or 'vh', got {layout!r}")
    if x.ndim < 1:
        raise ValueError(f"x must have shape [*B, H]; got {describe(x)}")
    if w.ndim != 2:
        raise ValueError(f"w must have two axes ({layout}); got {describe(w)}")
    h, v = w.shape if layout == "hv" else w.shape[::-1]
    if v == 0:
        raise ValueError(f"w has an empty vocabulary: {describe(w)} with w_layout={layout!r}")
    if h == 0 or x.shape[-1] != h:
        raise ValueError(
            f"x and w disagree on H: x is {describe(x)}, w is {describe(w)} with "
            f"w_layout={layout!r}, so H should be {h}" + ("; H must not be 0" if h == 0 else "")
        )
    integer_labels(labels)
    of_shape("labels", labels, x.shape[:-1], f"x is {describe(x)}")
    return int(np.prod(x.shape[:-1], dtype=np.int64)), h, v


def integer_labels(labels) -> None:
    """TypeError unless the labels are integers."""
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"labels must be integers, got {describe(labels)}")


def one_of(name: str, value, allowed) -> None:
    """ValueError unless ``value`` is one of ``allowed``."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {value!r}")


def static_number(name: str, value) -> float:
    """A Python number; a traced value cannot decide what is compiled."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"{name} must be a Python number, got a traced {describe(value)}")
    if isinstance(value, bool) or not (
        isinstance(value, Real | np.number)
        or (isinstance(value, jax.Array | np.ndarray) and value.ndim == 0)
    ):
        raise TypeError(f"{name} must be a Python number, got {value!r}")
    number = float(value)
    if not np.isfinite(number):
        raise ValueError(f"{name} must be finite, got {number}")
    return number


def static_integer(name: str, value) -> int:
    """A Python integer; a traced value cannot decide what is compiled."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"{name} must be a Python integer, got a traced {describe(value)}")
    if isinstance(value, bool) or not isinstance(value, Integral | np.integer):
        raise TypeError(f"{name} must be a Python integer, got {value!r}")
    return int(value)


def scalar(name: str, value) -> jax.Array:
    """A number or a scalar array, traced or not, as float32."""
    value = array(name, value)
    if value.ndim != 0 or not jnp.issubdtype(value.dtype, jnp.number):
        raise TypeError(f"{name} must be a number or a scalar; got {describe(value)}")
    return value.astype(jnp.float32)


def dtype(name: str, value) -> jnp.dtype:
    """One of the supported floating dtypes."""
    try:
        value = jnp.dtype(value)
    except TypeError:
        raise TypeError(f"{name} must be a dtype, got {value!r}") from None
    one_of(name, value, [*map(jnp.dtype, FLOATS)])
    return value


def positive(name: str, value: float) -> float:
    """ValueError unless ``value > 0``."""
    if value <= 0:
        raise ValueError(f"{name} must be positive, got {value}")
    return value


def mean_normalizer(value, reduction: str) -> jax.Array | None:
    """The mean's denominator, if one is given."""
    if value is None:
        return None
    value = scalar("normalizer", value)
    if reduction != "mean":
        raise ValueError(
            f"normalizer replaces the mean's denominator, so it needs reduction='mean'; "
            f"got {reduction=}"
        )
    return value


def soft_cap(value) -> float | None:
    """A positive ``logit_soft_cap``, or None."""
    if value is None:
        return None
    return positive("logit_soft_cap", static_number("logit_soft_cap", value))


def smoothing(value) -> float:
    """A ``label_smoothing`` in [0, 1]."""
    value = static_number("label_smoothing", value)
    if not 0 <= value <= 1:
        raise ValueError(f"label_smoothing must be in [0, 1], got {value}")
    return value


def per_class_constants(name: str, value, size: int) -> jax.Array | None:
    """``[V]`` float32 that has no gradient, or None."""
    if value is None:
        return None
    value = floating(name, value)
    of_shape(name, value, (size,), "V")
    return jax.lax.stop_gradient(value.astype(jnp.float32))


def number_or_scalar(name: str, value) -> tuple[float, jax.Array | None]:
    """A Python number as ``(number, None)``; an array as ``(1.0, float32 scalar)``."""
    if not isinstance(value, jax.Array):
        return static_number(name, value), None
    if value.ndim != 0 or not jnp.issubdtype(value.dtype, jnp.floating):
        raise TypeError(f"{name} must be a number or a floating scalar; got {describe(value)}")
    return 1.0, value.astype(jnp.float32)


def split_labels(labels, vocab: int, ignore_index: int) -> tuple[jax.Array, jax.Array]:
    """``(int32 labels, ignored)``: a label outside [0, V) becomes -1, which matches no column."""
    integer = jnp.iinfo(labels.dtype)
    if integer.min <= ignore_index <= integer.max:
        ignored = labels == jnp.asarray(ignore_index, labels.dtype)
    else:
        ignored = jnp.zeros(labels.shape, bool)
    in_range = labels >= jnp.asarray(0, labels.dtype)
    if vocab <= integer.max:
        in_range &= labels < jnp.asarray(vocab, labels.dtype)
    return jnp.where(in_range, labels.astype(jnp.int32), -1), ignored


def check_labels(labels: Int[ArrayLike, "..."], vocab: int, *, ignore_index: int = -100) -> None:
    """Raises if a label is neither in [0, V) nor ``ignore_index``.

    The losses poison such a token with NaN, since a jitted function cannot raise; call this where
    an error is wanted. Inside ``jax.jit`` it takes effect under ``jax.experimental.checkify``.

    Args:
        labels: integers of any shape.
        vocab: the size V of the vocabulary.
        ignore_index: the mark of ignored tokens.

    Raises:
        TypeError: ``labels`` are not integers.
        ValueError: a concrete label is out of range (``checkify.JaxRuntimeError`` when traced).

    >>> import jax.numpy as jnp
    >>> check_labels(jnp.array([0, 4, -100]), 5)
    >>> check_labels(jnp.array([0, 5]), 5)
    Traceback (most recent call last):
        ...
    ValueError: labels must be in [0, 5) or ignore_index=-100; 1 of 2 is not, the first is 5
    """
    labels = array("labels", labels)
    integer_labels(labels)
    safe, ignored = split_labels(labels, vocab, ignore_index)
    bad = ((safe < 0) & ~ignored).reshape(-1)
    if isinstance(bad, jax.core.Tracer):
        first = labels.reshape(-1)[jnp.argmax(bad)] if bad.size else jnp.zeros((), labels.dtype)
        checkify.check(
            ~jnp.any(bad),
            f"labels must be in [0, {vocab}) or {ignore_index=}; the first that is not: {{first}}",
            first=first,
        )
    elif count := int(jnp.sum(bad)):
        first = labels.reshape(-1)[int(jnp.argmax(bad))]
        raise ValueError(
            f"labels must be in [0, {vocab}) or {ignore_index=}; {count} of {bad.size} "
            f"{'is' if count == 1 else 'are'} not, the first is {first}"
        )
