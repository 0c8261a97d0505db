# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
# ---

# %% [markdown]
# # Tensor parallelism
#
# A vocabulary split over devices: what each one computes, what moves between them, and what the
# compiled program says about both. On a machine with several GPUs this notebook uses them;
# elsewhere it asks for 8 fake CPU devices, which it must do before JAX starts.

# %%
import os
import re

if not os.path.exists("/proc/driver/nvidia"):
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_loss import fused_linear_ce

devices = len(jax.devices())
tp = min(4, devices)
dp = devices // tp
mesh = jax.make_mesh((dp, tp), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
print(f"{devices} devices: {dp} groups of tokens x {tp} parts of the vocabulary")

# %% [markdown]
# ## The call
#
# The same function with two more arguments. `vocab_axis` splits V, `token_axes` the tokens. Value,
# metrics and gradients are those of one device: the mean is over all tokens, labels are ids in the
# whole vocabulary.

# %%
T, H, V = 512, 64, 4000
x = jax.random.normal(jax.random.key(0), (T, H))
w = jax.random.normal(jax.random.key(1), (H, V)) * (2 / H**0.5)
labels = jax.random.randint(jax.random.key(2), (T,), 0, V).at[::7].set(-100)


def sharded(x, w, labels):
    return fused_linear_ce(x, w, labels, vocab_axis="tp", token_axes="dp")


def placed(spec):
    return NamedSharding(mesh, spec)


in_shardings = placed(P("dp")), placed(P(None, "tp")), placed(P("dp"))
with jax.set_mesh(mesh):
    step = jax.jit(jax.value_and_grad(sharded, argnums=(0, 1)), in_shardings=in_shardings)
    value, (dx, dw) = step(x, w, labels)

want, (want_dx, want_dw) = jax.value_and_grad(fused_linear_ce, argnums=(0, 1))(x, w, labels)
print(f"value {value:.6f}, on one device {want:.6f}")
for name, a, b in (("dx", dx, want_dx), ("dw", dw, want_dw)):
    a, b = np.asarray(a), np.asarray(b)
    print(f"{name} differs by {np.abs(a - b).max() / np.abs(b).max():.1e}, lies as {a.shape}")
    assert np.abs(a - b).max() < 1e-5 * np.abs(b).max()

# %% [markdown]
# Who holds what. Each device has its columns of `w` and of `dw`, and never another's:


# %%
def draw(ax, array, title):
    """Each device's number on the part of the array that it holds."""
    ax.set(xlim=(0, array.shape[1]), ylim=(array.shape[0], 0), title=title, xticks=[], yticks=[])
    held = {}
    for shard in array.addressable_shards:
        (top, bottom, _), (left, right, _) = (
            part.indices(size) for part, size in zip(shard.index, array.shape, strict=True)
        )
        held.setdefault((left, top, right - left, bottom - top), []).append(shard.device.id)
    for number, ((left, top, width, height), ids) in enumerate(held.items()):
        ax.add_patch(plt.Rectangle((left, top), width, height, facecolor=f"C{number}", alpha=0.4))
        text = ", ".join(map(str, sorted(ids)))
        ax.text(left + width / 2, top + height / 2, text, ha="center", va="center")


figure, axes = plt.subplots(1, 3, figsize=(11, 2.4), layout="constrained")
draw(axes[0], jax.device_put(x, in_shardings[0]), "x [T, H]")
draw(axes[1], jax.device_put(w, in_shardings[1]), "w [H, V]")
draw(axes[2], dw, "dw [H, V]")
figure.suptitle("which devices hold which part")
plt.show()

# %% [markdown]
# ## What moves
#
# Collectives are instructions of the compiled program, with the shape that each device hands in.
# They can be read off it, here for value and both gradients:

# %%
_BYTES = {"f32": 4, "s32": 4, "bf16": 2, "f16": 2, "pred": 1, "u32": 4}
_COLLECTIVE = re.compile(
    r"= (.*?) (all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all)(?:-start)?\("
)


def collectives(compiled):
    """(kind, shapes, bytes of the result) of each collective of a program."""
    for line in compiled.as_text().splitlines():
        if found := _COLLECTIVE.search(line):
            shapes = re.findall(r"(\w+)\[([\d,]*)\]", found[1])
            sizes = [
                _BYTES[t] * int(np.prod([int(n) for n in dims.split(",") if n]))
                for t, dims in shapes
            ]
            yield found[2], " ".join(f"{t}[{dims}]" for t, dims in shapes), sum(sizes)


def compiled(function, in_shardings, *shapes):
    with jax.set_mesh(mesh):
        return jax.jit(function, in_shardings=in_shardings).lower(*shapes).compile()


of = jax.ShapeDtypeStruct
shapes = of((T, H), jnp.float32), of((H, V), jnp.float32), of((T,), jnp.int32)
with_gradients = jax.value_and_grad(sharded, argnums=(0, 1))
for title, function in {"the value alone": sharded, "value and gradients": with_gradients}.items():
    print(title)
    for kind, shape, size in collectives(compiled(function, in_shardings, *shapes)):
        print(f"  {kind:20} {size:9,} bytes   {shape}")

# %% [markdown]
# The forward sends row sums: a handful of numbers for each of the device's tokens. The backward
# adds up `dx` over the parts of the vocabulary, in float32, and `dw` over the groups of tokens.
# Nothing has the size of `[T, V]`, and nothing that grows with `V` crosses the vocabulary axis.
#
# XLA can shard the plain loss too. Given the same arrays, this is what it decides to move:


# %%
def plain(x, w, labels):
    z = jnp.matmul(x, w)
    counted = labels != -100
    z_label = jnp.take_along_axis(z, jnp.where(counted, labels, 0)[:, None], axis=1)[:, 0]
    loss = jax.nn.logsumexp(z, axis=1) - z_label
    return jnp.sum(jnp.where(counted, loss, 0)) / jnp.sum(counted)


plain_gradients = jax.value_and_grad(plain, argnums=(0, 1))
for kind, shape, size in collectives(compiled(plain_gradients, in_shardings, *shapes)):
    print(f"  {kind:20} {size:9,} bytes   {shape}")

# %% [markdown]
# It finds the same: `dx` and `dw` are summed, and the maximum and the sum of each row. What it
# cannot do is not to make the logits. How both grow with the vocabulary, from programs that are
# compiled and not run (the temporaries of `pallas_loss` end at the `dw` of one device, which its
# sum over the groups of tokens holds once more):


# %%
def cost(function, v):
    shapes = of((4096, 256), jnp.float32), of((256, v), jnp.float32), of((4096,), jnp.int32)
    program = compiled(function, in_shardings, *shapes)
    moved = sum(size for _, _, size in collectives(program)) / 2**20
    return moved, program.memory_analysis().temp_size_in_bytes / 2**20


vocabularies = [16384, 65536, 262144]
figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
for name, function in {
    "pallas_loss": with_gradients,
    "all logits, sharded by XLA": plain_gradients,
}.items():
    moved, temporaries = zip(*(cost(function, v) for v in vocabularies), strict=True)
    axes[0].plot(vocabularies, moved, "o-", label=name)
    axes[1].plot(vocabularies, temporaries, "o-", label=name)
weights = [256 * v / tp * 4 / 2**20 for v in vocabularies]
axes[0].plot(vocabularies, weights, ":", color="grey", label="dw of one device")
for ax, label in zip(
    axes, ("MiB in collectives, a device", "MiB of temporaries, a device"), strict=True
):
    ax.set(xlabel="V", ylabel=label, xscale="log", yscale="log")
    ax.set_xticks(vocabularies, [f"{v // 1024}k" for v in vocabularies])
    ax.set_xticks([], minor=True)
    ax.legend()
figure.suptitle(f"4096 tokens, H = 256, a mesh of {dp} x {tp}")
plt.show()

# %% [markdown]
# ## Sequence parallelism
#
# Between the layers of a tensor-parallel model, `x` is often split over the vocabulary's axis too.
# Name it in both places: `x` is gathered over it and `dx` scattered, which moves as much as the sum
# did.

# %%
both = ("dp", "tp")


def sequence_parallel(x, w, labels):
    return fused_linear_ce(x, w, labels, vocab_axis="tp", token_axes=(both,))


rows = placed(P(both))
value_and_grad = jax.value_and_grad(sequence_parallel, argnums=(0, 1))
program = compiled(value_and_grad, (rows, in_shardings[1], rows), *shapes)
for kind, shape, size in collectives(program):
    print(f"  {kind:20} {size:9,} bytes   {shape}")
with jax.set_mesh(mesh):
    again, _ = program(
        *(
            jax.device_put(a, s)
            for a, s in zip((x, w, labels), (rows, in_shardings[1], rows), strict=True)
        )
    )
print(f"value {again:.6f}")
assert abs(again - want) < 1e-5

# %% [markdown]
# ## In your own `shard_map`
#
# Where the axes are manual, arrays are this device's shards and the call is the same. `vocab_size`
# says V where nothing else can.

# %%
with jax.set_mesh(mesh):
    manual = jax.shard_map(sharded, in_specs=(P("dp"), P(None, "tp"), P("dp")), out_specs=P())
    print(f"value {jax.jit(manual)(x, w, labels):.6f}")
