"""A small decoder language model: RMSNorm, rotary attention, SwiGLU, and a head that owns the loss.

Axes: B sequences, S positions, H hidden, N heads, D = H / N.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from pallas_loss.nnx import LMHead


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of a :class:`Decoder`. Parameters are float32; ``dtype`` is what they compute in.

    On a mesh ``vocab_axis`` splits the vocabulary of head and table, ``token_axes`` the sequences.
    """

    vocab: int
    hidden: int
    layers: int
    heads: int
    mlp: int
    tied: bool = True
    logit_soft_cap: float | None = None
    rope_base: float = 10_000.0
    dtype: DTypeLike = jnp.float32
    vocab_axis: str | None = None
    token_axes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.hidden % (2 * self.heads):
            raise ValueError(
                f"hidden must be an even number per head, got {self.hidden=} and {self.heads=}"
            )


def rotary(x: Float[Array, "B S N D"], base: float) -> Float[Array, "B S N D"]:
    """Turns each pair ``(x[i], x[i + D/2])`` by an angle that grows with the position."""
    half = x.shape[-1] // 2
    frequency = base ** (-jnp.arange(half) / half)
    angle = jnp.arange(x.shape[1])[:, None, None] * frequency
    sin, cos = jnp.sin(angle).astype(x.dtype), jnp.cos(angle).astype(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class Attention(nnx.Module):
    """Causal attention within a document; queries and keys are normalised, then turned."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs) -> None:
        hidden, dtype = config.hidden, config.dtype
        self.heads, self.rope_base = config.heads, config.rope_base
        self.qkv = nnx.Linear(hidden, 3 * hidden, use_bias=False, dtype=dtype, rngs=rngs)
        self.out = nnx.Linear(hidden, hidden, use_bias=False, dtype=dtype, rngs=rngs)
        self.q_norm = nnx.RMSNorm(hidden // config.heads, dtype=dtype, rngs=rngs)
        self.k_norm = nnx.RMSNorm(hidden // config.heads, dtype=dtype, rngs=rngs)

    def __call__(
        self, x: Float[Array, "B S H"], same_document: Bool[Array, "B 1 S S"]
    ) -> Float[Array, "B S H"]:
        split = self.qkv(x).reshape(*x.shape[:2], 3, self.heads, -1)
        q, k, v = split[:, :, 0], split[:, :, 1], split[:, :, 2]
        q = rotary(self.q_norm(q), self.rope_base)
        k = rotary(self.k_norm(k), self.rope_base)
        mixed = jax.nn.dot_product_attention(q, k, v, mask=same_document, is_causal=True)
        return self.out(mixed.reshape(x.shape))


class SwiGLU(nnx.Module):
    """``(silu(x @ gate) * (x @ up)) @ down``."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs) -> None:
        hidden, mlp, dtype = config.hidden, config.mlp, config.dtype
        self.gate = nnx.Linear(hidden, mlp, use_bias=False, dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(hidden, mlp, use_bias=False, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(mlp, hidden, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "B S H"]) -> Float[Array, "B S H"]:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    """Attention, then the MLP, each added to the stream that it read through a norm."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs) -> None:
        self.attention_norm = nnx.RMSNorm(config.hidden, dtype=config.dtype, rngs=rngs)
        self.attention = Attention(config, rngs)
        self.mlp_norm = nnx.RMSNorm(config.hidden, dtype=config.dtype, rngs=rngs)
        self.mlp = SwiGLU(config, rngs)

    def __call__(
        self, x: Float[Array, "B S H"], same_document: Bool[Array, "B 1 S S"]
    ) -> Float[Array, "B S H"]:
        x = x + self.attention(self.attention_norm(x), same_document)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nnx.Module):
    """Maps tokens to hidden states; ``head`` turns those into logits or into the loss.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from models.decoder import Decoder, DecoderConfig
        >>> config = DecoderConfig(vocab=50, hidden=16, layers=1, heads=2, mlp=32)
        >>> model = Decoder(config, rngs=nnx.Rngs(0))
        >>> tokens = jnp.zeros((2, 8), jnp.int32)
        >>> hidden = model(tokens)
        >>> hidden.shape, model.head(hidden).shape, model.head.loss(hidden, tokens).shape
        ((2, 8, 16), (2, 8, 50), ())
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        split = {"out_sharding": (config.vocab_axis, None)} if config.vocab_axis else {}
        self.embed = nnx.Embed(
            config.vocab, config.hidden, dtype=config.dtype, embedding_metadata=split, rngs=rngs
        )
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.layers)])
        self.norm = nnx.RMSNorm(config.hidden, dtype=config.dtype, rngs=rngs)
        self.head = LMHead(
            config.hidden,
            config.vocab,
            tie_to=self.embed if config.tied else None,
            logit_soft_cap=config.logit_soft_cap,
            dtype=config.dtype,
            vocab_axis=config.vocab_axis,
            token_axes=config.token_axes,
            rngs=rngs,
        )

    def __call__(
        self, tokens: Int[Array, "B S"], segment_ids: Int[Array, "B S"] | None = None
    ) -> Float[Array, "B S H"]:
        """Hidden states; a token sees the tokens before it that share its ``segment_ids``."""
        if segment_ids is None:
            segment_ids = jnp.zeros_like(tokens)
        same_document = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
        x = self.embed(tokens)
        for block in self.blocks:
            # Without logits, the activations of the blocks are most of what a step keeps; this
            # keeps only their inputs and makes the rest again in the backward.
            x = jax.checkpoint(Block.__call__)(block, x, same_document)
        return self.norm(x)
