# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
# ---

# %% [markdown]
# # Quickstart
#
# The last layer of a language model turns hidden states `x [T, H]` into logits `z = x w`, `[T, V]`,
# and a loss into one number. `pallas_loss` computes that number and its exact gradients without the
# `[T, V]` array ever reaching memory.
#
# This notebook runs anywhere: on a CPU at small sizes, on a GPU at those of a real model.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx

from pallas_loss import cli, fused_linear_ce, fused_linear_logprob
from pallas_loss.nnx import LMHead, next_token_labels

ON_GPU = jax.default_backend() == "gpu"
T, H, V = (8192, 4096, 128256) if ON_GPU else (512, 64, 4096)

# %% [markdown]
# ## Five lines

# %%
x = jax.random.normal(jax.random.key(0), (T, H), jnp.bfloat16)
w = jax.random.normal(jax.random.key(1), (H, V), jnp.bfloat16) * (2 / H**0.5)
labels = jax.random.randint(jax.random.key(2), (T,), 0, V)

loss, (dx, dw) = jax.jit(jax.value_and_grad(fused_linear_ce, argnums=(0, 1)))(x, w, labels)
print(f"loss {loss:.6f}, dx {dx.dtype}{list(dx.shape)}, dw {dw.dtype}{list(dw.shape)}")


# %% [markdown]
# It is the loss that one would write by hand. The plain code makes the logits in float32, the
# derivative of the loss in float32, and, for its gradients, both at once:


# %%
def plain(x, w, labels):
    logits = jnp.matmul(x, w, preferred_element_type=jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


want, (want_dx, want_dw) = jax.jit(jax.value_and_grad(plain, argnums=(0, 1)))(x, w, labels)


def distance(a, b):
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    return np.linalg.norm(a - b) / np.linalg.norm(b)


print(f"loss differs by {abs(loss - want):.1e}")
print(f"dx by {distance(dx, want_dx):.1e}, dw by {distance(dw, want_dw):.1e} of their norms")
print(f"one rounding to bfloat16 is up to {2**-9:.1e}")

# %% [markdown]
# ## A training step
#
# `LMHead` is the head of a Flax model. `head.loss` takes every option of `fused_linear_ce`;
# `head(x)` gives logits where they are wanted, to sample from. Here the embedding and the head
# share one table (`tie_to`). The task: count upwards modulo 97 from a random start, which a model
# that looks at one token can learn.


# %%
class Model(nnx.Module):
    def __init__(self, vocab, hidden, rngs):
        self.embed = nnx.Embed(vocab, hidden, rngs=rngs)
        self.mlp = nnx.Linear(hidden, hidden, rngs=rngs)
        self.head = LMHead(hidden, vocab, tie_to=self.embed, rngs=rngs)

    def __call__(self, tokens):
        h = self.embed(tokens)
        return h + nnx.gelu(self.mlp(h))


def fused(model, tokens):
    return model.head.loss(model(tokens), next_token_labels(tokens))


def naive(model, tokens):
    labels = next_token_labels(tokens)
    logits = model.head(model(tokens))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(labels, 0))
    return jnp.sum(losses, where=labels != -100) / jnp.sum(labels != -100)


def train(loss, steps=60):
    model = Model(97, 64, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, tokens):
        value, grads = nnx.value_and_grad(loss)(model, tokens)
        optimizer.update(model, grads)
        return value

    values = []
    for i in range(steps):
        start = jax.random.randint(jax.random.key(i), (16, 1), 0, 97)
        values.append(float(step(model, optimizer, (start + jnp.arange(32)) % 97)))
    return values


curves = {"fused": train(fused), "all logits": train(naive)}
for (name, values), style in zip(curves.items(), ("-", "--"), strict=True):
    plt.plot(values, style, label=name)
plt.gca().set(xlabel="step", ylabel="loss", yscale="log", title="the same training run")
plt.legend()
plt.show()

# %% [markdown]
# ## Memory
#
# What a program takes beyond its arguments and results is known once it is compiled; nothing has to
# run. The gradients of both losses, for a growing vocabulary:


# %%
def temporaries(loss, t, h, v):
    of = jax.ShapeDtypeStruct
    shapes = of((t, h), jnp.bfloat16), of((h, v), jnp.bfloat16), of((t,), jnp.int32)
    program = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*shapes).compile()
    return program.memory_analysis().temp_size_in_bytes / 2**30


tokens, hidden = (8192, 4096) if ON_GPU else (4096, 1024)
vocabularies = [16384, 32768, 65536, 131072, 262144]
# The lean plan: what there is to keep is a few numbers a token. "Choose a plan" has the faster one.
lean = lambda *args: fused_linear_ce(*args, backward="recompute")  # noqa: E731
memory = {
    "all logits in float32": [temporaries(plain, tokens, hidden, v) for v in vocabularies],
    "pallas_loss": [temporaries(lean, tokens, hidden, v) for v in vocabularies],
}
for name, gib in memory.items():
    plt.plot(vocabularies, gib, "o-", label=name)
plt.gca().set(xlabel="V", ylabel="GiB of temporaries", xscale="log", xticks=vocabularies)
plt.gca().set_xticks(vocabularies, [f"{v // 1024}k" for v in vocabularies])
plt.gca().set_xticks([], minor=True)
plt.title(f"value and both gradients, {tokens} tokens, H = {hidden}, bfloat16")
plt.legend()
plt.show()
assert memory["pallas_loss"][-1] < 0.2 * memory["all logits in float32"][-1]

# %% [markdown]
# ## Options
#
# Every option means the same on every backend and in both plans; the docstring of `fused_linear_ce`
# states the formula. A token counts unless its label is `ignore_index`, and one that does not adds
# exactly nothing, even if its row is NaN.

# %%
loss, metrics = fused_linear_ce(
    x.at[0].set(jnp.nan),
    w,
    labels.at[0].set(-100),
    label_smoothing=0.1,
    z_loss=1e-4,
    logit_soft_cap=30.0,
    return_metrics=True,
)
print(f"loss {loss:.4f} = nll {metrics.nll:.4f} + z-loss {metrics.z_loss:.4f}")
print(f"{metrics.num_tokens} tokens counted, accuracy {metrics.accuracy:.4f}")

# %% [markdown]
# For reinforcement learning: log-probability and entropy of each token, each differentiable, in one
# pass.

# %%
out = fused_linear_logprob(x[:4], w, labels[:4], temperature=0.7, entropy=True)
print("logprob", np.round(out.logprob, 3), "\nentropy", np.round(out.entropy, 3))

# %% [markdown]
# ## What ran here, and why
#
# The same from a shell: `python -m pallas_loss info T,H,V`; `python -m pallas_loss bench T,H,V`
# times it.

# %%
status = cli.main(["info", f"{T},{H},{V}"])
