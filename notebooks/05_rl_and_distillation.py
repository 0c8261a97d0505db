# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
# ---

# %% [markdown]
# # Reinforcement learning and distillation
#
# Both want more than one number of a distribution over the vocabulary: the log-probability of what
# was sampled and the entropy, each with a gradient per token; or the divergence from another
# distribution. None of it needs the `[T, V]` arrays that the plain code makes.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

from pallas_loss import fused_forward_kl, fused_linear_logprob, fused_reverse_kl

# %% [markdown]
# ## Log-probability and entropy in GRPO
#
# GRPO samples a group of answers to each prompt, scores them, and raises the log-probability of
# those that did better than their group. `fused_linear_logprob` gives what the loss needs; one
# backward pass takes the cotangents of all its outputs together. The entropy is there for a bonus
# that keeps the policy from settling on the first answer that pays.
#
# A toy with two answers worth having. Each of 64 prompts has a vocabulary of 500 one-token answers;
# one of them, easily found, pays 0.6 and another pays 1. The policy is a linear head on the
# prompt's features.

# %%
PROMPTS, FEATURES, ANSWERS, GROUP = 64, 32, 500, 16
features = jax.random.normal(jax.random.key(0), (PROMPTS, FEATURES)) / FEATURES**0.5
good, best = jax.random.randint(jax.random.key(1), (2, PROMPTS), 0, ANSWERS)
# Where earlier training left the policy: what pays 0.6 is four times as likely as the rest.
start = 1.5 * jnp.zeros((FEATURES, ANSWERS)).at[:, good].add(features.T)


def reward(answers):
    """Of the answers `[prompts, group]`."""
    return jnp.where(answers == best[:, None], 1.0, jnp.where(answers == good[:, None], 0.6, 0.0))


def objective(w, answers, advantage, old_logprob, entropy_bonus, clip=0.2):
    """GRPO's clipped surrogate with an entropy bonus; the group's answers are K labels a row."""
    out = fused_linear_logprob(features, w, answers, entropy=True)
    ratio = jnp.exp(out.logprob - old_logprob)
    clipped = jnp.clip(ratio, 1 - clip, 1 + clip)
    gain = jnp.minimum(ratio * advantage, clipped * advantage)
    return -jnp.mean(gain) - entropy_bonus * jnp.mean(out.entropy), jnp.mean(out.entropy)


optimizer = optax.adam(0.05)


@jax.jit
def step(w, state, key, entropy_bonus):
    draw = jax.random.categorical(key, (features @ w)[:, None], axis=-1, shape=(PROMPTS, GROUP))
    paid = reward(draw)
    advantage = paid - paid.mean(1, keepdims=True)
    advantage /= paid.std(1, keepdims=True) + 1e-4
    old = jax.lax.stop_gradient(fused_linear_logprob(features, w, draw).logprob)
    grad = jax.grad(objective, has_aux=True)
    dw, entropy = grad(w, draw, advantage, old, entropy_bonus)
    updates, state = optimizer.update(dw, state)
    return optax.apply_updates(w, updates), state, paid.mean(), entropy


def train(entropy_bonus, steps=160):
    w, state, history = start, optimizer.init(start), []
    for key in jax.random.split(jax.random.key(2), steps):
        w, state, paid, entropy = step(w, state, key, entropy_bonus)
        history.append((float(paid), float(entropy)))
    return w, np.array(history)


figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
for bonus in (0.0, 0.02, 0.2):
    w, history = train(bonus)
    found = jnp.mean(jnp.argmax(features @ w, axis=1) == best)
    print(
        f"bonus {bonus:4}: reward {history[-20:, 0].mean():.2f}, best answer first for {found:.0%}"
    )
    for ax, column, label in zip(axes, history.T, ("mean reward", "entropy, nats"), strict=True):
        smooth = np.convolve(column, np.ones(10) / 10, "valid")
        ax.plot(smooth, label=f"entropy bonus {bonus}")
        ax.set(xlabel="step", ylabel=label)
axes[0].axhline(0.6, color="grey", linestyle=":")
axes[0].legend()
plt.show()

# %% [markdown]
# The gradient of the entropy is exact, not an estimate from samples: it is `-p (log p + H)` for
# each logit, formed in the same sweep as that of the log-probability. Both against plain code:


# %%
def plain(w, answers):
    log_p = jax.nn.log_softmax(jnp.matmul(features, w, precision="highest"))
    entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=1)
    return jnp.take_along_axis(log_p, answers, axis=1), entropy


def ours(w, answers):
    out = fused_linear_logprob(features, w, answers, entropy=True)
    return out.logprob, out.entropy


answers = jax.random.randint(jax.random.key(3), (PROMPTS, GROUP), 0, ANSWERS)
cotangents = jax.random.normal(jax.random.key(4), (PROMPTS, GROUP)), jnp.ones(PROMPTS)
(dw,), (want,) = (jax.vjp(lambda w, f=f: f(w, answers), w)[1](cotangents) for f in (ours, plain))
print(f"dw differs by {jnp.abs(dw - want).max() / jnp.abs(want).max():.1e}")
assert jnp.abs(dw - want).max() < 1e-5 * jnp.abs(want).max()

# %% [markdown]
# `models/rl.py` is the whole loop on a small language model: sampling, advantages, a reference
# policy, and curves.
#
# ## Reverse against forward KL
#
# A student that cannot be its teacher has to choose. *Forward* KL, `KL(teacher || student)`,
# punishes a student that gives no probability where the teacher has some: it covers all of it.
# *Reverse* KL, `KL(student || teacher)`, punishes probability where the teacher has none: it
# settles on one mode. A teacher with two modes, and a student that can only be a bell, over a
# vocabulary of 200:

# %%
grid = jnp.linspace(-6, 6, 200)
teacher = jnp.log(0.6 * jnp.exp(-((grid + 2) ** 2)) + 0.4 * jnp.exp(-2 * (grid - 2.5) ** 2))


def student(parameters):
    """Logits of a bell; they are what the losses take, no softmax is wanted."""
    mean, log_width = parameters
    return -((grid - mean) ** 2) / (2 * jnp.exp(2 * log_width))


def distil(divergence, mean, steps=400):
    optimizer = optax.adam(0.05)

    def loss(parameters):
        return divergence(student(parameters)[None], teacher[None])

    @jax.jit
    def step(carry, _):
        parameters, state = carry
        value, grads = jax.value_and_grad(loss)(parameters)
        updates, state = optimizer.update(grads, state)
        return (optax.apply_updates(parameters, updates), state), (value, parameters[0])

    parameters = jnp.array([mean, 0.0])
    return jax.lax.scan(step, (parameters, optimizer.init(parameters)), length=steps)


figure, axes = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
axes[0].fill_between(grid, jax.nn.softmax(teacher), color="lightgrey", label="teacher")
for name, divergence, start_at, color in (
    ("forward KL", fused_forward_kl, 0.5, "C0"),
    ("reverse KL, from the left", fused_reverse_kl, -0.5, "C1"),
    ("reverse KL, from the right", fused_reverse_kl, 3.0, "C3"),
):
    (parameters, _), (values, means) = distil(divergence, start_at)
    mean, width = parameters[0], jnp.exp(parameters[1])
    print(f"{name:27} {values[-1]:.4f} nats: mean {mean:5.2f}, width {width:.2f}")
    axes[0].plot(grid, jax.nn.softmax(student(parameters)), color=color, label=name)
    axes[1].plot(means, color=color, label=name)
axes[0].set(xlabel="class", ylabel="probability")
axes[0].legend()
axes[1].set(xlabel="step", ylabel="mean of the student")
plt.show()

# %% [markdown]
# Both directions read teacher and student once and write the gradient once. What they agree on: at
# the teacher itself both are 0, with a gradient of 0. `temperature` softens the student,
# `target_temperature` the teacher, and no factor of its square is put in.

# %%
z = jax.random.normal(jax.random.key(5), (4, 200))
for divergence in (fused_forward_kl, fused_reverse_kl):
    value, grad = jax.value_and_grad(divergence)(z, z, temperature=2.0)
    print(f"{divergence.__name__:17} {value:.1e}, gradient at most {jnp.abs(grad).max():.1e}")
    assert abs(value) < 1e-6 and jnp.abs(grad).max() < 1e-6
