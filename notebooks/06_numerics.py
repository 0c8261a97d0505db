# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
# ---

# %% [markdown]
# # Numerics
#
# How far each way to the loss is from the truth, which is float64 arithmetic on the very same
# bfloat16 numbers, as logits grow from a standard deviation of 1 (an untrained model) to 80 (far
# past any trained one).

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from pallas_loss import fused_linear_ce, fused_linear_logprob

ON_GPU = jax.default_backend() == "gpu"
T, H, V = (1024, 512, 32000) if ON_GPU else (128, 128, 4096)
SCALES = [1, 2, 5, 10, 20, 40, 80]


def problem(scale, seed=0):
    """bfloat16 `x`, `w` whose logits have this standard deviation; half of the labels lead."""
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.normal(size=(T, H)), jnp.bfloat16)
    w = jnp.asarray(rng.normal(size=(H, V)) * scale / H**0.5, jnp.bfloat16)
    z = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    labels = np.where(np.arange(T) % 2, z.argmax(1), rng.integers(0, V, T))
    return x, w, jnp.asarray(labels, jnp.int32)


def truth(x, w, labels):
    """Loss of each token, and the gradients of their mean, in float64."""
    x, w, labels = (
        np.asarray(a, np.int64 if a.dtype == jnp.int32 else np.float64) for a in (x, w, labels)
    )
    z = x @ w
    z -= z.max(1, keepdims=True)
    e = np.exp(z)
    total = e.sum(1)
    rows = np.arange(T)
    others = total - e[rows, labels]
    d = e / total[:, None]
    d[rows, labels] = -others / total  # p_y - 1, without cancellation
    loss = np.log1p(others / e[rows, labels])
    wide = z[rows, labels] < -700  # e^z_y underflows even here
    loss[wide] = np.log(total[wide]) - z[rows, labels][wide]
    return loss, d @ w.T / T, x.T @ d / T


# %% [markdown]
# ## The contestants
#
# All take the same bfloat16 operands. What differs is the dtype of the logits and of the softmax,
# and whether the label's own column is told apart.


# %%
def plain(logits_dtype, softmax_dtype):
    """The loss as one writes it by hand, all logits made."""

    def losses(x, w, labels):
        # "highest" keeps float32 operands from being multiplied in TF32 on a GPU.
        z = jnp.matmul(x, w, preferred_element_type=logits_dtype, precision="highest")
        z = z.astype(softmax_dtype)
        z_label = jnp.take_along_axis(z, labels[:, None], axis=1)[:, 0]
        return (jax.nn.logsumexp(z, axis=1) - z_label).astype(jnp.float32)

    return losses


def fused(backward):
    def losses(x, w, labels):
        return fused_linear_ce(x, w, labels, reduction="none", backward="recompute")

    def mean(x, w, labels):
        return fused_linear_ce(x, w, labels, backward=backward)

    return losses, mean


def logprob(backward):
    def losses(x, w, labels):
        return -fused_linear_logprob(x, w, labels, backward=backward).logprob

    return losses


METHODS = {
    "bfloat16 logits and softmax": plain(jnp.bfloat16, jnp.bfloat16),
    "bfloat16 logits, float32 softmax": plain(jnp.bfloat16, jnp.float32),
    "float32 logits and softmax": plain(jnp.float32, jnp.float32),
    "pallas_loss, recompute": fused("recompute"),
    "pallas_loss, in_forward": fused("in_forward"),
    "pallas_loss, logprob stored": logprob("stored"),
}


def errors(method, problems):
    """Of each problem: the largest error of a token's loss; of `dx` and `dw` over their norms."""
    losses, mean = method if isinstance(method, tuple) else (method, None)
    if mean is None:
        mean = lambda *args: losses(*args).mean()  # noqa: E731
    losses, grad = jax.jit(losses), jax.jit(jax.grad(mean, argnums=(0, 1)))
    for args, (loss, *gradients) in problems:
        pairs = zip(grad(*args), gradients, strict=True)
        yield (
            np.abs(np.asarray(losses(*args), np.float64) - loss).max(),
            *(np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b) for a, b in pairs),
        )


problems = [(args, truth(*args)) for args in map(problem, SCALES)]
table = {name: np.array([*errors(method, problems)]) for name, method in METHODS.items()}
figure, axes = plt.subplots(1, 3, figsize=(14, 4.4), layout="constrained")
titles = "largest error of a token's loss", "error of dx / |dx|", "error of dw / |dw|"
for column, (ax, title) in enumerate(zip(axes, titles, strict=True)):
    for number, (name, found) in enumerate(table.items()):
        style = "o-" if name.startswith("pallas_loss") else "s--"
        ax.loglog(SCALES, np.maximum(found[:, column], 1e-9), style, color=f"C{number}", label=name)
    ax.set(title=title, xlabel="standard deviation of the logits")
    ax.set_xticks(SCALES, SCALES)
    ax.set_xticks([], minor=True)
for ax in axes[1:]:
    ax.axhline(2.0**-9, color="black", linestyle=":")
    ax.text(1, 2.0**-9, "one rounding to bfloat16", va="bottom", fontsize="small")
figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
plt.show()

# %%
print(f"{'':36}" + "".join(f"{s:>9}" for s in SCALES))
for column, title in enumerate(titles):
    print(title)
    for name, found in table.items():
        print(f"  {name:34}" + "".join(f"{error:9.1e}" for error in found[:, column]))

# %% [markdown]
# Rounding logits to bfloat16 costs up to 2^-9 of their size: an error of the loss that grows with
# them, to whole nats, and that no float32 softmax after it can repair. With float32 logits the loss
# is exact to float32; the gradients are as exact as the bfloat16 in which they are returned allows.
# *in_forward* keeps its exponentials in bfloat16, one rounding more; here, from a spread of 10 on,
# some logit lies more than 55 above its label's, the call is computed again by *recompute*, and its
# errors are those. The library is held to this in the tests: never more than twice the error of the
# plain float32 computation, plus a stated epsilon.

# %%
exact = table["float32 logits and softmax"]
for name in ("pallas_loss, recompute", "pallas_loss, in_forward", "pallas_loss, logprob stored"):
    assert np.all(table[name][:, 0] <= 2 * exact[:, 0] + 1e-5), name
    assert np.all(table[name][:, 1:] <= 2 * exact[:, 1:] + 2.0**-8), name

# %% [markdown]
# ## Confident tokens
#
# A well-trained model is sure of most tokens. Their gradient is `p_y - 1`, which in float32 is a
# difference that rounds to 0 from a margin of about 17 on: the plain code stops learning from them,
# and from their number. Here every label leads by a growing margin, in float32 throughout.

# %%
margins = np.arange(0, 41, 2)


def confident(margin):
    """Logits of 32 tokens whose label leads all others together by a margin; its d loss / d z_y."""
    rng = np.random.default_rng(1)
    z = rng.normal(size=(32, 500)).astype(np.float32)
    labels = rng.integers(0, 500, 32)
    z[np.arange(32), labels] = np.log(np.exp(z).sum(1)) + margin
    e = np.exp(z.astype(np.float64) - z[np.arange(32), labels].astype(np.float64)[:, None])
    e[np.arange(32), labels] = 0
    return z, jnp.asarray(labels, jnp.int32), -e.sum(1) / (1 + e.sum(1))


def gradient_errors(losses):
    x = jnp.eye(32)  # each token has logits of its own: the rows of w
    grad = jax.jit(jax.grad(lambda w, labels: losses(x, w, labels).sum()))
    for z, labels, true in map(confident, margins):
        got = np.asarray(grad(jnp.asarray(z), labels), np.float64)[np.arange(32), labels]
        yield max(np.abs((got - true) / true).max(), 1e-9)


for name, losses in {
    "plain, float32": plain(jnp.float32, jnp.float32),
    "pallas_loss": fused("recompute")[0],
}.items():
    plt.semilogy(margins, [*gradient_errors(losses)], "o-", label=name)
plt.gca().set(xlabel="margin of the label", ylabel="largest relative error of d loss / d z_y")
plt.legend()
plt.show()

# %% [markdown]
# ## A common offset
#
# Softmax does not change when all logits move together; arithmetic does. With a bias of a million
# on every column, float32 logits keep a sixteenth of a nat, and nothing can bring that back. What
# can be lost on top is the difference `lse - z_y`, when both are made first and subtracted last:

# %%
rng = np.random.default_rng(2)
x = jnp.asarray(rng.normal(size=(64, 16)), jnp.float32)
w = jnp.asarray(rng.normal(size=(16, 200)), jnp.float32)
labels = jnp.asarray(rng.integers(0, 200, 64), jnp.int32)
raw = jnp.matmul(x, w, precision="highest")
for offset in (0.0, 1e3, 1e5, 1e6):
    z32 = raw + jnp.float32(offset)
    z = np.asarray(z32, np.float64)
    want = np.log(np.exp(z - z.max(1, keepdims=True)).sum(1)) + z.max(1) - z[np.arange(64), labels]
    naive = jax.nn.logsumexp(z32, axis=1) - jnp.take_along_axis(z32, labels[:, None], 1)[:, 0]
    bias = jnp.full(200, offset, jnp.float32)
    ours = fused_linear_ce(x, w, labels, bias=bias, reduction="none")
    print(
        f"offset {offset:9.0f}: plain off by {np.abs(naive - want).max():.1e}, "
        f"pallas_loss by {np.abs(ours - want).max():.1e}"
    )
    assert np.abs(ours - want).max() < 1e-5
