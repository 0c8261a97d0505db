# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
# ---

# %% [markdown]
# # Inside the kernels
#
# How a sweep over the vocabulary leaves a few numbers a row and no logits: the tiles and their
# order, the sums and how they merge, the shift that keeps them exact. Then the real kernels: in the
# interpreter, which needs no GPU, and as machine code for `sm_90a` and `sm_100a`, from the real
# assembler.

# %%
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from pallas_loss import UnsupportedError, fused_linear_ce
from pallas_loss.row_sums import RowSums
from pallas_loss.tuning import HopperConfig

ROOT = next(p for p in (Path.cwd(), *Path.cwd().parents) if (p / "pyproject.toml").exists())

# %% [markdown]
# ## Tiles, and the order in which they are visited
#
# The product `x w` is cut into tiles. One block of threads on each of the GPU's 132 multiprocessors
# takes a tile: it multiplies along `H` in steps of 64, folds the finished logits into sums while
# they are in registers, and takes the next. The blocks at work at one moment read rows of `x` and
# columns of `w` through the same L2 cache; the fewer distinct ones, the less comes from memory. So
# tiles are not visited column by column but in a *snake* of some width:

# %%
config = HopperConfig(tile_m=128, tile_n=128, snake_width=8)
t, v, blocks = 8192, 128256, 132
rows, cols = config.tiles(t, v)


def order(width):
    """The (row, column) of each tile in turn, as the kernel computes it."""
    of = lambda i: plgpu.planar_snake(i, (rows, cols), 0, width)  # noqa: E731
    m, n = jax.jit(jax.vmap(of))(jnp.arange(rows * cols))
    return np.asarray(m), np.asarray(n)


def operands(width):
    """Row blocks and column blocks that a wave of tiles reads, on average."""
    m, n = order(width)
    waves = range(0, len(m) - blocks, blocks)
    return np.mean([len(set(m[i : i + blocks])) + len(set(n[i : i + blocks])) for i in waves])


figure, axes = plt.subplots(2, 1, figsize=(9, 6), layout="constrained")
for ax, width in zip(axes, (1, config.snake_width), strict=True):
    m, n = order(width)
    wave = np.full((rows, 140), np.nan)
    for i in range(8 * blocks):
        if n[i] < wave.shape[1]:
            wave[m[i], n[i]] = i // blocks
    image = ax.imshow(wave, cmap="viridis", aspect="auto")
    ax.set(
        ylabel="row of tiles",
        title=f"snake_width={width}: {operands(width):.0f} operand blocks a wave",
    )
axes[1].set_xlabel("column of tiles; of each colour 132 are at work at once")
figure.colorbar(image, ax=axes, label="wave")
plt.show()
assert operands(config.snake_width) < operands(1)

# %% [markdown]
# ## Sums that merge
#
# Of a tile of logits each row keeps a shift `m` (the largest logit seen) and sums relative to it,
# the label's own column left out: `s = sum e^(z - m)`, and, where a loss asks for them, `a = sum
# e^(z - m) (z - m)` for entropy, `u = sum (z - m)` for smoothing. Two parts of the vocabulary merge
# by re-basing both to one shift and adding. The same rule serves the tiles of a kernel, the splits
# of a sweep and the shards of a mesh. This is the real code, `pallas_loss.row_sums`, on one row in
# four tiles:

# %%
z = 3 * jax.random.normal(jax.random.key(3), (1, 64))
label = jnp.array([37])
sums = RowSums.start(1, ("a",))
steps = []
for tile in range(4):
    columns = jnp.arange(16 * tile, 16 * tile + 16)[None]
    sums = sums.fold(z[:, columns[0]], columns, label, ("a",))
    steps.append((float(sums.m[0]), float(sums.s[0]), float(sums.z_label[0])))
    print(f"after tile {tile}: " + "m {:7.3f}   s {:7.3f}   z_y {:7.3f}".format(*steps[-1]))

loss = jnp.log(sums.s + jnp.exp(sums.z_label - sums.m)) + sums.m - sums.z_label
want = jax.nn.logsumexp(z, axis=1) - z[0, label]
print(f"loss {loss[0]:.6f}, plainly {want[0]:.6f}")

figure, axes = plt.subplots(1, 4, figsize=(12, 2.8), layout="constrained", sharey=True)
for tile, ax in enumerate(axes):
    seen = np.arange(64) < 16 * tile + 16
    ax.bar(range(64), np.where(seen, z[0], 0), color=np.where(seen, "C0", "white"), width=1)
    if seen[37]:
        ax.bar([37], z[0, 37], color="C3", width=1, label="the label")
        ax.legend(loc="lower left")
    ax.axhline(steps[tile][0], color="black", linestyle=":")
    ax.set(title=f"m = {steps[tile][0]:.2f}, s = {steps[tile][1]:.2f}", xlabel="column")
axes[0].set_ylabel("logit")
plt.show()

# %% [markdown]
# Any order will do. Tiles folded forwards, backwards, and as a tree:

# %%
parts = [
    RowSums.of_tile(z[:, i : i + 16], jnp.arange(i, i + 16)[None], label, ("a",))
    for i in range(0, 64, 16)
]
p0, p1, p2, p3 = parts
for name, merged in {
    "forwards": p0.merge(p1).merge(p2).merge(p3),
    "backwards": p3.merge(p2).merge(p1).merge(p0),
    "as a tree": p0.merge(p1).merge(p2.merge(p3)),
}.items():
    print(f"{name:10} m {merged.m[0]:.6f}  s {merged.s[0]:.6f}  a {merged.a[0]:.6f}")

# %% [markdown]
# ## Why the label is left out
#
# A model that is sure of a token has `p_y` close to 1. Then `lse - z_y` is a difference of two
# nearly equal numbers, and `1 - p_y`, which is the gradient, another: in float32 both lose their
# digits from a margin of 8 on and have none left at 24. With the label's own column left out, `s`
# is that small number itself, and `log1p(s)` and `s / (1 + s)` keep every digit. Below, one row
# whose label leads by a margin, against float64; a gradient of 0 is an error of 1:

# %%
margins = np.linspace(0, 60, 121)
others = np.random.default_rng(0).normal(size=1000)
true_s = np.exp(others - margins[:, None]).sum(1)  # float64
row = np.concatenate([np.zeros((121, 1)), others - margins[:, None]], axis=1).astype(np.float32)
label = jnp.zeros(121, jnp.int32)
sums = RowSums.of_tile(jnp.asarray(row), jnp.arange(1001)[None], label, ())

e_label = jnp.exp(sums.z_label - sums.m)
ours = sums.s / (sums.s + e_label)
plain = 1 - jax.nn.softmax(jnp.asarray(row), axis=1)[:, 0]
true = true_s / (1 + true_s)
for name, got in {"1 - p_y, as a difference": plain, "s / (s + e^(z_y - m))": ours}.items():
    plt.semilogy(
        margins, np.maximum(np.abs(np.asarray(got, np.float64) - true) / true, 1e-9), label=name
    )
plt.gca().set(
    xlabel="margin of the label", ylabel="relative error of the gradient", ylim=(1e-9, 10)
)
plt.legend()
plt.show()

# %% [markdown]
# ## The label-shifted sum
#
# The plan *in_forward* makes the gradients while the value is computed. Its kernel shifts by the
# label's own logit, which a gather and a dot give before the sweep, so no maximum has to be waited
# for: `loss = log1p(s)` with `s` the sum of `e^(z - z_y)` over the other columns, and it only ever
# grows. The row from above, tile by tile:

# %%
label = jnp.array([37])
z_y = z[:, 37]
sums = RowSums.start(1, (), shift=z_y)
kept, growth = [], []
for tile in range(4):
    columns = jnp.arange(16 * tile, 16 * tile + 16)[None]
    part, e = RowSums.of_exponentials(z[:, columns[0]], z_y, columns, label, ())
    sums = sums.merge(part._replace(z_label=z_y))
    kept.append(e[0])
    growth.append(float(sums.s[0]))

figure, axes = plt.subplots(1, 2, figsize=(11, 3.2), layout="constrained")
axes[0].bar(range(64), np.concatenate(kept), width=1, log=True)
axes[0].axhline(1, color="C3", linestyle=":", label="the label's own, left out of the sum")
axes[0].set(xlabel="column", ylabel="e^(z - z_y)")
axes[0].legend()
axes[1].step(range(5), [0, *growth], where="post")
axes[1].set(xlabel="tiles folded", ylabel="s", xticks=range(5))
plt.show()
print(f"log1p(s) = {np.log1p(growth[-1]):.6f}, the loss {want[0]:.6f}")

# %% [markdown]
# These exponentials are stored in bfloat16, whose range is float32's, and the gradients are two
# plain products of that array, scaled by row: `d = e / (1 + s)`, and `-s / (1 + s)` at the label.
# One overflows only where some logit lies 88 above the label's. The row sums tell, and such a call
# is computed the other way, inside the same program:

# %%
hopeless = jnp.array([[0.0, 200.0, 1.0]])  # the label is column 0
for backward in ("recompute", "in_forward"):
    value, dx = jax.value_and_grad(fused_linear_ce)(
        hopeless, jnp.eye(3), jnp.array([0]), backward=backward
    )
    print(f"{backward:10} loss {value:.4f}, dx {np.round(dx[0], 4).tolist()}")

# %% [markdown]
# ## The real kernels, without a GPU
#
# Pallas has an interpreter for Mosaic GPU kernels: asynchronous copies, barriers, tensor-core
# instructions and the memory that they share, on the CPU, with a check that no two accesses race.
# The library runs in it unchanged. Its threads stop now and then before a kernel has begun, so this
# is a process of its own, with a limit, tried again if need be.

# %%
SCRIPT = """
import contextlib, jax, jax.numpy as jnp, numpy as np
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter
from pallas_loss import fused_linear_ce, tuning

t, h, v = 66, 60, 130  # ragged in every direction
x = jax.random.normal(jax.random.key(0), (t, h))
w = jax.random.normal(jax.random.key(1), (h, v)) * (2 / h**0.5)
labels = jax.random.randint(jax.random.key(2), (t,), 0, v).at[3].set(-100)

def run(implementation, backward):
    loss = lambda x, w: fused_linear_ce(
        x, w, labels, implementation=implementation, backward=backward,
        compute_dtype=jnp.bfloat16,  # float32 parameters: gradients in float32
    )
    return jax.block_until_ready(jax.jit(jax.value_and_grad(loss, (0, 1)))(x, w))

for backward in ("recompute", "in_forward"):
    want, (want_dx, want_dw) = run("reference", backward)
    with contextlib.ExitStack() as stack:
        for role in ("row_sums", "exponentials", "dlogits", "add_dx", "store_dw"):
            small = tuning.HopperConfig(tile_m=64, tile_n=64)
            stack.enter_context(tuning.override(small, role))
        params = plgpu.InterpretGPUParams(detect_races=True)
        stack.enter_context(plgpu.force_gpu_interpret_mode(params))
        value, (dx, dw) = run("mosaic_gpu", backward)
        races = interpreter.get_races().races_found
    far = lambda a, b: float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))
    assert abs(value - want) < 1e-5 and far(dx, want_dx) < 1e-3 and far(dw, want_dw) < 1e-3
    assert not races
    print(f"{backward:10} loss {value:.6f}, reference {want:.6f}; dx off by {far(dx, want_dx):.1e},"
          f" dw by {far(dw, want_dw):.1e}; races: {races}")
"""
LIMIT_S, TRIES = 90, 3

with tempfile.TemporaryDirectory() as folder:
    script = Path(folder) / "kernels.py"
    script.write_text(SCRIPT)
    for _ in range(TRIES):
        try:
            done = subprocess.run(
                [sys.executable, str(script)],
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                cwd=ROOT,
                env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
            )
            break
        except subprocess.TimeoutExpired:
            continue
    else:
        raise TimeoutError(f"the interpreter did not end within {LIMIT_S} s, {TRIES} times over")
assert done.returncode == 0, done.stderr
print(done.stdout)

# %% [markdown]
# ## What the assembler says
#
# XLA's CUDA plugin compiles from a description of the chip alone, and Mosaic GPU calls the real
# `ptxas`. A GPU's register, spill and shared-memory report is therefore a fact that a machine
# without a GPU can check, and the tests do, for every option. `HGMMA` (Hopper) and `UTCHMMA`
# (Blackwell) are the instructions of the tensor cores, `UTMALDG` the asynchronous loads.
#
# The backward's kernels come twice: for whole splits of the vocabulary, and for the last, narrower
# one. Where a target is not served by this release the table says so. What is compiled for
# Blackwell was compiled and simulated, not yet run.

# %%
AOT = [
    name
    for name in ("cloudpickle", "jax_plugins.xla_cuda13")
    if importlib.util.find_spec(name) is None
]
reports = {}
if AOT:
    print(f'absent: {", ".join(AOT)}; pip install "pallas_loss[aot]" cloudpickle')
else:
    sys.path.insert(0, str(ROOT / "tests"))
    import aot

    of = jax.ShapeDtypeStruct
    shapes = (
        of((8192, 4096), jnp.bfloat16),
        of((128256, 4096), jnp.bfloat16),
        of((8192,), jnp.int32),
    )

    def gradients(x, w, labels):
        def loss(x, w):
            return fused_linear_ce(x, w, labels, w_layout="vh", implementation="mosaic_gpu")

        return jax.value_and_grad(loss, (0, 1))(x, w)

    for target, architecture in (("h100", "sm_90a"), ("b200", "sm_100a")):
        try:
            reports[architecture] = aot.ptxas_report(gradients, *shapes, target=target)
        except UnsupportedError as error:
            print(f"{architecture}: {error}")

    print(
        f"{'':8} {'kernel':14} {'registers':>9} {'spills':>7} {'shared memory':>14}   instructions"
    )
    for architecture, kernels in reports.items():
        for kernel in kernels:
            counts = kernel.opcodes()
            shown = ", ".join(
                f"{counts[op]} {op}" for op in ("HGMMA", "UTCHMMA", "UTMALDG", "MUFU") if counts[op]
            )
            print(
                f"{architecture:8} {kernel.name:14} {kernel.registers:9} {kernel.spill_bytes:7} "
                f"{kernel.smem_bytes:14,}   {shown}"
            )
            assert kernel.spill_bytes == 0 and kernel.smem_bytes <= aot.SMEM_LIMIT_BYTES
