"""Cross-entropy from hidden states."""

import jax.numpy as jnp

from pallas_loss import plans, validation
from pallas_loss._types import Array, Bool, Float, Int, Layout, Reduction
from pallas_loss.api.metrics import Metrics, metrics_of
from pallas_loss.api.reduction import ReducedCrossEntropy, TokenFactors, reduce
from pallas_loss.autodiff import InForwardPlan, reduced_loss, row_statistics
from pallas_loss.inputs import linear_inputs
from pallas_loss.losses import CrossEntropy
from pallas_loss.plans import Backward


def fused_linear_ce(
    x: Float[Array, "*B H"],
    w: Float[Array, "H V"] | Float[Array, "V H"],
    labels: Int[Array, "*B"],
    *,
    bias: Float[Array, " V"] | None = None,
    where: Bool[Array, "*B"] | None = None,
    weights: Float[Array, "*B"] | None = None,
    class_weights: Float[Array, " V"] | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_soft_cap: float | None = None,
    logit_scale: float | Float[Array, ""] = 1.0,
    temperature: float | Float[Array, ""] = 1.0,
    token_scaling: bool = False,
    reduction: Reduction = "mean",
    normalizer: float | Float[Array, ""] | None = None,
    w_layout: Layout = "hv",
    compute_dtype: jnp.dtype | None = None,
    backward: Backward = "auto",
    workspace_bytes: int | None = None,
    return_metrics: bool = False,
    vocab_axis: str | tuple[str, ...] | None = None,
    token_axes: str | tuple[str | tuple[str, ...] | None, ...] = (),
    vocab_size: int | None = None,
    implementation: str | None = None,
) -> Float[Array, "*B"] | tuple[Float[Array, "*B"], Metrics]:
    """Cross-entropy of a linear head, without ever storing the logits.

    With ``s = logit_scale * (x @ w + bias)`` and ``c = logit_soft_cap``::

        z      = c * tanh(s / c) / temperature          (z = s / temperature without a soft cap)
        lse    = log sum_v exp(z_v)
        loss_t = weights_t * ((1 - e) * cw_y * (lse - z_y) + e/V * sum_v cw_v (lse - z_v)
                              + z_loss * lse^2)

    where ``y`` is the token's label, ``e`` is ``label_smoothing`` and ``cw`` are
    ``class_weights``. Logits, ``lse`` and the loss are float32 whatever the dtype of the input;
    products accumulate in float32, and float32 input is multiplied in float32, not in TF32.

    A token counts unless its label is ``ignore_index``, its ``where`` is False or its weight is 0.
    One that does not adds exactly 0 to the value and to every gradient, even if its ``x`` is NaN;
    the implementation ``mosaic_gpu`` spends no product on it (tokens go by 256 there), whatever the
    mask, which is data.
    A label outside [0, V) that is not ``ignore_index`` makes its token's loss and gradient NaN
    (``check_labels`` raises instead).

    Differentiable once, in reverse mode, in ``x``, ``w``, ``bias``, ``weights``, and in
    ``logit_scale`` and ``temperature`` given as arrays. ``class_weights`` are constants
    (``stop_gradient``). A gradient has its argument's dtype and comes from a float32 accumulator;
    one that is not asked for is not computed.

    **On a mesh.** ``vocab_axis`` splits V and ``token_axes`` the tokens over devices. The value is
    that of one device, mean and metrics included: denominators and counts are sums over all
    tokens. Labels are ids in the whole vocabulary.

    * Under ``jax.jit`` and ``jax.set_mesh``, arrays are whole, axes Auto or Explicit, and ``w``,
      ``bias`` and ``class_weights`` lie sharded over ``vocab_axis``, rows over ``token_axes``.
      Explicit axes need not be named: types tell. A ``w`` sharded on H too is gathered at each
      use; one whose V is also split by axes of the tokens, over those. A V that ``vocab_axis``
      does not divide is padded inside, which costs a copy of ``w`` and of ``dw``: better to keep
      a padded parameter and say ``vocab_size``.
    * In the caller's ``shard_map``, where the axes are manual, arrays are this device's shards. A
      scalar result is the global one, on every device. With ``check_vma`` gradients are right
      taken inside or outside. Without it take them outside: inside, JAX differentiates the sum
      of all devices' results, so each is too large by their number, and a replicated argument's
      is the sum over its copies. Nothing then tells a shard of ``w`` from all of it, so
      ``vocab_size`` is required.

    Each device sends the row sums of its columns, a few ``[T]`` vectors in one all-gather; the
    backward adds up ``dx`` over ``vocab_axis``, in float32, and ``dw`` over ``token_axes``, in its
    own dtype. Where ``token_axes`` has ``vocab_axis`` too (sequence parallelism), ``x`` is gathered
    over it and ``dx`` scattered.

    Args:
        x: hidden states ``[*B, H]``, bfloat16, float16 or float32.
        w: the head's weight, ``[H, V]``, or ``[V, H]`` with ``w_layout="vh"``.
        labels: class ids ``[*B]``, any integer dtype.
        bias: added to ``x @ w``; -inf removes a class, but not under a soft cap, which makes it -c.
        where: tokens to count, bool or 0/1 integers.
        weights: a factor for each token's loss.
        class_weights: a factor for each class. Weighs the label's term and, with smoothing, each
            class's; not the z-loss.
        ignore_index: the label of tokens that do not count.
        label_smoothing: in [0, 1]; the target is ``(1 - e) 1_y + e/V``.
        z_loss: coefficient of ``lse^2``.
        logit_soft_cap: positive, or None.
        logit_scale: a number other than 0, static, or a scalar array, which is differentiable.
            With a soft cap its gradient is read off that of ``x`` and shares its rounding.
        temperature: positive; static, or a scalar array, which is differentiable. A new static
            number compiles anew, a new array does not. An array is not checked: a value <= 0
            gives what the formula gives.
        token_scaling: multiplies a token's loss by its label's probability, held constant.
        reduction: ``"mean"`` divides the sum by ``sum_t weights_t * cw_y`` over counted tokens (0
            if there are none), ``"sum"`` does not, ``"none"`` returns ``[*B]``.
        normalizer: the mean's denominator instead, such as the token count of all the
            micro-batches or devices that share a step. Needs ``reduction="mean"``.
        w_layout: ``"hv"`` (a Flax ``Linear.kernel``) or ``"vh"`` (a tied ``Embed.embedding``, or
            Hugging Face); neither is transposed in memory.
        compute_dtype: the dtype of the operands of the products; default that of ``x`` and ``w``
            promoted. float32 parameters with bfloat16 here get a ``dw`` that was never rounded to
            bfloat16.
        backward: how gradients are made. ``"recompute"`` forms the logits again: four products of
            T H V, and per-row sums are all that is kept. ``"in_forward"`` makes the gradients of a
            loss that is one number while its value is computed: three products, and
            ``e^(z - z_y)`` of a chunk of tokens is kept meanwhile, T V 2 bytes for all (4 with
            float32). It cannot serve ``reduction="none"``, float16, smoothing under a soft cap, nor
            a traced ``logit_scale`` under one. ``"auto"`` takes it where it can serve, the
            implementation is ``mosaic_gpu``, and ``workspace_bytes`` holds all tokens or chunks of
            2048 or more (over a mesh, and where token_axes has ``vocab_axis`` too, all that a
            device sweeps); else it recomputes. The choice and its price are logged
            (``pallas_loss`` at INFO). Without differentiation all are the same. A call in which
            some logit lies more than 55 above its label's is computed by recompute after all, at
            the cost of five products, or seven where tokens go by in chunks.
        workspace_bytes: bounds what ``in_forward`` keeps: the chunk's exponentials and, with more
            than one chunk, the float32 sum of ``dw``, 4 H V bytes unless ``w`` is float32. None
            is 1/32 of the device's memory. A chunk of n tokens costs 230/n more time.
        return_metrics: also return ``Metrics``.
        vocab_axis: the mesh axis, or axes, that split the vocabulary; see *On a mesh*.
        token_axes: the mesh axes that split the tokens, one entry for each axis of ``labels`` as in
            a ``PartitionSpec``; all of them split the one axis of labels ``[T]``.
        vocab_size: V, where ``w`` has columns to spare: those at or past it are no classes and get
            no gradient. Costs a copy of the part of ``w`` that has them.
        implementation: a backend's name, which runs or raises; None takes the first that can.

    Returns:
        The loss, float32: a scalar, or ``[*B]`` with ``reduction="none"``. With
        ``return_metrics``, ``(loss, metrics)``.

    Raises:
        ValueError, TypeError: an argument is malformed; the message names it.
        UnsupportedError: the named ``implementation``, or ``backward="in_forward"``, cannot serve
            this call here.

    >>> import jax, jax.numpy as jnp
    >>> x = jnp.array([[1.0, 0.0], [0.0, 1.0]])
    >>> w = jnp.array([[2.0, 0.0, 0.0], [0.0, 2.0, 0.0]])
    >>> float(fused_linear_ce(x, w, jnp.array([0, 1]))).__round__(6)
    0.239545
    >>> loss, metrics = fused_linear_ce(x, w, jnp.array([0, -100]), return_metrics=True)
    >>> int(metrics.num_tokens), metrics.predictions.tolist()
    (1, [0, -1])
    >>> with jax.set_mesh(jax.make_mesh((1,), ("tp",))):  # of one device, here
    ...     loss = jax.jit(lambda w: fused_linear_ce(x, w, jnp.array([0, 1]), vocab_axis="tp"))(w)
    >>> float(loss).__round__(6)
    0.239545

    The logit soft cap is that of Gemma 2 (arXiv:2408.00118), the z-loss that of PaLM
    (arXiv:2204.02311), token scaling that of DFT (arXiv:2508.05629).
    """
    validation.one_of("reduction", reduction, ("mean", "sum", "none"))
    validation.one_of("backward", backward, ("auto", "recompute", "in_forward"))
    if workspace_bytes is not None:
        workspace_bytes = validation.static_integer("workspace_bytes", workspace_bytes)
        validation.positive("workspace_bytes", workspace_bytes)
    normalizer = validation.mean_normalizer(normalizer, reduction)
    label_smoothing = validation.smoothing(label_smoothing)
    loss = CrossEntropy(
        label_smoothing, validation.static_number("z_loss", z_loss), bool(token_scaling)
    )
    inputs = linear_inputs(
        x,
        w,
        labels,
        bias=bias,
        where=where,
        weights=weights,
        class_weights=class_weights,
        class_weights_by_column=bool(label_smoothing),
        ignore_index=ignore_index,
        logit_soft_cap=logit_soft_cap,
        logit_scale=logit_scale,
        temperature=temperature,
        w_layout=w_layout,
        compute_dtype=compute_dtype,
        vocab_axis=vocab_axis,
        token_axes=token_axes,
        vocab_size=vocab_size,
        implementation=implementation,
    )
    normalizer = inputs.placement.of_all_tokens("normalizer", normalizer)
    factors = TokenFactors(inputs.counted, inputs.weights, inputs.label_weights, normalizer)
    if reduction == "mean" and normalizer is None:
        factors = factors._replace(normalizer=inputs.total(factors.weights()))

    linear = inputs.plan(loss.statistics, argmax=return_metrics)
    plan = plans.choose(
        backward, workspace_bytes, linear.backend, inputs.problem, inputs.operands,
        _obstacle(loss, reduction, logit_soft_cap),
        inputs.placement.share(*inputs.operands.sizes(w_layout)[::2]),
        inputs.placement.one_chunk,
    )  # fmt: skip
    value = None
    if plan.name == "in_forward":
        in_forward = InForwardPlan(
            linear, ReducedCrossEntropy(loss), plan.token_chunk, inputs.placement
        )
        inside = inputs.placement.into(factors, inputs.operands)
        value, stats = inputs.placement.out_of(reduced_loss(in_forward, inputs.operands, inside))
        value = inputs.placement.over_devices(value)
        if not return_metrics:
            return value
    else:
        stats = inputs.placement.out_of(row_statistics(linear, inputs.operands))
    terms = ReducedCrossEntropy(loss).per_token(stats, factors)
    nll, z_term = (
        reduce(term, reduction, factors.normalizer, inputs.batch, inputs.placement)
        for term in terms
    )
    if value is None:
        value = nll + z_term if loss.z_loss else nll
    if not return_metrics:
        return value
    return value, metrics_of(inputs, nll, z_term, stats["argmax"], stats["lse"])


def _obstacle(loss: CrossEntropy, reduction: Reduction, logit_soft_cap) -> str | None:
    """What this loss has against the plan ``in_forward``."""
    if reduction == "none":
        return "reduction='none' leaves each token's cotangent to the backward"
    if loss.label_smoothing and logit_soft_cap is not None:
        return "label smoothing adds to every column what the soft cap's slope would multiply"
    return None
