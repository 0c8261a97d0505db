"""The benchmark harness at tiny sizes: its data, its candidates, its clocks. Not its speeds."""

import argparse
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import (
    jax_stage,
    peak_stage,
    render_active,
    rounds,
    run,
    stage,
    torch_peers,
    train_step,
)
from benchmarks.candidates import GEMMS, Program, Setting, suite
from benchmarks.inputs import make_inputs
from benchmarks.results import (
    OUT_OF_TIME,
    PENDING,
    PRODUCTS,
    Store,
    derive,
    error_words,
    gemms_ms,
)
from benchmarks.workloads import LINEAR, LOGIT_STD, TINY, Workload, select

LINEAR_CE = suite("linear_ce")
MODES = tuple(LINEAR_CE.modes)
ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_tensor_parallel_runs_on_fake_devices(tmp_path):
    """Meshes that are here are timed beside their shard alone; a larger one as its shard only."""
    out = tmp_path / "tp.json"
    command = [sys.executable, "-m", "benchmarks.tensor_parallel", "--workloads=64x32x1024"]
    command += ["--meshes=tp=1,dp=2:tp=2,tp=8", "--losses=ce", "--implementation=xla"]
    command += ["--repeats=2", "--commit=abc", "--dtype=float32", f"--out={out}"]
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    for _ in range(2):  # the second finds nothing to do
        subprocess.run(command, cwd=ROOT, env=env, check=True, capture_output=True, timeout=300)
    candidates = json.loads(out.read_text())["workloads"]["64x32x1024"]["candidates"]
    assert set(candidates) == {
        "dp=1,tp=1 pallas_loss", "dp=1,tp=1 xla", "dp=2,tp=2 pallas_loss", "dp=2,tp=2 local",
        "dp=2,tp=2 apart", "dp=2,tp=2 xla", "dp=1,tp=8 local",
    }  # fmt: skip
    sharded = candidates["dp=2,tp=2 pallas_loss"]["ce value_and_grad"]
    compared = {"efficiency", "over_local", "over_apart"}
    assert {"ms", "tflops_per_gpu", "temp_bytes"} | compared <= set(sharded)
    apart = candidates["dp=2,tp=2 apart"]["ce value_and_grad"]
    assert apart["collectives"] == [] and apart["value"] > 0
    assert sharded["value_off"] < 1e-4
    # Of 32 tokens, 512 columns of float32 w; three row sums from two shards.
    expected = {"row sums": 3 * 4 * 32 * 2, "dx": 4 * 32 * 32, "dw": 4 * 32 * 512}
    assert sharded["expected_bytes"] == expected
    sizes = sorted(size for _, size in sharded["collectives"])
    assert sizes == sorted(expected.values())


def test_active_times_every_mask_through_one_program(tmp_path, monkeypatch):
    """Masks of the asked fractions; programs with and without the means to skip agree."""
    from benchmarks import active, masks

    out = tmp_path / "active.json"
    command = ["active", "--workloads=tiny", "--repeats=1", "--commit=abc", f"--out={out}"]
    command += ["--programs", "in_forward", "logprob", "--fractions", "1", "0.25", "--xla"]
    command += ["--padding=33x16x64"]
    monkeypatch.setattr(sys, "argv", command)
    active.main()
    of_masks = render_active.read([out])
    line, _, xla = render_active.lines(of_masks)
    assert xla.program == "xla_bf16" and xla.cell(0.25) == "", "timed with nothing masked alone"
    assert list(line.ms) == [1.0, 0.25] and [len(ms) for ms in line.ms.values()] == [1, 3]
    assert line.worst(0.25) == max(line.ms[0.25]) / line.dense_ms
    table = render_active.markdown(of_masks)
    assert "| 100% | 25% |" in table
    assert "33 tokens padded to their bucket of 48, H = 16, V = 64: pallas_loss " in table
    render_active.plot(of_masks, tmp_path / "active.png")
    result = json.loads(out.read_text())
    (padded,) = result["padding"].values()
    assert padded["padded_T"] == 48 and set(padded["programs"]["in_forward"]) == {
        "as it is",
        "padded",
    }
    found = result["workloads"]["tiny"]
    times = found["programs"]["in_forward"]
    assert set(times) == set(masks.MASKS)
    assert times["scattered"]["1.0"]["active"] == 32
    assert all(times[mask]["0.25"]["active"] == 8 for mask in ("scattered", "one span a sample"))
    assert set(found["programs"]["in_forward, static"]["scattered"]) == {"1.0"}
    assert found["agreement"]["in_forward"]["scattered"]["dw"] < 1e-2
    for mask, make in masks.MASKS.items():
        counted = make(100_000, 0.25, np.random.default_rng(0))
        assert abs(counted.mean() - 0.25) < 0.01, mask


def test_workloads_are_found_by_name_tag_and_shape():
    assert select("all") == LINEAR
    assert [w.V for w in select("shards")] == [262144, 131072, 65536, 32768]
    assert [w.name for w in select("tiny,llama3-1024")] == ["tiny", "llama3-1024"]
    assert {w.T for w in select("tokens")} == {1024, 4096, 8192, 16384, 32768}
    assert select("8x16x32") == (Workload("8x16x32", 8, 16, 32),)
    assert select("8192x4096x128256") == select("llama3-8192")
    for wrong in ("nothing", "8x16", "0x16x32", ""):
        with pytest.raises(ValueError, match="no workload"):
            select(wrong)


@pytest.mark.parametrize("layout", ["vh", "hv"])
def test_logits_spread_as_in_a_trained_head(layout):
    x, w, labels = make_inputs(Workload("w", 256, 128, 1000), jnp.float32, layout, seed=1)
    assert w.shape == ((1000, 128) if layout == "vh" else (128, 1000))
    z = np.asarray(x @ (w.T if layout == "vh" else w), np.float64)
    at_label = z[np.arange(256), labels]
    p_label = np.exp(at_label - np.log(np.exp(z).sum(1)))
    z[np.arange(256), labels] = np.nan
    assert abs(np.nanstd(z) / LOGIT_STD - 1) < 0.1
    assert 0.25 < (p_label > 0.9).mean() < 0.6, "some tokens are predicted with confidence"
    assert 0.25 < (p_label < 0.1).mean() < 0.6, "and some are not"


@pytest.mark.parametrize("layout", ["vh", "hv"])
def test_candidates_agree(layout):
    inputs = make_inputs(TINY, jnp.float32, layout)
    setting = Setting(TINY, inputs, layout)
    names = [name for name in LINEAR_CE.candidates if name not in ("tokamax", "xla_f32")]
    programs = LINEAR_CE.build("xla_f32", setting)
    value, grads = jax.jit(programs["value_and_grad"].function)(*inputs)
    for name in [*names, "pallas_loss:reference"]:
        programs = LINEAR_CE.build(name, setting)
        # bfloat16 logits of magnitude 10 are off by up to 2^-5.
        tolerance = 2e-2 if name == "xla_bf16" else 1e-5
        other, others = jax.jit(programs["value_and_grad"].function)(*inputs)
        distances = jax_stage._distances((other, others), (value, grads))
        assert max(map(float, jax.tree.leaves(distances))) < tolerance, name
        assert abs(programs["forward"].function(*inputs) - other) < 1e-6, name


@pytest.mark.parametrize("layout", ["vh", "hv"])
def test_bare_gemms_are_those_of_the_loss(layout):
    inputs = make_inputs(TINY, jnp.float32, layout)
    gemms = LINEAR_CE.build(GEMMS, Setting(TINY, inputs, layout))
    x, w, _ = inputs
    d = gemms["dx"].args[0]
    w_vh = w if layout == "vh" else w.T
    expected = {"z": x @ w_vh.T, "dx": d @ w_vh, "dw": d.T @ x if layout == "vh" else x.T @ d}
    run = lambda name: jax.jit(gemms[name].function)(*gemms[name].args)  # noqa: E731
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    for name, value in expected.items():
        close(run(name), value)
    for products in (3, 4):
        zs, dx, dw = run(PRODUCTS[products])
        assert len(zs) == products - 2
        jax.tree.map(close, (zs[0], dx, dw), tuple(expected.values()))
        lowered = jax.jit(gemms[PRODUCTS[products]].function).lower(*gemms[PRODUCTS[products]].args)
        assert lowered.compile().as_text().count(" dot(") == products, "none is made twice"
    assert abs(float(d.sum(dtype=jnp.float32)) - 1) < 0.5, "as much as softmax(z)/T sums to"


def test_rounds_have_orders_of_their_own():
    order: list[str] = []
    clocks = {name: lambda name=name: order.append(name) or 1.0 for name in "abcd"}
    rounds.interleave(clocks, repeats=20)
    visits = ["".join(order[i : i + 4]) for i in range(0, 80, 4)]
    assert all(sorted(visit) == [*"abcd"] for visit in visits) and len(set(visits)) > 5


def test_rounds_visit_all_and_outlive_failures():
    order, value = [], {"a": 3.0, "b": 1.0}

    def clock(name):
        order.append(name)
        if name == "b" and len(order) > 4:
            raise RuntimeError("no more")
        return value[name]

    clocks = {name: lambda name=name: clock(name) for name in value}
    samples, errors = rounds.interleave(clocks, repeats=4)
    assert all({*order[i : i + 2]} == {"a", "b"} for i in (0, 2, 4)) and len(order) in (7, 8)
    assert samples == {"a": [3.0] * 4} and str(errors["b"]) == "no more"
    late = rounds.Deadline(time.time() - 1)
    samples, _ = rounds.interleave({"a": lambda: 1.0}, repeats=9, deadline=late, at_least=2)
    assert samples == {"a": [1.0, 1.0]}
    assert rounds.summary(range(1, 7)) == {"ms": 3.5, "p20_ms": 2, "p80_ms": 5, "n": 6}
    assert rounds.summary([2.0], "host_")["host_p80_ms"] == 2


def test_failures_are_written_down_and_not_repeated_in_a_run(tmp_path):
    path = tmp_path / "r.json"
    store = Store(path, "run 1")
    with stage.attempt(store, TINY, "good", "forward", lambda: False):
        entry = json.loads(path.read_text())["workloads"]["tiny"]["candidates"]["good"]["forward"]
        assert entry == {"error": "its process died", "run": "run 1"}
        assert not Store(path, "run 1").needs(TINY, "good", "forward")
    with stage.attempt(store, TINY, "bad", "forward", lambda: False):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")
    with (
        pytest.raises(SystemExit) as left,
        stage.attempt(store, TINY, "worse", "forward", lambda: True),
    ):
        raise RuntimeError("illegal memory access")
    assert left.value.code == stage.RESTART
    errors = {n: m["forward"]["error"] for n, m in store.candidates(TINY).items()}
    assert errors["good"] == PENDING and errors["bad"] == "out of memory"
    assert "illegal" in errors["worse"]
    for name, again in {"good": True, "bad": False, "worse": False, "new": True}.items():
        assert Store(path, "run 1").needs(TINY, name, "forward") == again
        assert Store(path, "run 2").needs(TINY, name, "forward")
    store.ran_out_of_time()
    assert Store(path).candidates(TINY)["good"]["forward"]["error"] == OUT_OF_TIME
    assert error_words(ModuleNotFoundError("No module named 'x'")) == "absent: No module named 'x'"


def test_no_program_is_compiled_when_time_is_up(tmp_path):
    """But the bare GEMMs are, which what has been timed is compared with."""
    store, late = Store(tmp_path / "r.json", "run"), rounds.Deadline(time.time() - 1)
    program = Program(lambda: jnp.ones(()), ())
    programs = {("a", "forward"): program, (GEMMS, "z"): program}
    assert set(jax_stage._compiled(programs, 2, TINY, store, late)) == {(GEMMS, "z")}
    assert store.candidates(TINY)["a"]["forward"]["error"] == OUT_OF_TIME


def test_ratios_and_rates():
    times = {PRODUCTS[n]: {"ms": ms} for n, ms in ((1, 2.0), (3, 10.0), (4, 12.0))}
    gemms = {n: gemms_ms({"gemms": times}, "jax", n) for n in (1, 3, 4)}
    assert gemms == {1: 2, 3: 10, 4: 12}
    assert derive({"ms": 6.0}, 12 * 10**9, gemms) == {
        **{"ms": 6.0, "tflops": 2.0},
        **{"over_gemms": {"1": 3.0, "3": 0.6, "4": 0.5}},
    }
    assert "over_gemms" not in derive({"ms": 6.0}, 1, {1: gemms_ms({}, "torch", 1)})


def test_peaks_count_what_is_beyond_inputs_and_outputs():
    used = SimpleNamespace(now=100, peak=100)

    def program(temp, output):
        def call():
            used.peak = max(used.peak, used.now + temp + output)

        return SimpleNamespace(facts={"temp_bytes": temp, "output_bytes": output}, run=call)

    class Callable(SimpleNamespace):
        def __call__(self):
            self.run()

    big, small = (Callable(**vars(program(*sizes))) for sizes in ((500, 10), (50, 10)))
    hidden = Callable(facts={"temp_bytes": 60, "output_bytes": 10}, run=lambda: None)
    stats = lambda: {"bytes_in_use": used.now, "peak_bytes_in_use": used.peak}  # noqa: E731
    ready = {("big", "f"): big, ("small", "f"): small, ("hidden", "f"): hidden}
    assert dict(peak_stage.peaks(ready, stats)) == {("small", "f"): 50, ("big", "f"): 500}


def test_a_crashed_stage_is_started_again(tmp_path, monkeypatch):
    (tmp_path / "crashing.py").write_text(
        "import os, pathlib, sys\n"
        f"log = pathlib.Path({str(tmp_path / 'log')!r})\n"
        "log.write_text((log.read_text() if log.exists() else '') + 'x')\n"
        "os._exit(75 if len(log.read_text()) < 3 else 0)\n"
    )
    monkeypatch.setitem(run.STAGES, "jax", "crashing")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    args = run.arguments(["--out", str(tmp_path / "r.json")])
    run.run_stage("jax", args, "run", "tiny", time.time() + 60, str(tmp_path))
    assert (tmp_path / "log").read_text() == "xxx"


def test_peers_load_where_there_is_a_torch(tmp_path):
    """The peers' scripts with a PyTorch, of which nothing but names is needed to load them."""
    for module in ("torch", "torch/nn"):
        (tmp_path / module).mkdir()
        (tmp_path / module / "__init__.py").touch()
    (tmp_path / "torch/nn/functional.py").touch()
    scripts = "torch_peers", "row_peers", "active_torch"
    command = [sys.executable, "-c", f"from benchmarks import {', '.join(scripts)}"]
    env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    subprocess.run(command, env=env, check=True, timeout=60)


def test_torch_peers_are_left_out_with_a_word(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch_peers, "torch", None)
    monkeypatch.setattr(torch_peers, "torch_absent", "no torch", raising=False)
    monkeypatch.setattr("sys.argv", ["torch_peers", "--json", str(tmp_path / "r.json")])
    torch_peers.main()
    assert "left out: no torch" in capsys.readouterr().out


def test_only_what_compiles_alone_says_how_long_it_takes():
    new = time.time_ns() % 10**6  # a program that no compilation cache holds
    program = Program(lambda x: x + new, (jnp.ones(3),))
    assert "compile_s" in jax_stage.compile_program(program).facts
    assert "compile_s" not in jax_stage.compile_program(program, alone=False).facts


def test_a_training_step_of_each_loss(tmp_path):
    sizes = {"vocab": 64, "hidden": 64, "layers": 1, "heads": 2, "mlp": 64}
    sizes |= {"length": 16, "batch": 2}
    out = tmp_path / "step.json"
    argv = [f"--{name}={size}" for name, size in sizes.items()]
    argv += ["--losses", "auto", "naive", "--largest", "auto=2,naive=3", "--repeats=2"]
    command = [sys.executable, "-m", "benchmarks.train_step", *argv, "--commit=abc", f"--out={out}"]
    subprocess.run(command, cwd=ROOT, check=True)  # models promote types, which the tests forbid
    losses = json.loads(out.read_text())["losses"]
    assert [losses[n]["largest_batch"]["batch"] for n in ("auto", "naive")] == [2, 3]
    entry = losses["naive"]["same_batch"]
    assert entry["batch"] == 2 and entry["tokens_per_s"] > 0 and entry["gib"] > 0


def test_the_largest_batches_may_be_named():
    assert train_step._sizes("naive=96,auto=384") == {"naive": 96, "auto": 384}
    with pytest.raises(argparse.ArgumentTypeError, match=r"no loss \['other'\]"):
        train_step._sizes("other=1")
