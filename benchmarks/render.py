"""Turns results into the README's table and into plots: ``python -m benchmarks.render``.

A table stands between ``<!-- bench:SUITE -->`` and ``<!-- /bench -->``.
"""

import argparse
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks import render_active, render_rows, scaling, timeline
from benchmarks.results import GEMMS, PRODUCTS, Entry, gemms_ms, memory_gib, update
from benchmarks.workloads import LINEAR, Workload

ROOT = Path(__file__).resolve().parent.parent
OURS, FORWARD, GRADIENTS = "pallas_loss", "forward", "value_and_grad"
LABELS = {
    "pallas_loss:recompute": "pallas_loss, recompute",
    "pallas_loss:in_forward": "pallas_loss, in_forward",
    "pallas_loss:stored": "pallas_loss, stored",
    "xla_f32": "XLA, f32 logits",
    "xla_bf16": "XLA, bf16 logits",
    "xla_remat8": "XLA, 8 chunks, remat",
    "xla_tiled": "XLA, tiled (ours)",
    "tokamax": "Tokamax chunked_xla",
    "torch_compile": "torch.compile",
    "liger": "Liger",
    "verl": "verl",
    "liger_sm90": "Liger SM90",
    "liger_sm90_recompute": "Liger SM90, recompute",
    "cce": "CCE",
    "quack": "quack",
}
Candidates = Mapping[str, Mapping[str, Entry]]
Run = dict[str, Any]


def read(files: Iterable[Path]) -> list[Run]:
    """The runs of the files on one device, merged; ``scaling`` reads those on several."""
    held = (json.loads(file.read_text()) for file in files)
    return merged(run for run in held if re.match("linear|rows$", run.get("suite", "")))


def merged(runs: Iterable[Run]) -> list[Run]:
    """One run for each suite and device; of two times for one thing, the later."""
    by_device: dict[tuple[str, str], Run] = {}
    for run in sorted(runs, key=lambda run: run["started"]):
        key = run["suite"], run["environment"]["device"]
        whole = by_device.setdefault(key, run | {"workloads": {}, "commits": []})
        versions = whole["environment"]["versions"] | run["environment"]["versions"]
        whole["environment"] = run["environment"] | {"versions": versions}
        commit = run["environment"]["commit"]
        whole["commits"] = [c for c in whole["commits"] if c != commit] + [commit]
        held, depth = ("losses", 2) if _of_rows(run) else ("candidates", 1)
        for name, workload in run["workloads"].items():
            if not _of_rows(run):
                _mark(workload["candidates"])
            into = whole["workloads"].setdefault(name, workload | {held: {}})
            update(into[held], workload[held], depth)
    return list(by_device.values())


def _mark(candidates: Candidates) -> None:
    """Marks the entries whose run did not time products in a row, but one by one."""
    if PRODUCTS[3] not in candidates.get(GEMMS["jax"], candidates.get(GEMMS["torch"], {})):
        for modes in candidates.values():
            for entry in modes.values():
                if "over_gemms" in entry:
                    entry["one_by_one"] = True


def over_gemms(entry: Entry, products: str) -> str:
    """The time over that of so many products, with a star if these were timed one by one."""
    over = entry.get("over_gemms", {})
    if products not in over:
        return ""
    return f"{over[products]:.3f}" + ("*" if products != "1" and "one_by_one" in entry else "")


def _of_rows(run: Run) -> bool:
    return run["suite"] == "rows"


def in_order(run: Run) -> Iterator[tuple[str, Run]]:
    """The workloads, by head and then by tokens."""
    yield from sorted(run["workloads"].items(), key=lambda w: (-w[1]["H"], w[1]["V"], w[1]["T"]))


def rivals(run: Run) -> list[str]:
    """The other candidates that were timed somewhere, in the order of ``LABELS``."""
    timed = {
        name
        for workload in run["workloads"].values()
        for name, modes in workload["candidates"].items()
        if name not in (OURS, *GEMMS.values()) and "ms" in modes.get(GRADIENTS, {})
    }
    return [name for name in LABELS if name in timed] + sorted(timed - set(LABELS))


def markdown(run: Run) -> str:
    """The tables of a run: ours beside the bare GEMMs, then all beside each other."""
    if _of_rows(run):
        return "\n".join([*_table(*render_rows.heads_and_rows(run)), "", _caption(run)])
    others = rivals(run)
    timed = [w for _, w in in_order(run) if OURS in w["candidates"]]
    ours = [[_shape(w), *_beside_gemms(w["candidates"][OURS])] for w in timed]
    all_ = [
        [_shape(w), *(_ms_gib(w["candidates"].get(n, {}).get(GRADIENTS)) for n in (OURS, *others))]
        for _, w in in_order(run)
    ]
    return "\n".join(
        [
            *_table(("T x H x V", *_BESIDE_GEMMS), ours),
            "",
            "Value and both gradients, ms and GiB:",
            "",
            *_table(("T x H x V", OURS, *(LABELS.get(n, n) for n in others)), all_),
            "",
            _caption(run),
        ]
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in (heads, ["---"] * len(heads), *rows)]


def _shape(workload: Run) -> str:
    return f"{workload['T']} x {workload['H']} x {workload['V']}"


_BESIDE_GEMMS = (
    *("forward, ms", "TFLOP/s", "/ 1 GEMM", "value and gradients, ms", "TFLOP/s", "/ 3 GEMMs"),
    *("/ 4 GEMMs", "memory, GiB", "compile, s"),
)


def _beside_gemms(modes: Mapping[str, Entry]) -> Iterator[str]:
    for mode, gemms in ((FORWARD, "1"), (GRADIENTS, "34")):
        entry = modes.get(mode, {})
        if "ms" not in entry:
            yield from (entry.get("error", "").split(":")[0], "", *("" for _ in gemms))
            continue
        yield from (f"{entry['ms']:.2f}", f"{entry['tflops']:.0f}")
        yield from (over_gemms(entry, n) for n in gemms)
    yield "" if (gib := memory_gib(entry)) is None else f"{gib:.2f}"
    yield f"{entry['compile_s']:.1f}" if "compile_s" in entry else ""


def _ms_gib(entry: Entry | None) -> str:
    if entry is None or "ms" not in entry:
        return entry["error"].split(":")[0] if entry else ""
    gib = memory_gib(entry)
    host = f" ({entry['host_ms']:.2f})" if "host_ms" in entry else ""
    return f"{entry['ms']:.2f}{host}" + ("" if gib is None else f", {gib:.2f}")


def _caption(run: Run) -> str:
    made_by, settings = run["environment"], run["settings"]
    counted = (
        render_rows.caption(run)
        if _of_rows(run)
        else f'Medians, {settings["dtype"]}, `w_layout="{settings["layout"]}"`. JAX: the sum of '
        "the kernels of one call; PyTorch: CUDA events around a call; in brackets, of both, the "
        "host's clock over a batch of calls. TFLOP/s count 1 and 3 products; * is over products "
        "timed one by one, which run up to 10% faster than in a row; memory is what a call takes "
        "beyond its inputs and results; the time to compile is that of the last run in which "
        "nothing compiled beside it."
    )
    versions = ", ".join(f"{k} {v}" for k, v in made_by["versions"].items() if k != "jaxlib")
    driver = f", driver {made_by['driver']}" if "driver" in made_by else ""
    commits = ", ".join(commit[:10] for commit in run["commits"])
    return f"{counted} {made_by['device']}{driver}; {versions}; commit {commits}."


def plot_times(run: Run, path: Path) -> None:
    """Value and gradients over the bare three GEMMs, for each workload and candidate."""
    figure = Figure(figsize=(12, 5), layout="constrained")
    axes = figure.subplots()
    names, workloads = [OURS, *rivals(run)], [w for _, w in in_order(run)]
    width = 0.85 / len(names)
    for i, name in enumerate(names):
        label = LABELS.get(name, name)
        for j, workload in enumerate(workloads):
            entry = workload["candidates"].get(name, {}).get(GRADIENTS, {})
            if "3" in entry.get("over_gemms", {}):
                at = j + (i - len(names) / 2 + 0.5) * width
                alpha = 0.4 if "one_by_one" in entry else 1
                axes.bar(at, entry["over_gemms"]["3"], width, color=_color(i), alpha=alpha)
        axes.bar(0, 0, label=label, color=_color(i))
    axes.axhline(1, color="grey", linestyle=":")
    labels = [f"{w['T']}\n{w['H']}\n{w['V']}" for w in workloads]
    axes.set_xticks(range(len(workloads)), labels)
    axes.set(xlabel="T, H, V", ylabel="value and gradients / bare three GEMMs")
    axes.set_title(f"{run['environment']['device']} (pale: over GEMMs timed one by one)")
    figure.legend(fontsize="small", loc="outside right upper")
    figure.savefig(path, dpi=120)


def plot_memory(run: Run, axis: str, tag: str, path: Path) -> None:
    """Memory beyond inputs and gradients, over the workloads with a tag that the run has."""
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    swept = sorted(_tagged(run, tag), key=lambda w: w[axis])
    if not swept:
        return
    for i, name in enumerate([OURS, *rivals(run)]):
        entries = [(w[axis], w["candidates"].get(name, {}).get(GRADIENTS, {})) for w in swept]
        points = [(x, gib) for x, entry in entries if (gib := memory_gib(entry))]
        style = {"label": LABELS.get(name, name), "color": _color(i)}
        axes.plot([x for x, _ in points], [y for _, y in points], "o-", **style)
    axes.set(xlabel=axis, ylabel="GiB beyond inputs and gradients", xscale="log", yscale="log")
    axes.set_xticks([w[axis] for w in swept], [str(w[axis]) for w in swept], rotation=30)
    axes.set_xticks([], minor=True)
    fixed = {"T", "H", "V"} - {axis}
    same = [f"{k} = {swept[0][k]}" for k in sorted(fixed) if len({w[k] for w in swept}) == 1]
    axes.set_title(f"{', '.join(same)}; {run['environment']['device']}")
    figure.legend(fontsize="small", loc="outside right upper")
    figure.savefig(path, dpi=120)


def plot_overview(run: Run, path: Path) -> None:
    """Speed and memory of everything that was timed at the workload with the most candidates."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    times, memory = figure.subplots(1, 2)
    timed = lambda w: [n for n in (OURS, *rivals(run)) if "ms" in _gradients(w, n)]  # noqa: E731
    workload = max(run["workloads"].values(), key=lambda w: len(timed(w)))
    names = sorted(timed(workload), key=lambda n: -_gradients(workload, n)["ms"])
    colors = ["C0" if name.startswith(OURS) else "silver" for name in names]
    labels = [LABELS.get(name, name) for name in names]
    ms = [_gradients(workload, name)["ms"] for name in names]
    gib = [memory_gib(_gradients(workload, name)) or 0.0 for name in names]
    for axes, widths, form in ((times, ms, "{:.0f}"), (memory, gib, "{:.2f}")):
        bars = axes.barh(labels, widths, color=colors)
        axes.bar_label(bars, [form.format(width) for width in widths], padding=3)
        axes.margins(x=0.12)
        axes.spines[["top", "right"]].set_visible(False)
    memory.set_yticklabels([])
    for products, style in ((3, ":"), (4, "--")):
        bare = gemms_ms(workload["candidates"], "jax", products)
        times.axvline(bare, color="black", linestyle=style, label=f"{products} bare GEMMs")
    times.legend(loc="upper right", fontsize="small")
    times.set_xlabel("value and both gradients, ms")
    memory.set_xlabel("memory beyond inputs and gradients, GiB")
    figure.suptitle(f"{_shape(workload)}, {run['environment']['device']}")
    figure.savefig(path, dpi=120)


def _gradients(workload: Run, candidate: str) -> Entry:
    return workload["candidates"].get(candidate, {}).get(GRADIENTS, {})


def training_steps(data: Mapping[str, Any]) -> str:
    """A row for each way to the loss of ``benchmarks.train_step``."""
    settings, made_by = data["settings"], data["environment"]
    of_size = ("batch", "tokens_per_s", "gib")
    heads = ["loss", "sequences", "tokens/s", "GiB", "sequences", "tokens/s", "GiB"]
    rows = [
        [
            name,
            *(
                f"{entry.get(k, 0):,}" if (entry := sizes.get(size)) else ""
                for size in ("same_batch", "largest_batch")
                for k in of_size
            ),
        ]
        for name, sizes in data["losses"].items()
    ]
    caption = (
        f"A training step of {settings['layers']} layers of width {settings['hidden']} and a "
        f"vocabulary of {settings['vocab']}, sequences of {settings['length']}, AdamW, bfloat16 "
        f"products; naive is Optax's loss of float32 logits. The larger batch was given, a round "
        f"one near the most that fits. XLA_FLAGS: {settings['XLA_FLAGS'] or 'none'}. "
        f"{made_by['device']}; commit {made_by['commit'][:10]}."
    )
    return "\n".join([*_table(heads, rows), "", caption])


def _tagged(run: Run, tag: str) -> Iterator[Run]:
    named: dict[str, Workload] = {w.name: w for w in LINEAR}
    for name, workload in run["workloads"].items():
        if name in named and tag in named[name].tags or name not in named:
            yield workload


def _color(i: int) -> tuple[float, ...] | str:
    return f"C{i}" if i < 10 else ("black", "gold", "navy", "tan")[i % 4]


def into_readme(text: str, suite: str, content: str) -> str | None:
    """The text with the suite's table replaced; None if it has no place for one."""
    place = re.compile(rf"(<!-- bench:{re.escape(suite)} -->\n).*?(<!-- /bench -->)", re.DOTALL)
    if not place.search(text):
        return None
    return place.sub(lambda found: f"{found[1]}{content}\n{found[2]}", text)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.render", description=__doc__)
    results = ROOT / "benchmarks" / "results"
    parser.add_argument("files", nargs="*", type=Path, help="default: all of benchmarks/results")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--plots", type=Path, default=results / "plots")
    args = parser.parse_args(argv)
    files = args.files or sorted(results.glob("*.json"))
    runs = read(files)
    args.plots.mkdir(parents=True, exist_ok=True)
    text = args.readme.read_text()
    for suite in dict.fromkeys(run["suite"] for run in runs):
        of_suite = [run for run in runs if run["suite"] == suite]
        for run in () if suite == "rows" else of_suite:
            device = re.sub(r"[^a-z0-9]+", "-", run["environment"]["device"].lower()).strip("-")
            stem = f"{suite}_{device}"
            plot_overview(run, args.plots / f"{stem}_overview.png")
            plot_times(run, args.plots / f"{stem}_time.png")
            plot_memory(run, "T", "tokens", args.plots / f"{stem}_memory_T.png")
            plot_memory(run, "V", "vocab", args.plots / f"{stem}_memory_V.png")
        content = "\n\n".join(markdown(run) for run in of_suite)
        replaced = into_readme(text, suite, content)
        if replaced is None:
            print(f"{args.readme} has no place <!-- bench:{suite} -->; the table is\n{content}")
        text = replaced or text
    for data in scaling.read(files):
        made_by = data["environment"]
        if made_by["gpus"] == 1:  # the shares of meshes, as ``scaling.shards`` tabulates them
            continue
        device = re.sub(r"[^a-z0-9]+", "-", made_by["device"].lower()).strip("-")
        scaling.plot(data, args.plots / f"tensor_parallel_{device}-x{made_by['gpus']}.png")
    for file, data in timeline.held(files):
        timeline.plot(data, args.plots / f"{file.stem}.png")
    if active := render_active.read(files):
        render_active.plot(active, args.plots / "active.png")
        text = into_readme(text, "active", render_active.markdown(active)) or text
    for file in files:
        data = json.loads(file.read_text())
        if data.get("suite") == "train_step":
            text = into_readme(text, "train_step", training_steps(data)) or text
    args.readme.write_text(text)


if __name__ == "__main__":
    main()
