"""Distillation from logits: soft-target cross-entropy, reverse and forward KL."""

from pallas_loss import validation
from pallas_loss._types import Array, Bool, Float, Int, Reduction
from pallas_loss.losses import FORWARD_KL, REVERSE_KL, SOFT_CROSS_ENTROPY, RowLoss, SoftTarget
from pallas_loss.row_inputs import row_inputs


def fused_soft_ce(
    logits: Float[Array, "*B V"],
    target_probs: Float[Array, "*B V"] | None = None,
    *,
    target_logits: Float[Array, "*B V"] | None = None,
    labels: Int[Array, "*B"] | None = None,
    where: Bool[Array, "*B"] | None = None,
    weights: Float[Array, "*B"] | None = None,
    ignore_index: int = -100,
    temperature: float | Float[Array, ""] = 1.0,
    target_temperature: float | Float[Array, ""] | None = None,
    reduction: Reduction = "mean",
    normalizer: float | Float[Array, ""] | None = None,
    inplace: bool = False,
    vocab_axis: str | tuple[str, ...] | None = None,
    token_axes: str | tuple[str | tuple[str, ...] | None, ...] = (),
    vocab_size: int | None = None,
    implementation: str | None = None,
) -> Float[Array, "*B"]:
    """Cross-entropy against soft targets, given as probabilities or as logits.

    With ``z = logits / temperature`` and ``lse = log sum_v exp(z_v)``::

        q      = target_probs,  or  softmax(target_logits / target_temperature)
        loss_t = weights_t * sum_v q_v (lse - z_v)
        dloss_t / dz_v = weights_t * (p_v sum_u q_u - q_v),      p = softmax(z)

    There is no factor ``temperature^2``. Probabilities need not sum to 1 (the top k of a teacher,
    a mask); a column with ``q_v = 0`` adds 0 even where ``z_v`` is -inf, and a target of zeros
    gives a loss and a gradient of 0. All of it is float32 whatever the dtypes.

    The target is a constant (``stop_gradient``). Under differentiation of a scalar loss one pass
    reads both arrays once and writes the gradient once, as in ``fused_ce``, which also says what
    ``reduction="none"`` and float16 cost.

    Args:
        logits: the student's, ``[*B, V]``, bfloat16, float16 or float32.
        target_probs: ``[*B, V]``, not negative (not checked), of any of these dtypes.
        target_logits: ``[*B, V]`` instead; exactly one of the two is given.
        labels: ``[*B]`` integers that only say which tokens count: not those at ``ignore_index``.
        where: tokens to count, bool or 0/1 integers.
        weights: a factor for each token's loss; a token of weight 0 does not count.
        ignore_index: the label of tokens that do not count. One that does not adds exactly 0 to the
            value and to every gradient, even if its logits are NaN.
        temperature: positive, of ``logits``; static, or a scalar array, which is differentiable
            (at the cost of a read of its own) and not checked.
        target_temperature: of ``target_logits``, a constant; None means that of ``logits``.
        reduction: ``"mean"`` divides the sum by ``sum_t weights_t`` over counted tokens (0 if there
            are none), ``"sum"`` does not, ``"none"`` returns ``[*B]``.
        normalizer: the mean's denominator instead; needs ``reduction="mean"``.
        inplace: writes the gradient over the logits, as in ``fused_ce``.
        vocab_axis, token_axes, vocab_size: the mesh axes that split V and the tokens, and V, as in
            ``fused_ce``; the target lies as the logits do.
        implementation: a backend's name, which runs or raises; None takes the first that can.

    Returns:
        The loss, float32: a scalar, or ``[*B]`` with ``reduction="none"``.

    Raises:
        ValueError, TypeError: an argument is malformed, such as a target of another vocabulary; the
            message names it.
        UnsupportedError: the named ``implementation`` cannot serve this call here.

    >>> import jax, jax.numpy as jnp
    >>> logits, target = jnp.array([[1.0, 0.0]]), jnp.array([[0.3, 0.3]])
    >>> round(float(fused_soft_ce(logits, target)), 6)
    0.487957
    >>> [round(float(d), 4) for d in jax.grad(fused_soft_ce)(logits, target)[0]]
    [0.1386, -0.1386]

    Soft targets for distillation are those of Hinton, Vinyals and Dean (arXiv:1503.02531).
    """
    if (target_probs is None) == (target_logits is None):
        raise ValueError(
            "exactly one of target_probs and target_logits must be given; got "
            + ("neither" if target_probs is None else "both")
        )
    if target_probs is not None and target_temperature is not None:
        raise ValueError(
            f"target_temperature is that of target_logits, which are not given; "
            f"got {target_temperature=}"
        )
    probs = target_probs is not None
    return _against_target(
        SoftTarget() if probs else SOFT_CROSS_ENTROPY,
        logits,
        target_probs if probs else target_logits,
        "probs" if probs else "logits",
        labels=labels,
        where=where,
        weights=weights,
        ignore_index=ignore_index,
        temperature=temperature,
        target_temperature=target_temperature,
        reduction=reduction,
        normalizer=normalizer,
        inplace=inplace,
        vocab_axis=vocab_axis,
        token_axes=token_axes,
        vocab_size=vocab_size,
        implementation=implementation,
    )


def fused_reverse_kl(
    logits: Float[Array, "*B V"],
    target_logits: Float[Array, "*B V"],
    *,
    labels: Int[Array, "*B"] | None = None,
    where: Bool[Array, "*B"] | None = None,
    weights: Float[Array, "*B"] | None = None,
    ignore_index: int = -100,
    temperature: float | Float[Array, ""] = 1.0,
    target_temperature: float | Float[Array, ""] | None = None,
    reduction: Reduction = "mean",
    normalizer: float | Float[Array, ""] | None = None,
    inplace: bool = False,
    vocab_axis: str | tuple[str, ...] | None = None,
    token_axes: str | tuple[str | tuple[str, ...] | None, ...] = (),
    vocab_size: int | None = None,
    implementation: str | None = None,
) -> Float[Array, "*B"]:
    """Reverse KL divergence, ``KL(p || q)`` of the student ``p`` from the target ``q``.

    With ``p = softmax(logits / temperature)`` and
    ``q = softmax(target_logits / target_temperature)``::

        K_t    = sum_v p_v (log p_v - log q_v)
        loss_t = weights_t * K_t
        dloss_t / dz_v = weights_t * p_v (log p_v - log q_v - K_t),      z = logits / temperature

    There is no factor ``temperature^2``. Everything stays in float32 logarithms, so probabilities
    that underflow do no harm. A column at -inf in both arrays adds 0 and gets no gradient; where
    ``q_v`` alone is 0 the divergence is infinite.

    Args:
        logits: the student's, ``[*B, V]``, bfloat16, float16 or float32.
        target_logits: the target's, ``[*B, V]``, a constant (``stop_gradient``).
        labels, where, weights, ignore_index, temperature, target_temperature, reduction,
            normalizer, inplace, vocab_axis, token_axes, vocab_size, implementation: as in
            ``fused_soft_ce``.

    Returns:
        The loss, float32: a scalar, or ``[*B]`` with ``reduction="none"``.

    Raises:
        ValueError, TypeError: an argument is malformed, such as a target of another vocabulary; the
            message names it.
        UnsupportedError: the named ``implementation`` cannot serve this call here.

    >>> import jax.numpy as jnp
    >>> student, teacher = jnp.array([[2.0, 0.0]]), jnp.array([[0.0, 0.0]])
    >>> round(float(fused_reverse_kl(student, teacher)), 6)
    0.327813
    >>> round(float(fused_reverse_kl(student, teacher, temperature=2.0)), 6)
    0.110944

    The direction is that of MiniLLM (arXiv:2306.08543).
    """
    return _against_target(
        REVERSE_KL,
        logits,
        target_logits,
        "logits",
        labels=labels,
        where=where,
        weights=weights,
        ignore_index=ignore_index,
        temperature=temperature,
        target_temperature=target_temperature,
        reduction=reduction,
        normalizer=normalizer,
        inplace=inplace,
        vocab_axis=vocab_axis,
        token_axes=token_axes,
        vocab_size=vocab_size,
        implementation=implementation,
    )


def fused_forward_kl(
    logits: Float[Array, "*B V"],
    target_logits: Float[Array, "*B V"],
    *,
    labels: Int[Array, "*B"] | None = None,
    where: Bool[Array, "*B"] | None = None,
    weights: Float[Array, "*B"] | None = None,
    ignore_index: int = -100,
    temperature: float | Float[Array, ""] = 1.0,
    target_temperature: float | Float[Array, ""] | None = None,
    reduction: Reduction = "mean",
    normalizer: float | Float[Array, ""] | None = None,
    inplace: bool = False,
    vocab_axis: str | tuple[str, ...] | None = None,
    token_axes: str | tuple[str | tuple[str, ...] | None, ...] = (),
    vocab_size: int | None = None,
    implementation: str | None = None,
) -> Float[Array, "*B"]:
    """Forward KL divergence, ``KL(q || p)`` of the target ``q`` from the student ``p``.

    With ``p = softmax(logits / temperature)`` and
    ``q = softmax(target_logits / target_temperature)``::

        loss_t = weights_t * sum_v q_v (log q_v - log p_v)
        dloss_t / dz_v = weights_t * (p_v - q_v),      z = logits / temperature

    the gradient of ``fused_soft_ce``, from which it differs by the entropy of ``q``. There is no
    factor ``temperature^2``. A column at -inf in both arrays adds 0 and gets no gradient; where
    ``p_v`` alone is 0 the divergence is infinite.

    Args:
        logits: the student's, ``[*B, V]``, bfloat16, float16 or float32.
        target_logits: the target's, ``[*B, V]``, a constant (``stop_gradient``).
        labels, where, weights, ignore_index, temperature, target_temperature, reduction,
            normalizer, inplace, vocab_axis, token_axes, vocab_size, implementation: as in
            ``fused_soft_ce``.

    Returns:
        The loss, float32: a scalar, or ``[*B]`` with ``reduction="none"``.

    Raises:
        ValueError, TypeError: an argument is malformed, such as a target of another vocabulary; the
            message names it.
        UnsupportedError: the named ``implementation`` cannot serve this call here.

    >>> import jax.numpy as jnp
    >>> student, teacher = jnp.array([[2.0, 0.0]]), jnp.array([[0.0, 0.0]])
    >>> round(float(fused_forward_kl(student, teacher)), 6)
    0.433781

    The direction is that of Hinton, Vinyals and Dean (arXiv:1503.02531).
    """
    return _against_target(
        FORWARD_KL,
        logits,
        target_logits,
        "logits",
        labels=labels,
        where=where,
        weights=weights,
        ignore_index=ignore_index,
        temperature=temperature,
        target_temperature=target_temperature,
        reduction=reduction,
        normalizer=normalizer,
        inplace=inplace,
        vocab_axis=vocab_axis,
        token_axes=token_axes,
        vocab_size=vocab_size,
        implementation=implementation,
    )


def _against_target(loss: RowLoss, logits, target, kind: str, **options) -> Float[Array, "*B"]:
    name = "target_probs" if kind == "probs" else "target_logits"
    target = validation.floating(name, target)
    value, _ = row_inputs(loss, logits, target=target, target_kind=kind, **options).loss()
    return value
