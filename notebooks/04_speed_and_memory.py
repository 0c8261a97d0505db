# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
# ---

# %% [markdown]
# # Speed and memory
#
# Everything that was measured, drawn from the files in `benchmarks/results`: what bounds the work,
# how close each library comes, and what it takes to get there. Nothing here is timed; `python -m
# benchmarks.run` makes such files, `python -m pallas_loss bench T,H,V` a small table.

# %%
import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

ROOT = next(p for p in (Path.cwd(), *Path.cwd().parents) if (p / "pyproject.toml").exists())
sys.path.insert(0, str(ROOT))

# %%
from benchmarks.render import GRADIENTS, LABELS, OURS, in_order, over_gemms, read, rivals
from benchmarks.render_rows import RIVALS
from benchmarks.results import gemms_ms, memory_gib

files = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
every = read(files)
runs = [run for run in every if run["suite"] != "rows"]
for run in runs:
    print(run["suite"], "on", run["environment"]["device"], "at commit", ", ".join(run["commits"]))
    for _, w in in_order(run):
        print(f"  {w['T']} x {w['H']} x {w['V']}: {', '.join(w['candidates'])}")
ce = next(run for run in runs if run["suite"] == "linear_ce")


def entry(workload, candidate, mode=GRADIENTS):
    return workload["candidates"].get(candidate, {}).get(mode, {})


def timed(run, mode=GRADIENTS):
    """The candidates of a run that were timed somewhere, ours first."""
    names = (OURS, *rivals(run))
    have = lambda n: any("ms" in entry(w, n, mode) for w in run["workloads"].values())  # noqa: E731
    return [name for name in names if have(name)]


def label(name):
    return LABELS.get(name, name)


def style(name):
    """Ours are full circles in colours, the others hollow marks in greys."""
    plans = [OURS, f"{OURS}:recompute", f"{OURS}:in_forward", f"{OURS}:stored", "xla_tiled"]
    if name in plans:
        return {"color": f"C{plans.index(name)}", "marker": "o", "label": label(name)}
    others = [n for n in LABELS if n not in plans]
    number = others.index(name) if name in others else len(others)
    return {
        "color": str(0.2 + 0.05 * number),
        "marker": "s^vD<>PpX*h8"[number % 12],
        "markerfacecolor": "none",
        "label": label(name),
    }


# %% [markdown]
# ## What bounds it
#
# A roofline: work over traffic on one axis, speed on the other. The products of a linear head do `2
# T H V` FLOP each and must move `x`, `w` and the gradients once, 2 bytes a number. At thousands of
# tokens that is thousands of FLOP a byte, far to the right of where an H200's memory (4.8 TB/s)
# could hold anything up; what counts is the tensor cores. Their nominal 989 TFLOP/s are not reached
# by anything; the limit that means something is the bare product of the same shapes by cuBLAS, in
# the same process and rounds (the black marks).

# %%
PEAK_TFLOPS, MEMORY_TB_S = 989, 4.8  # H200, dense bfloat16, from its data sheet


def intensity(w):
    """FLOP a byte of value and gradients, each array moved once."""
    t, h, v = w["T"], w["H"], w["V"]
    return 6 * t * h * v / (2 * (2 * t * h + 2 * h * v))


figure, ax = plt.subplots(figsize=(11, 5), layout="constrained")
reach = np.geomspace(100, 20000, 100)
ax.plot(reach, np.minimum(PEAK_TFLOPS, reach * MEMORY_TB_S), color="black", linewidth=1)
ax.text(1.1e4, PEAK_TFLOPS * 1.02, "nominal peak", ha="center", va="bottom", fontsize="small")
for _, workload in in_order(ce):
    flops, bare = (
        6 * workload["T"] * workload["H"] * workload["V"],
        gemms_ms(workload["candidates"], "jax", 3),
    )
    ax.plot(
        intensity(workload),
        flops / bare / 1e9,
        "_",
        color="black",
        markersize=18,
        markeredgewidth=2,
    )
ax.plot([], [], "_", color="black", markersize=12, markeredgewidth=2, label="bare GEMMs, three")
for name in timed(ce):
    found = [(intensity(w), entry(w, name)) for _, w in in_order(ce)]
    points = [(at, e["tflops"]) for at, e in found if "ms" in e]
    ax.plot(*zip(*points, strict=True), linestyle="none", markersize=7, **style(name))
ax.set(xscale="log", ylim=(0, 1100), xlim=(100, 20000))
ax.set(xlabel="FLOP a byte", ylabel="TFLOP/s, 6 T H V counted, whoever computes more")
ax.set_title(f"value and both gradients, {ce['environment']['device']}")
figure.legend(fontsize="small", loc="outside right upper")
plt.show()

# %% [markdown]
# ## Time over the limit
#
# The forward over one bare product; value and gradients over three. A plan of four products cannot
# be below 1.33, whatever its kernels.


# %%
def ratios(ax, run, mode, products):
    names, workloads = timed(run, mode), [w for _, w in in_order(run)]
    height = 0.8 / len(names)
    for i, name in enumerate(names):
        at = [
            (j + (i - len(names) / 2 + 0.5) * height, entry(w, name, mode)["over_gemms"][products])
            for j, w in enumerate(workloads)
            if products in entry(w, name, mode).get("over_gemms", {})
        ]
        if at:
            ours = {k: style(name)[k] for k in ("color", "label")}
            ax.barh(*zip(*at, strict=True), height, **ours)
    ax.axvline(1, color="black", linestyle=":")
    ax.set_yticks(range(len(workloads)), [f"{w['T']} x {w['H']} x {w['V']}" for w in workloads])
    ax.set_ylim(len(workloads) - 0.5, -0.5)
    ax.set_xlabel(f"time / {products} bare GEMM{'s' if products != '1' else ''}")


figure, axes = plt.subplots(1, 2, figsize=(12, 6), layout="constrained", sharey=True)
ratios(axes[0], ce, "forward", "1")
axes[0].set_title("value")
ratios(axes[1], ce, GRADIENTS, "3")
axes[1].set_title("value and both gradients")
axes[1].axvline(4 / 3, color="black", linestyle="--")
figure.legend(*axes[1].get_legend_handles_labels(), loc="outside right upper", fontsize="small")
plt.show()

# %% [markdown]
# ## Time against memory
#
# At the shape with the most contestants: down and to the left is better. Memory is what a call
# takes beyond its inputs and the gradients it returns.


# %%
def trade(run):
    contestants = lambda w: sum("ms" in entry(w, name) for name in timed(run))  # noqa: E731
    workload = max(run["workloads"].values(), key=contestants)
    figure, ax = plt.subplots(figsize=(9.5, 4), layout="constrained")
    for name in timed(run):
        found = entry(workload, name)
        if "ms" in found and memory_gib(found) is not None:
            gib = max(memory_gib(found), 1e-3)
            ax.plot(gib, found["ms"], linestyle="none", markersize=9, **style(name))
    for products, line in ((3, ":"), (4, "--")):
        bare = gemms_ms(workload["candidates"], "jax", products)
        ax.axhline(bare, color="black", linestyle=line, label=f"{products} bare GEMMs", zorder=0)
    ax.set(xscale="log", xlabel="GiB beyond inputs and gradients", ylim=(0, None))
    ax.set(ylabel="ms, value and both gradients")
    shape = f"{workload['T']} x {workload['H']} x {workload['V']}"
    ax.set_title(f"{run['suite']}: {shape}, {run['environment']['device']}")
    figure.legend(loc="outside right upper", fontsize="small")
    plt.show()


for run in runs:
    trade(run)

# %% [markdown]
# ## Every number

# %%
for run in runs:
    print(run["suite"])
    for _, workload in in_order(run):
        print(f"  {workload['T']} x {workload['H']} x {workload['V']}")
        for name in timed(run):
            if "ms" in (found := entry(workload, name)):
                over = [over_gemms(found, n) for n in "34"]
                columns = found["ms"], *over, memory_gib(found) or 0
                print(f"    {label(name):26}" + "{:9.2f}  {:7} {:7}{:7.2f}".format(*columns))
            elif "error" in found:
                print(f"    {label(name):26} {found['error'][:60]}")
print("ms; over three and four bare GEMMs (*: timed one by one); GiB beyond inputs and gradients")

# %% [markdown]
# ## Losses from logits
#
# These are bound by memory, so the limit is a copy: GB/s count each input read once and the
# gradient written once, over what a plain copy of the same bytes reaches in the same rounds. Whole
# training steps (`benchmarks.train_step`) follow where they are committed.

# %%
held = {file.name: json.loads(file.read_text()) for file in files}
rows = [run for run in every if run["suite"] == "rows"]
for run in rows:
    shapes = run["workloads"]
    timed = [shape["losses"] for shape in shapes.values()]
    losses = list(dict.fromkeys(loss for of_shape in timed for loss in of_shape))
    size = (4 * len(losses), 1 + 0.9 * len(shapes))
    figure, axes = plt.subplots(1, len(losses), figsize=size, layout="constrained", sharey=True)
    names = list(dict.fromkeys(c for s in timed for loss in losses for c in s.get(loss, ())))
    height = 0.8 / len(names)
    axes = np.atleast_1d(axes)
    for ax, loss in zip(axes, losses, strict=True):
        for i, name in enumerate(names):
            entries = [s.get(loss, {}).get(name, {}).get(GRADIENTS, {}) for s in timed]
            at = [(j + i * height, e["of_yardstick"]) for j, e in enumerate(entries) if "ms" in e]
            if at:
                ax.barh(*zip(*at, strict=True), height, align="edge", color=f"C{i}")
            ax.barh([0], [0], color=f"C{i}", label=RIVALS.get(name, name))
        ax.axvline(1, color="black", linestyle=":")
        ax.set(title=loss, xlabel="GB/s over those of a copy", ylim=(len(shapes), -0.2))
        ax.set_yticks(np.arange(len(shapes)) + 0.4, shapes)
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(names)
    )
    device = run["environment"]["device"]
    figure.suptitle(f"losses from logits [T, V]: value and gradient, {device}")
    plt.show()
steps = {name: data for name, data in held.items() if "losses" in data}
for name, data in steps.items():
    print(name, data["environment"]["device"], data["environment"]["commit"])
    for way, found in data["losses"].items():
        for what, numbers in found.items():
            print(f"  {way:10} {what:14} {', '.join(f'{k} {v}' for k, v in numbers.items())}")
print(f"{len(rows)} results of losses from logits, {len(steps)} of training steps")
