"""The row kernel without a GPU: interpreted with race detection, and as the real assembler sees it.

Interpreted cases run in a process of their own under a limit, as in `test_mosaic_interpret`; this
file is also the script they run. A thread of the interpreter that waits at a barrier occupies one
of XLA's, of which there are as many as cores, unless NPROC says otherwise: with two of them all may
wait for one that is not run.
"""

import functools
import os
import re
import subprocess
import sys

import aot
import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_loss import (
    UnsupportedError,
    fused_ce,
    fused_forward_kl,
    fused_reverse_kl,
    fused_soft_ce,
    tuning,
)

TIME_LIMIT_S, TRIES = 60, 3


def _ce(z, t, y, **options):
    return fused_ce(z, y, **options)


def _ce_metrics(z, t, y, **options):
    value, metrics = fused_ce(z, y, return_metrics=True, **options)
    return value + jnp.sum(metrics.predictions.astype(jnp.float32), where=y >= 0)


def _ce_smooth_metrics(z, t, y, **options):
    return _ce_metrics(z, t, y, label_smoothing=0.1, **options)


def _ce_everything(z, t, y, **options):
    options |= {"label_smoothing": 0.1, "z_loss": 1e-2, "logit_soft_cap": 5.0}
    cw = jnp.linspace(0.5, 2.0, z.shape[-1])
    return fused_ce(z, y, class_weights=cw, temperature=jnp.float32(1.3), **options)


def _soft_ce(z, t, y, **options):
    return fused_soft_ce(z, target_logits=t, labels=y, **options)


def _soft_ce_probs(z, t, y, **options):
    q = jax.nn.softmax(t.astype(jnp.float32)).astype(t.dtype)
    return fused_soft_ce(z, q, labels=y, **options)


def _reverse_kl(z, t, y, **options):
    return fused_reverse_kl(z, t, labels=y, **options)


def _forward_kl(z, t, y, **options):
    options |= {"temperature": 1.3, "target_temperature": jnp.float32(0.7)}
    return fused_forward_kl(z, t, labels=y, **options)


# name: (loss, (T, V), dtype, config of the one-pass kernel, options)
CASES = {
    "ce": (_ce, (5, 1000), "bfloat16", None, {}),
    "ce, several steps": (_ce, (5, 16640), "bfloat16", (8, 2, 2, 6, 3), {}),
    "ce, in part from a ring": (_ce, (7, 15872), "bfloat16", (2, 1, 2, 4, 2), {}),
    "ce, mostly from a ring": (_ce, (3, 31000), "bfloat16", (2, 1, 2, 5, 3), {}),
    "ce, everything": (_ce_everything, (4, 1664), "float32", None, {}),
    "ce, one cotangent a token": (_ce_everything, (3, 5000), "bfloat16", None, {"none": True}),
    "ce, in place": (_ce, (5, 1000), "bfloat16", None, {"inplace": True}),
    "ce, metrics": (_ce_metrics, (5, 1000), "bfloat16", None, {}),
    "ce, few columns": (_ce, (3, 5), "bfloat16", None, {}),
    "ce, one column": (_ce, (1, 1), "float32", None, {}),
    "soft ce": (_soft_ce, (3, 700), "bfloat16", None, {}),
    "soft ce, four lines at once": (_soft_ce, (5, 16640), "bfloat16", None, {}),
    "soft ce, probabilities": (_soft_ce_probs, (3, 700), "float32", None, {}),
    "reverse kl, from a ring": (_reverse_kl, (5, 15872), "bfloat16", (2, 1, 2, 4, 2), {}),
    "forward kl, float16": (_forward_kl, (3, 1000), "float16", None, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_agrees_with_the_reference_and_does_not_race(case):
    """Value and gradient; no unordered access to memory, no store past the end of a row."""
    for _ in range(TRIES):
        try:
            done = subprocess.run(
                [sys.executable, __file__, case],
                capture_output=True,
                text=True,
                timeout=TIME_LIMIT_S,
                env=os.environ | {"NPROC": "32"},
            )
        except subprocess.TimeoutExpired:
            continue
        assert done.returncode == 0, done.stdout + done.stderr
        return
    pytest.fail(f"{case!r} did not end within {TIME_LIMIT_S} s, {TRIES} times over")


def _main(loss, shape, dtype, config, options) -> None:
    import contextlib

    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter

    # The interpreter cuts stores off at the end of every axis. A device does so at the end of the
    # array only, where the store is contiguous; so one past the end of a row is an error here.
    gpu_callbacks.AsyncCopySmemToGmemTask.clips_out_of_bounds_destination = False
    t, v = shape
    keys = jax.random.split(jax.random.key(v), 3)
    z = (2 * jax.random.normal(keys[0], shape)).astype(dtype)
    target = (2 * jax.random.normal(keys[1], shape)).astype(dtype)
    y = jax.random.randint(keys[2], (t,), 0, v).at[t // 2].set(-100)
    z = z.at[t // 2].set(jnp.nan)
    g = jnp.linspace(-1.0, 2.0, t)
    weights = jnp.linspace(0.5, 2.0, t)
    options = dict(options)
    per_token = options.pop("none", False)

    def run(implementation):
        def total(z):
            options_ = {"weights": weights, "implementation": implementation, **options}
            if not per_token:
                return loss(z, target, y, **options_)
            return jnp.sum(g * loss(z, target, y, reduction="none", **options_))

        return jax.block_until_ready(jax.jit(jax.value_and_grad(total))(z))

    want_value, want = run("reference")
    with contextlib.ExitStack() as stack:
        if config:
            stack.enter_context(tuning.override(tuning.RowConfig(*config), "both"))
        params = plgpu.InterpretGPUParams(detect_races=True)
        stack.enter_context(plgpu.force_gpu_interpret_mode(params))
        value, d = run("mosaic_gpu")
        assert not interpreter.get_races().races_found, "the kernel races"
    assert np.isfinite(want_value)
    np.testing.assert_allclose(value, want_value, rtol=2e-6, atol=1e-6)
    d, want = np.asarray(d, np.float64), np.asarray(want, np.float64)
    unit = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(d, want, rtol=unit, atol=4e-6 * np.max(np.abs(want), initial=0))


def test_predictions_past_float32_are_refused():
    """Warps exchange columns as float32, which has no 2^24 + 1."""
    z, y = jax.ShapeDtypeStruct((1, (1 << 24) + 64), jnp.bfloat16), jnp.zeros((1,), jnp.int32)
    run = functools.partial(fused_ce, labels=y, implementation="mosaic_gpu")
    with plgpu.force_gpu_interpret_mode():
        with pytest.raises(UnsupportedError, match="predictions are exact among 16777216 columns"):
            jax.eval_shape(functools.partial(run, return_metrics=True), z)
        assert jax.eval_shape(run, z).shape == ()


V = 128256
# name: (loss, V, dtype, cotangents a token, the kernels of it)
COMPILED = {
    "ce": (_ce, 131072, jnp.bfloat16, False, {"rows_both"}),
    "ce, smoothing, metrics": (_ce_smooth_metrics, V, jnp.bfloat16, False, {"rows_both"}),
    "ce, everything": (_ce_everything, V, jnp.bfloat16, False, {"rows_both"}),
    "ce, everything, a token": (
        *(_ce_everything, 50257, jnp.float32, True),
        {"rows_sums", "rows_gradient"},
    ),
    "reverse kl": (_reverse_kl, 131072, jnp.bfloat16, False, {"rows_both"}),
    "reverse kl, on the chip": (_reverse_kl, 32000, jnp.bfloat16, False, {"rows_both"}),
    "reverse kl, a token": (
        *(_reverse_kl, 32768, jnp.bfloat16, True),
        {"rows_sums", "rows_gradient"},
    ),
    "soft ce, probabilities": (_soft_ce_probs, 32000, jnp.bfloat16, False, {"rows_both"}),
}

# Each of the kernels, with and without a target.
ON_BLACKWELL = ("ce", "ce, everything, a token", "reverse kl")


def _gradient(loss, per_token, **options):
    def run(z, t, y, g):
        f = functools.partial(loss, implementation="mosaic_gpu", **options)
        if not per_token:
            return jax.value_and_grad(f)(z, t, y)
        value, vjp = jax.vjp(lambda z: f(z, t, y, reduction="none"), z)
        return value, vjp(g)[0]

    return run


def _shapes(t, v, dtype):
    of = jax.ShapeDtypeStruct
    return of((t, v), dtype), of((t, v), dtype), of((t,), jnp.int32), of((t,), jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "target"),
    [*((name, "h200") for name in COMPILED), *((name, "b200") for name in ON_BLACKWELL)],
)
def test_no_spills(name, target):
    """All that is live fits in registers and shared memory, on Hopper and on Blackwell."""
    loss, v, dtype, per_token, kernels = COMPILED[name]
    shapes = _shapes(4096, v, dtype)
    found = aot.ptxas_report(_gradient(loss, per_token), *shapes, target=target)
    assert {kernel.name for kernel in found} == kernels
    for kernel in found:
        assert kernel.spill_bytes == 0 and kernel.stack_bytes == 0, kernel
        assert kernel.smem_bytes <= aot.SMEM_LIMIT_BYTES, kernel
        # No tensor map: bulk copies all, each with a policy for L2.
        assert kernel.opcodes()["UBLKCP"] and not kernel.opcodes()["UTMALDG"], kernel
        copies = re.findall(r"cp\.async\.bulk\S*\.(?:global|shared::cta)\.\S*", kernel.ptx)
        assert all(copy.endswith("L2::cache_hint") for copy in copies) and copies, copies
        # Two instructions widen a pair; a conversion of its upper half would be a PRMT and a shift.
        assert "cvt.f32.bf16" not in kernel.ptx, kernel


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "inplace"), [(_reverse_kl, False), (_reverse_kl, True), (_ce, True)]
)
def test_temporaries(loss, inplace):
    """Beside the gradient, only the warps' sums; in place, not even that array."""
    shapes = _shapes(8192, V, jnp.bfloat16)
    run = _gradient(loss, False, inplace=inplace)
    program = aot.compile(run, *shapes, target="h200", donate=(0,) if inplace else ())
    assert program.temp_bytes < 64 << 20
    assert (program.alias_bytes >= 8192 * V * 2) == inplace


if __name__ == "__main__":
    _main(*CASES[sys.argv[1]])
