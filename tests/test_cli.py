"""`python -m pallas_loss`: what it says is what the library does."""

import logging
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from pallas_loss import _device, cli, fused_linear_ce, plans, select
from pallas_loss.cli import bench
from pallas_loss.cli.shapes import Call, Shape

TINY = Shape(32, 16, 100)


def run(capsys, *argv):
    """(status, lines, complaint) of a command."""
    status = cli.main(argv)
    said = capsys.readouterr()
    return status, said.out.splitlines(), said.err


def test_info_names_every_backend_and_its_reason(capsys):
    status, lines, _ = run(capsys, "info")
    assert status == 0 and f"jax {jax.__version__}" in "\n".join(lines)
    for names in (select.implementations(), select.row_implementations()):
        assert set(names) <= {line.split()[0] for line in lines if line.startswith("  ")}
    verdicts = {tuple(line.split()[:2]) for line in lines}
    assert ("xla", "runs") in verdicts and ("mosaic_gpu", "no:") in verdicts
    assert any("needs a Hopper" in line for line in lines)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("layout", ["hv", "vh"])
def test_the_plan_is_the_one_that_the_loss_takes(capsys, caplog, dtype, layout):
    """The library logs its plan; the command prints it from shapes alone."""
    call = Call(TINY, dtype, layout)
    plans._log_plan.cache_clear()
    with caplog.at_level(logging.INFO, "pallas_loss"):
        jax.eval_shape(lambda *a: fused_linear_ce(*a, w_layout=layout), *call.arguments)
    logged = [r.getMessage() for r in caplog.records if r.getMessage().startswith("gradients: ")]
    _, lines, _ = run(
        capsys, "info", "32,16,100", "--dtype", dtype, "--layout", layout, "--no-compile"
    )
    assert logged == [f"gradients: {call.plan('auto')}"]
    assert f"  backward='auto' is {call.plan('auto')}" in lines


def test_a_plan_that_cannot_be_had_says_why():
    found = dict(Call(TINY, "float16", "hv").plans())
    assert found["recompute"].flops == 8 * 32 * 16 * 100
    assert "float16 cannot hold the exponentials" in found["in_forward"]


def test_memory_is_that_of_the_compiled_program(capsys):
    _, lines, _ = run(capsys, "info", "512x64x4096", "--dtype", "float32")
    t, h, v = 512, 64, 4096
    found = re.search(r"([\d.e-]+) GiB of arguments and ([\d.e-]+) GiB of results", lines[-1])
    # x, w and labels; value, dx, dw. XLA pads each buffer a little.
    assert float(found[1]) == pytest.approx(4 * (t * h + h * v + t) / 2**30, rel=1e-2)
    assert float(found[2]) == pytest.approx(4 * (t * h + h * v) / 2**30, rel=1e-2)


def test_bench_times_every_plan_against_xla(capsys):
    status, lines, _ = run(capsys, "bench", "32,16,100", "--rounds", "2", "--dtype", "float32")
    assert status == 0
    rows = {line[: len(lines[3])].split("  ")[0]: line.split() for line in lines[5:]}
    assert [*rows] == ["fused, recompute (auto)", "fused, in_forward", "XLA, float32 logits"]
    for cells in rows.values():
        value_ms, gradients_ms = map(float, cells[-5:-3])
        assert value_ms > 0 and gradients_ms > 0
    losses = {float(cells[-1]) for cells in rows.values()}
    assert max(losses) - min(losses) < 1e-5


def test_bench_compares_like_with_like():
    """All candidates of a call have the same value and gradients."""
    for layout in ("hv", "vh"):
        call = Call(TINY, "float32", layout)
        inputs = bench.make_inputs(call)
        values = [jax.value_and_grad(f, (0, 1))(*inputs) for f in bench.candidates(call).values()]
        want, *others = values
        assert len(others) == 2
        for other in others:
            jax.tree.map(
                lambda a, b: jnp.allclose(a, b, rtol=1e-4, atol=1e-6) or 1 / 0, other, want
            )


def test_bench_leaves_out_what_does_not_fit(capsys, monkeypatch):
    """Sixteen terabytes are not asked for; the row says so."""
    monkeypatch.setattr(bench._device, "memory_bytes", lambda: 1000)
    program = bench.Program("naive", "value")
    call = Call(TINY, "float32", "hv")
    bench._compile(program, bench.candidates(call)["XLA, float32 logits"], call)
    assert program.compiled is None and program.error == "does not fit"


def test_without_a_progress_bar_bench_names_the_extra(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    status, lines, complaint = run(capsys, "bench", "32,16,100")
    assert status == 2 and not lines
    assert 'pip install "pallas_loss[bench]"' in complaint


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (("info", "--implementation", "cuda"), "must be one of mosaic_gpu, xla, reference"),
        (("info", "--implementation", "mosaic_gpu"), "needs a Hopper GPU"),
        (("bench", "8,8,8", "--implementation", "mosaic_gpu"), "needs a Hopper GPU"),
    ],
)
def test_what_cannot_run_is_refused(capsys, argv, complaint):
    status, lines, said = run(capsys, *argv)
    assert status == 2 and not lines and complaint in said


@pytest.mark.parametrize(
    "argv",
    [("bench", "8,8"), ("info", "8,0,8"), ("info", "a,b,c"), ("bench", "8,8,8", "--rounds", "0")],
)
def test_malformed_arguments_print_the_value(capsys, argv):
    with pytest.raises(SystemExit):
        cli.main(argv)
    assert f"got '{argv[1] if len(argv) == 2 else argv[3]}'" in capsys.readouterr().err


def test_it_is_a_module_to_run():
    command = [sys.executable, "-m", "pallas_loss", "info", "64,32,128", "--no-compile"]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    assert "backward='auto' is recompute" in done.stdout


@pytest.mark.parametrize(
    ("kind", "capability", "unproven"),
    [("NVIDIA H200", (9, 0), False), ("NVIDIA B200", (10, 0), True)],
)
def test_info_of_another_chip(capsys, monkeypatch, kind, capability, unproven):
    """The kernels run where their chip is, and what no device has run yet is called so."""
    chip = _device.Chip("gpu", kind, capability)
    monkeypatch.setattr(_device, "current_chip", lambda: chip)
    status, lines, _ = run(capsys, "info")
    assert status == 0 and f"device {kind}" in "\n".join(lines)
    assert lines.count("  mosaic_gpu   runs") == 3
    assert any("not yet run" in line for line in lines) == unproven
