"""Cross-entropy from logits."""

from typing import cast

import jax
import jax.numpy as jnp

from pallas_loss import validation
from pallas_loss._types import Array, Bool, Float, Int, Reduction
from pallas_loss.api.metrics import Metrics, metrics_of
from pallas_loss.api.reduction import reduce
from pallas_loss.losses import CrossEntropy, LabelLoss
from pallas_loss.row_inputs import RowInputs, row_inputs


def fused_ce(
    logits: Float[Array, "*B V"],
    labels: Int[Array, "*B"],
    *,
    where: Bool[Array, "*B"] | None = None,
    weights: Float[Array, "*B"] | None = None,
    class_weights: Float[Array, " V"] | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_soft_cap: float | None = None,
    temperature: float | Float[Array, ""] = 1.0,
    token_scaling: bool = False,
    reduction: Reduction = "mean",
    normalizer: float | Float[Array, ""] | None = None,
    inplace: bool = False,
    return_metrics: bool = False,
    vocab_axis: str | tuple[str, ...] | None = None,
    token_axes: str | tuple[str | tuple[str, ...] | None, ...] = (),
    vocab_size: int | None = None,
    implementation: str | None = None,
) -> Float[Array, "*B"] | tuple[Float[Array, "*B"], Metrics]:
    """Cross-entropy of logits that are in memory, at the speed of memory.

    With ``c = logit_soft_cap``::

        z      = c * tanh(logits / c) / temperature          (logits / temperature without a cap)
        lse    = log sum_v exp(z_v)
        loss_t = weights_t * ((1 - e) * cw_y * (lse - z_y) + e/V * sum_v cw_v (lse - z_v)
                              + z_loss * lse^2)

    where ``y`` is the token's label, ``e`` is ``label_smoothing`` and ``cw`` are
    ``class_weights``. All of it is float32 whatever the dtype of the logits.

    A scalar loss under differentiation reads the logits once and writes their gradient once: the
    weights and the denominator are folded in, and a cotangent of 1 costs no further pass. With
    ``reduction="none"``, and for float16, whose range is too small to fold a mean in, the forward
    keeps sums and the backward reads once more. Without differentiation there is one read.
    The Mosaic kernel keeps a row of at most 98304 bfloat16 columns on the chip (49152 beside a
    target); of a longer one it reads a part again, from L2 as far as it is still there.
    Nothing of size ``[T, V]`` is made but the gradient. That kernel wants V in multiples of 64:
    another (V = 50257) costs it a padded copy, one more read and write.

    A token counts unless its label is ``ignore_index``, its ``where`` is False or its weight is 0.
    One that does not adds exactly 0 to the value and to every gradient, even if its logits are
    NaN. A label outside [0, V) that is not ``ignore_index`` makes its token's loss and gradient NaN
    (``check_labels`` raises instead).

    Differentiable once, in reverse mode, in ``logits``, ``weights``, and ``temperature`` given as
    an array, whose gradient takes a read of its own. ``class_weights`` are constants
    (``stop_gradient``).

    Args:
        logits: ``[*B, V]``, bfloat16, float16 or float32; -inf removes a class, but not under a
            soft cap, which makes it -c.
        labels: class ids ``[*B]``, any integer dtype.
        where, weights, class_weights, ignore_index, label_smoothing, z_loss, logit_soft_cap,
            token_scaling, reduction, normalizer: as in ``fused_linear_ce``.
        temperature: positive; static, or a scalar array, which is differentiable and not checked.
        inplace: writes the gradient over the logits. It saves their memory where nothing else
            needs them (``jax.jit`` with the logits donated, or made in the same program); elsewhere
            XLA copies them first.
        return_metrics: also return ``Metrics``, here constants.
        vocab_axis, token_axes: the mesh axes that split V and the tokens, under ``jax.set_mesh`` or
            in the caller's ``shard_map``, as in ``fused_linear_ce`` (*On a mesh*). Row sums are all
            that travels: a gradient stays where its logits are. A split row's needs the sums of all
            parts, so it takes a second read. A V that ``vocab_axis`` does not divide is padded
            inside, which costs a copy. An axis splits V or the tokens, not both.
        vocab_size: V, where the logits have columns to spare: those at or past it are no classes
            and get a gradient of 0. Costs a copy of the part that has them. Required in a
            ``shard_map`` without ``check_vma`` that splits V.
        implementation: a backend's name, which runs or raises; None takes the first that can.

    Returns:
        The loss, float32: a scalar, or ``[*B]`` with ``reduction="none"``. With
        ``return_metrics``, ``(loss, metrics)``.

    Raises:
        ValueError, TypeError: an argument is malformed; the message names it.
        UnsupportedError: the named ``implementation`` cannot serve this call here.

    >>> import jax, jax.numpy as jnp
    >>> logits = jnp.array([[2.0, 0.0, 0.0], [0.0, 2.0, 0.0]])
    >>> float(fused_ce(logits, jnp.array([0, 1]))).__round__(6)
    0.239545
    >>> jax.grad(fused_ce)(logits, jnp.array([0, -100])).round(4).tolist()[1]
    [0.0, 0.0, 0.0]

    The one-pass form, a row kept on the chip between its sums and its gradient, is that of the
    online softmax (arXiv:1805.02867).
    """
    label_smoothing = validation.smoothing(label_smoothing)
    cross_entropy = CrossEntropy(
        label_smoothing, validation.static_number("z_loss", z_loss), bool(token_scaling)
    )
    logits = validation.floating("logits", logits)
    columns = logits.shape[-1] if logits.ndim else 0
    class_weights = validation.per_class_constants("class_weights", class_weights, columns)
    inputs = row_inputs(
        LabelLoss(cross_entropy, columns),
        logits,
        labels=labels,
        where=where,
        weights=weights,
        class_weights=class_weights if label_smoothing else None,
        label_weights=class_weights,
        ignore_index=ignore_index,
        logit_soft_cap=logit_soft_cap,
        temperature=temperature,
        reduction=reduction,
        normalizer=normalizer,
        inplace=inplace,
        argmax=return_metrics,
        vocab_axis=vocab_axis,
        token_axes=token_axes,
        vocab_size=vocab_size,
        implementation=implementation,
    )
    value, sums = inputs.loss()
    return (value, _metrics(inputs, sums)) if return_metrics else value


def _metrics(inputs: RowInputs, sums) -> Metrics:
    loss = cast(LabelLoss, inputs.problem.loss)  # over the whole vocabulary
    facts, weights, denominator = jax.lax.stop_gradient(
        (inputs.operands.facts, inputs.weights, inputs.denominator)
    )
    stats = loss.statistics(sums, facts)
    nll, z_term = (
        reduce(
            jnp.where(inputs.counted, weights * term, 0.0),
            inputs.reduction,
            denominator,
            inputs.batch,
            inputs.placement,
        )
        for term in loss.terms(stats, facts)
    )
    return metrics_of(inputs, nll, z_term, sums.argmax, stats["lse"])
