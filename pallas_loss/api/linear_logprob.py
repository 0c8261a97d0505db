"""Log-probabilities and entropy from hidden states."""

from typing import Literal, NamedTuple

import jax.numpy as jnp

from pallas_loss import validation
from pallas_loss._types import Array, Bool, Float, Int, Layout
from pallas_loss.autodiff import row_statistics
from pallas_loss.inputs import linear_inputs
from pallas_loss.losses import NLL, Entropy, LogSumExp


class LogProbs(NamedTuple):
    """What ``fused_linear_logprob`` returns, each float32 ``[*B]``, 0 where a token does not count.

    Attributes:
        logprob: ``log p_y``, never positive; ``[*B, K]`` with K labels a token.
        entropy: ``-sum_v p_v log p_v`` in nats, between 0 and ``log V``; None unless asked for.
        lse: ``log sum_v exp(z_v)``.
    """

    logprob: Float[Array, "*B"] | Float[Array, "*B K"]
    entropy: Float[Array, "*B"] | None
    lse: Float[Array, "*B"]


def fused_linear_logprob(
    x: Float[Array, "*B H"],
    w: Float[Array, "H V"] | Float[Array, "V H"],
    labels: Int[Array, "*B"] | Int[Array, "*B K"],
    *,
    bias: Float[Array, " V"] | None = None,
    where: Bool[Array, "*B"] | None = None,
    ignore_index: int = -100,
    logit_soft_cap: float | None = None,
    logit_scale: float | Float[Array, ""] = 1.0,
    temperature: float | Float[Array, ""] | Float[Array, "*B"] = 1.0,
    entropy: bool = False,
    backward: Literal["recompute", "stored"] = "recompute",
    w_layout: Layout = "hv",
    compute_dtype: jnp.dtype | None = None,
    vocab_axis: str | tuple[str, ...] | None = None,
    token_axes: str | tuple[str | tuple[str, ...] | None, ...] = (),
    vocab_size: int | None = None,
    implementation: str | None = None,
) -> LogProbs:
    """Log-probabilities of a linear head's labels, and the entropy of its distribution.

    With ``z = softcap(logit_scale * (x @ w + bias)) / temperature`` as in ``fused_linear_ce``::

        logprob = z_y - lse,    lse = log sum_v exp(z_v),    entropy = lse - sum_v p_v z_v

    Each output is differentiable per token, and cotangents of all three take one backward pass::

        dz = g_logprob (1_y - p) + g_lse p - g_entropy p (log p + entropy)

    A token with ``ignore_index`` or ``where`` False gives 0 and has no gradient, even if its ``x``
    is NaN. A class removed by a bias of -inf, where there is no soft cap, has no probability and
    adds 0 to the entropy. A label
    outside [0, V) that is not ``ignore_index`` makes that token's ``logprob`` NaN, and its gradient
    where the cotangent is not 0.

    Args:
        x, w, bias, where, ignore_index, logit_soft_cap, logit_scale, w_layout, compute_dtype,
            vocab_axis, token_axes, vocab_size, implementation: as in ``fused_linear_ce``.
        labels: class ids ``[*B]``, or ``[*B, K]``: K candidates a token, such as the support of a
            sampler or of a top-k teacher, in one sweep. One named twice counts twice, an ignored
            one gives 0; a token counts if any of its candidates does. Their logits are gathered
            and dotted beside the sweep, T K H work, in at most 256 MiB.
        temperature: positive; a static number, a scalar array or one number per token, which are
            differentiable and not checked.
        entropy: also return the entropy. Without it no work is done for it.
        backward: ``"recompute"`` forms the logits again in the backward: four products of T H V,
            and per-row sums are all that is kept. ``"stored"`` keeps ``e^(z - m)`` in bfloat16
            from the forward, T V 2 bytes, and needs three; its d-logits carry one more rounding to
            bfloat16. Without differentiation the two are the same.

    Returns:
        ``LogProbs``.

    Raises:
        ValueError, TypeError: an argument is malformed; the message names it.
        UnsupportedError: the named ``implementation`` cannot serve this call here.

    >>> import jax.numpy as jnp
    >>> out = fused_linear_logprob(jnp.ones((2, 3)), jnp.zeros((3, 4)), jnp.array([1, -100]),
    ...                            entropy=True)
    >>> [round(float(v), 4) for v in out.logprob], [round(float(v), 4) for v in out.entropy]
    ([-1.3863, 0.0], [1.3863, 0.0])
    """
    validation.one_of("backward", backward, ("recompute", "stored"))
    inputs = linear_inputs(
        x,
        w,
        labels,
        bias=bias,
        where=where,
        ignore_index=ignore_index,
        logit_soft_cap=logit_soft_cap,
        logit_scale=logit_scale,
        temperature=temperature,
        temperature_per_token=True,
        candidates=True,
        w_layout=w_layout,
        compute_dtype=compute_dtype,
        vocab_axis=vocab_axis,
        token_axes=token_axes,
        vocab_size=vocab_size,
        implementation=implementation,
    )
    several = inputs.operands.candidates is not None
    wanted = (LogSumExp(), *(() if several else (NLL(),)), *((Entropy(),) if entropy else ()))
    plan = inputs.plan(wanted, store=backward == "stored")
    stats = inputs.placement.out_of(row_statistics(plan, inputs.operands))
    per_token = lambda v: inputs.unflatten(inputs.zero_uncounted(v))  # noqa: E731
    return LogProbs(
        logprob=inputs.unflatten(inputs.zero_absent(stats["candidate_logprob"]))
        if several
        else per_token(-stats["nll"]),
        entropy=per_token(stats["entropy"]) if entropy else None,
        lse=per_token(stats["lse"]),
    )
