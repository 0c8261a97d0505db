"""The language-model head for Flax NNX: logits to sample from, losses that never make them."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from pallas_loss import padding, validation
from pallas_loss._types import Array, Float, Int, Layout
from pallas_loss.api import LogProbs, fused_linear_ce, fused_linear_logprob
from pallas_loss.backends import sweep
from pallas_loss.backends.base import LinearOperands, LinearProblem
from pallas_loss.losses import LogitTransform

try:
    from flax import nnx
except ImportError as error:
    raise ImportError("pallas_loss.nnx needs Flax: pip install pallas_loss[nnx]") from error


class LMHead(nnx.Module):
    """The last layer of a language model, ``z = softcap(x @ w + b)``.

    ``head(x)`` gives the logits ``[*B, V]``, for sampling. ``head.loss(x, labels)`` is their cross
    entropy through :func:`pallas_loss.fused_linear_ce`, and ``head.logprob(x, labels)`` the labels'
    log-probabilities through :func:`pallas_loss.fused_linear_logprob`; no logits reach memory.

    An untied head owns ``kernel [H, V]``. A tied head owns no weight: it reads the table ``[V, H]``
    of the embedding when it is called, without a transposed copy, so the model's state holds one
    parameter that receives the gradients of both uses. It also survives ``nnx.split`` and
    ``nnx.merge`` of the model that holds the two, and a table replaced after the head was built.

    Args:
        hidden: ``H``, the width of ``x``.
        vocab: ``V``, the number of classes.
        tie_to: the ``nnx.Embed(vocab, hidden)`` whose table is this head's weight.
        use_bias: adds a bias ``[V]``, which starts at zero.
        logit_soft_cap: ``c`` of ``softcap(z) = c tanh(z / c)``; None for no cap.
        dtype: dtype in which ``x`` and the weight are multiplied; None promotes the two. Sums,
            logits and loss are float32 either way.
        param_dtype: dtype of the parameters that the head owns.
        vocab_axis: the mesh axis, or axes, over which the vocabulary is split. The kernel is made
            with the sharding ``(None, vocab_axis)`` on the mesh in use, the bias with
            ``(vocab_axis,)``; a tied table is split by whoever owns it.
        token_axes: the mesh axes of each axis of the tokens, as in ``fused_linear_ce``.
        bucket: pads the token axis, the one before ``H``, of :meth:`loss` and :meth:`logprob` as
            :func:`pallas_loss.pad_to_bucket` does and compiles them once a bucket, where they are
            called outside ``jax.jit``. Values and gradients are those of the tokens given.
        rngs: source of the initial weight.

    Raises:
        ValueError: ``hidden``, ``vocab`` or ``logit_soft_cap`` is not positive, the table of
            ``tie_to`` is not ``[vocab, hidden]``, or ``vocab`` does not divide over ``vocab_axis``.
        TypeError: ``tie_to`` is not an ``nnx.Embed``.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from pallas_loss.nnx import LMHead, next_token_labels
        >>> embed = nnx.Embed(11, 4, rngs=nnx.Rngs(0))
        >>> head = LMHead(4, 11, tie_to=embed, rngs=nnx.Rngs(1))
        >>> tokens = jnp.array([[5, 6, 7, 8]])
        >>> hidden = embed(tokens)
        >>> head(hidden).shape
        (1, 4, 11)
        >>> head.loss(hidden, next_token_labels(tokens)).shape
        ()
    """

    def __init__(
        self,
        hidden: int,
        vocab: int,
        *,
        tie_to: nnx.Embed | None = None,
        use_bias: bool = False,
        logit_soft_cap: float | None = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        vocab_axis: str | tuple[str, ...] | None = None,
        token_axes: str | tuple[str | tuple[str, ...] | None, ...] = (),
        bucket: bool = False,
        rngs: nnx.Rngs,
    ) -> None:
        if hidden < 1 or vocab < 1:
            raise ValueError(f"hidden and vocab must be positive, got {hidden=} and {vocab=}")
        if logit_soft_cap is not None:
            validation.positive("logit_soft_cap", logit_soft_cap)
        if tie_to is not None:
            if not isinstance(tie_to, nnx.Embed):
                raise TypeError(f"tie_to must be an nnx.Embed, got {type(tie_to).__name__}")
            table = tie_to.embedding
            validation.of_shape("tie_to.embedding", table, (vocab, hidden), "[vocab, hidden]")
        self.hidden = hidden
        self.vocab = vocab
        self.logit_soft_cap = logit_soft_cap
        self.dtype = dtype
        self.vocab_axis = vocab_axis
        self.token_axes = token_axes
        self.bucket = bucket
        self.tie_to = nnx.data(tie_to)
        if tie_to is None:
            init = nnx.initializers.lecun_normal()
            kernel = init(rngs.params(), (hidden, vocab), param_dtype)
            self.kernel = nnx.Param(kernel, **self._sharding(None, vocab_axis))
        bias = None
        if use_bias:
            bias = nnx.Param(jnp.zeros((vocab,), param_dtype), **self._sharding(vocab_axis))
        self.bias = nnx.data(bias)

    @property
    def w_layout(self) -> Layout:
        """Layout of :attr:`weight`: ``"vh"`` when tied, else ``"hv"``."""
        return "hv" if self.tie_to is None else "vh"

    @property
    def weight(self) -> Float[Array, "H V"] | Float[Array, "V H"]:
        """The weight in use, in the layout in which it is stored."""
        return self.kernel[...] if self.tie_to is None else self.tie_to.embedding[...]

    def __call__(self, x: Float[Array, "*B H"]) -> Float[Array, "*B V"]:
        """Logits for sampling, float32: the numbers whose cross entropy :meth:`loss` is.

        Raises:
            TypeError: ``x`` is not bfloat16, float16 or float32.
            ValueError: the last axis of ``x`` is not ``hidden``.
        """
        x, w = validation.floating("x", x), self.weight
        if x.shape[-1:] != (self.hidden,):
            raise ValueError(f"x must end in hidden = {self.hidden}, got {validation.describe(x)}")
        problem = LinearProblem(
            self.w_layout,
            jnp.dtype(self.dtype or jnp.promote_types(x.dtype, w.dtype)),
            LogitTransform(soft_cap=self.logit_soft_cap),
        )
        rows = x.reshape(-1, self.hidden)
        no_labels = jnp.zeros(len(rows), jnp.int32)
        z, _ = sweep.logits(problem, LinearOperands(rows, w, no_labels, bias=self._bias()))
        return z.reshape(*x.shape[:-1], self.vocab)

    def loss(self, x: Float[Array, "*B H"], labels: Int[Array, "*B"], **options: Any) -> Any:
        """Cross entropy of the logits against ``labels``, ``-log softmax(z)[label]``.

        Labels are taken as they are and never shifted: position ``i`` is scored against
        ``labels[i]``. :func:`next_token_labels` makes them from tokens.

        Args:
            x: hidden states ``[*B, H]``.
            labels: class ids ``[*B]``, any integer dtype.
            **options: every keyword of :func:`pallas_loss.fused_linear_ce` but ``w_layout``, which
                belongs to the weight. ``bias``, ``logit_soft_cap``, ``compute_dtype`` and the
                mesh axes are the head's own unless given here.

        Returns:
            What ``fused_linear_ce`` returns: a float32 scalar, ``[*B]`` with ``reduction="none"``,
            or ``(loss, metrics)`` with ``return_metrics=True``.

        Raises:
            ValueError, TypeError: as ``fused_linear_ce``.
        """
        return self._call(fused_linear_ce, x, labels, options)

    def logprob(
        self,
        x: Float[Array, "*B H"],
        labels: Int[Array, "*B"] | Int[Array, "*B K"],
        **options: Any,
    ) -> LogProbs:
        """Log-probabilities of ``labels``, ``log softmax(z / temperature)[label]``, token by token.

        For objectives that weigh every token by a number of its own, such as policy gradients:
        each output is differentiable, with a cotangent per token. Labels are not shifted.

        Args:
            x: hidden states ``[*B, H]``.
            labels: class ids ``[*B]``, such as the tokens sampled, or ``[*B, K]``, K candidates a
                token; any integer dtype.
            **options: every keyword of :func:`pallas_loss.fused_linear_logprob` but ``w_layout``,
                with the head's own defaults as in :meth:`loss`.

        Returns:
            ``LogProbs``: ``logprob`` of the shape of ``labels``, ``entropy [*B]`` with
            ``entropy=True`` (else None) and ``lse [*B]``, each float32.

        Raises:
            ValueError, TypeError: as ``fused_linear_logprob``.

        Example:
            >>> import jax, jax.numpy as jnp
            >>> from flax import nnx
            >>> from pallas_loss.nnx import LMHead
            >>> head = LMHead(4, 11, rngs=nnx.Rngs(0))
            >>> x, sampled = jnp.ones((2, 3, 4)), jnp.array([[1, 2, -100], [3, -100, -100]])
            >>> out = head.logprob(x, sampled, temperature=0.7, entropy=True)
            >>> out.logprob.shape, out.entropy.shape, out.logprob[0, 2].item()
            ((2, 3), (2, 3), 0.0)
            >>> log_p = jax.nn.log_softmax(head(x) / 0.7)
            >>> bool(jnp.allclose(out.logprob[0, 0], log_p[0, 0, 1]))
            True
        """
        return self._call(fused_linear_logprob, x, labels, options)

    def _call(self, function: Callable[..., Any], x, labels, options: dict[str, Any]) -> Any:
        options = self._own_options() | options
        call = partial(padding.in_buckets, function) if self.bucket else function
        return call(x, self.weight, labels, w_layout=self.w_layout, **options)

    def _own_options(self) -> dict[str, Any]:
        return {
            "bias": self._bias(),
            "logit_soft_cap": self.logit_soft_cap,
            "compute_dtype": self.dtype,
            "vocab_axis": self.vocab_axis,
            "token_axes": self.token_axes,
            "vocab_size": self.vocab,
        }

    def _sharding(self, *axes: str | tuple[str, ...] | None) -> dict[str, Any]:
        """What Flax is told about a parameter: nothing without a mesh axis."""
        if self.vocab_axis is None:
            return {}
        mesh = jax.sharding.get_abstract_mesh()
        names = (self.vocab_axis,) if isinstance(self.vocab_axis, str) else self.vocab_axis
        devices = math.prod(mesh.shape.get(name, 1) for name in names)
        if self.vocab % devices:
            raise ValueError(
                f"vocab = {self.vocab} does not divide over the {devices} devices of "
                f"vocab_axis={self.vocab_axis!r}: give the head columns to spare and its losses "
                "vocab_size="
            )
        return {"out_sharding": axes}

    def _bias(self) -> Float[Array, " V"] | None:
        return None if self.bias is None else self.bias[...]


def next_token_labels(
    tokens: Int[ArrayLike, "*B S"],
    segment_ids: Int[ArrayLike, "*B S"] | None = None,
    ignore_index: int = -100,
) -> Int[Array, "*B S"]:
    """Labels that ask each position for the token after it, within its document.

    ``labels[..., i] = tokens[..., i + 1]``; ``ignore_index`` at the last position and wherever
    ``segment_ids`` changes between ``i`` and ``i + 1``.

    Args:
        tokens: token ids ``[*B, S]``, any integer dtype. Labels are int32, which ``ignore_index``
            fits, or int64 where the tokens take 64 bits.
        segment_ids: the document of each token, ``[*B, S]``; None where each row is one document.
        ignore_index: the label of a position that has nothing to predict.

    Raises:
        TypeError: ``tokens`` are not integers.
        ValueError: ``tokens`` are a scalar, or ``segment_ids`` differ from them in shape.

    Example:
        >>> import jax.numpy as jnp
        >>> from pallas_loss.nnx import next_token_labels
        >>> tokens, segment_ids = jnp.array([5, 6, 7, 8, 9]), jnp.array([0, 0, 0, 1, 1])
        >>> next_token_labels(tokens, segment_ids).tolist()
        [6, 7, -100, 9, -100]
    """
    tokens = validation.array("tokens", tokens)
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise TypeError(f"tokens must be integers, got {validation.describe(tokens)}")
    if tokens.ndim == 0:
        raise ValueError("tokens must be [*B, S], got a scalar")
    position = jax.lax.broadcasted_iota(jnp.int32, tokens.shape, tokens.ndim - 1)
    counted = position < tokens.shape[-1] - 1
    if segment_ids is not None:
        segment_ids = validation.array("segment_ids", segment_ids)
        validation.of_shape("segment_ids", segment_ids, tokens.shape, "as tokens")
        counted &= segment_ids == jnp.roll(segment_ids, -1, axis=-1)
    dtype = jnp.int64 if tokens.dtype.itemsize == 8 else jnp.int32
    return jnp.where(counted, jnp.roll(tokens, -1, axis=-1).astype(dtype), ignore_index)
