"""The kernels in the Mosaic GPU interpreter, with race detection, without a GPU.

Hopper's, and Blackwell's where each block multiplies by itself: the interpreter refuses the two-SM
products (JAX 0.11.2 and 0.12.0.1), for which a strict expected failure waits here.

Each case runs in a process of its own, under a time limit; this file is also the script they run.
A thread of the interpreter that waits at a barrier occupies one of XLA's, of which there are as
many as cores, unless NPROC says otherwise: with two of them all may wait for one that is not run.
A case that ran out of time is tried again; a kernel that waits for ever runs out each time.
"""

import contextlib
import os
import subprocess
import sys
from unittest import mock

import pytest

TIME_LIMIT_S, TRIES = 180, 3

# name: (T, H, V), layout, config, options. The smallest legal tiles, cut ragged in every direction.
SMALL = {"tile_m": 64, "tile_n": 64}
WIDE = {"tile_m": 64, "tile_n": 256, "epilogue_n": 256}
CE_CASES = {
    "vh": ((100, 72, 200), "vh", SMALL, {}),
    "hv, groups, warpgroups along n": (
        (70, 136, 330),
        "hv",
        {**SMALL, "split": "n", "group": 2},
        {"return_metrics": True},
    ),
    "everything": (
        (65, 19, 263),
        "hv",
        SMALL,
        {
            "label_smoothing": 0.1,
            "z_loss": 1e-2,
            "logit_soft_cap": 5.0,
            "temperature": 1.3,
            "arrays": ("bias", "class_weights", "weights"),
            "return_metrics": True,
        },
    ),
    "float16, one row": ((1, 8, 70), "vh", SMALL, {"dtype": "float16"}),
    "two blocks that share loads": ((130, 64, 140), "vh", {**SMALL, "cluster": 2}, {}),
    "in forward, hv, bias": (
        (100, 72, 200),
        "hv",
        SMALL,
        {"backward": "in_forward", "arrays": ("bias",), "return_metrics": True},
    ),
    "in forward, soft cap, groups": (
        (65, 19, 263),
        "vh",
        {**SMALL, "group": 2, "split": "n"},
        {"backward": "in_forward", "logit_soft_cap": 5.0, "arrays": ("weights",)},
    ),
    "in forward, smoothing, two blocks": (
        (130, 64, 140),
        "vh",
        {**SMALL, "cluster": 2},
        {"backward": "in_forward", "label_smoothing": 0.1, "arrays": ("class_weights",)},
    ),
    "wide tile, one slice": ((66, 64, 300), "vh", WIDE, {}),
    "smoothing, wide tile, one slice": ((66, 64, 300), "vh", WIDE, {"label_smoothing": 0.1}),
}
LOGPROB_CASES = {
    "entropy, removed classes, wide tile, one slice": (
        (66, 64, 300),
        "vh",
        WIDE,
        {"arrays": ("removed",)},
    ),
    "entropy, removed classes, temperature per token": (
        (70, 72, 200),
        "vh",
        SMALL,
        {"arrays": ("removed", "temperature")},
    ),
    "stored": ((100, 72, 200), "vh", SMALL, {"backward": "stored"}),
    "stored, soft cap, hv": (
        (66, 64, 130),
        "hv",
        SMALL,
        {"backward": "stored", "logit_soft_cap": 8.0},
    ),
    "candidates": ((70, 64, 200), "vh", SMALL, {"candidates": 3}),
}
# Only on Blackwell: tiles enough for each block to use its tensor memory again.
BLACKWELL_CASES = {
    "tensor memory used again": ((70, 72, 700), "vh", SMALL, {}),
    "tiles no power of two": ((70, 72, 260), "hv", {**SMALL, "tile_n": 192}, {}),
    "two blocks to a tile": ((300, 72, 700), "vh", {**SMALL, "collective": True}, {}),
}
# Mostly masked, with NaN in x where a token does not count: `active` is how many do.
ACTIVE_CE_CASES = {
    "active, recompute, two blocks": (
        (300, 64, 140),
        "vh",
        {**SMALL, "cluster": 2},
        {"active": 90, "arrays": ("bias",)},
    ),
    "active, none, recompute, hv": ((100, 64, 140), "hv", SMALL, {"active": 0}),
    "active, in forward, hv, two blocks": (
        (300, 72, 140),
        "hv",
        {**SMALL, "cluster": 2},
        {
            "active": 130,
            "backward": "in_forward",
            "arrays": ("bias", "weights"),
            "return_metrics": True,
        },
    ),
    "active, one, in forward, smoothing": (
        (200, 64, 140),
        "vh",
        SMALL,
        {"active": 1, "backward": "in_forward", "label_smoothing": 0.1, "arrays": ("bias",)},
    ),
    "active, most, in forward": (
        (200, 64, 140),
        "vh",
        SMALL,
        {"active": 196, "backward": "in_forward"},
    ),
    "active, chunks": (
        (600, 64, 140),
        "vh",
        SMALL,
        {"active": 300, "backward": "in_forward", "workspace_bytes": 120_000},
    ),
}
ACTIVE_LOGPROB_CASES = {
    "active, temperature per token": (
        (200, 64, 140),
        "hv",
        {**SMALL, "split": "n", "group": 2},
        {"active": 70, "arrays": ("removed", "temperature")},
    ),
    "active, stored, candidates": (
        (200, 64, 140),
        "vh",
        SMALL,
        {"active": 70, "backward": "stored", "candidates": 3},
    ),
}
CE_CASES |= ACTIVE_CE_CASES
LOGPROB_CASES |= ACTIVE_LOGPROB_CASES
ROLES = ("row_sums", "store", "exponentials", "dlogits", "add_dx", "store_dw")
CASES = [("hopper", case) for case in (*CE_CASES, *LOGPROB_CASES)]
# What a Hopper cluster shares, a Blackwell one multiplies together; what is outside of the kernels
# is shown once.
_ONCE = ("two blocks", "candidates", "in forward, hv", "most", "chunks", "e, temper")
CASES += [("blackwell", c) for _, c in CASES if not any(once in c for once in _ONCE)]


class NotInterpreted(Exception):
    """The interpreter said that it does not know two-SM products."""


@pytest.mark.slow
@pytest.mark.parametrize(("chip", "case"), CASES)
def test_kernels_agree_with_the_reference_and_do_not_race(chip, case):
    """Values and gradients, every option, ragged T, H and V; no unordered access to memory."""
    _run(case, chip)


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in BLACKWELL_CASES if c != "two blocks to a tile"])
def test_tensor_memory(case):
    """A tile must not overwrite one that an epilogue still reads; any multiple of 64 columns."""
    _run(case, "blackwell")


@pytest.mark.slow
@pytest.mark.xfail(strict=True, raises=NotInterpreted)
def test_two_blocks_to_a_tile():
    """The day the interpreter takes two-SM products, this passes, and the mark has to go."""
    try:
        _run("two blocks to a tile", "blackwell")
    except AssertionError as error:
        if "collective_axis not supported" in str(error):
            raise NotInterpreted from error
        raise


@pytest.mark.slow
def test_several_grids_in_one_process():
    """jax-ml/jax#40847: a kernel traced for one grid must not be reused for another."""
    _run("grids", "hopper")


@pytest.mark.slow
def test_rows_past_the_count_are_neither_read_nor_written():
    """NaN in the rows of the tiles that are skipped stays out of every product."""
    _run("skipped", "hopper")


def _run(case: str, chip: str) -> None:
    command = [sys.executable, __file__, case, chip]
    for _ in range(TRIES):
        try:
            done = subprocess.run(
                command, env=os.environ | {"NPROC": "32"}, capture_output=True, text=True,
                timeout=TIME_LIMIT_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            continue
        assert done.returncode == 0, done.stdout + done.stderr
        return
    pytest.fail(f"{case!r} did not end within {TIME_LIMIT_S} s, {TRIES} times over")


def _main(name: str, chip: str) -> None:
    if name == "grids":
        for tokens, vocab in ((64, 64), (200, 64), (130, 250), (64, 130)):
            _check((tokens, 64, vocab), "vh", SMALL, {}, logprob=False, chip=chip)
    elif name == "skipped":
        _check_skipped()
    elif name in LOGPROB_CASES:
        _check(*LOGPROB_CASES[name], logprob=True, chip=chip)
    else:
        _check(*(CE_CASES | BLACKWELL_CASES)[name], logprob=False, chip=chip)


def _config(tiles, role: str, chip: str):
    """The config of a kernel from a case's tiles: on Blackwell, what it has that matches."""
    from pallas_loss import tuning

    group = 1 if role in ("dlogits", "store") else tiles.get("group", 1)
    if chip == "hopper":
        epilogue = {"epilogue_n": 64} if role in ("dlogits", "store") else {}
        return tuning.HopperConfig(**{**tiles, **epilogue, "group": group})
    collective = tiles.get("collective", False)
    return tuning.BlackwellConfig(
        block_n=128 if collective else max(64, tiles["tile_n"]),
        stages=2,
        epilogue_n=tiles.get("epilogue_n", 64) // 2,
        group=group,
        collective=collective,
    )


def _check(shape, layout, tiles, options, *, logprob: bool, chip: str) -> None:
    import jax
    import jax.experimental.pallas.mosaic_gpu as plgpu
    import jax.numpy as jnp
    import numpy as np
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter

    from pallas_loss import _device, fused_linear_ce, fused_linear_logprob, tuning

    t, h, v = shape
    options = dict(options)
    dtype, drawn = options.pop("dtype", "bfloat16"), options.pop("arrays", ())
    k, active = options.pop("candidates", None), options.pop("active", None)
    options.setdefault("backward", "recompute")
    rng = np.random.default_rng(t + v)
    x = jnp.asarray(rng.normal(size=(t, h)), dtype)
    w = jnp.asarray(rng.normal(size=(h, v)) * 2 / np.sqrt(h), dtype)
    w = w.T if layout == "vh" else w
    removed = np.zeros(v, np.float32)
    removed[:5], removed[64:128] = -np.inf, -np.inf
    classes = np.flatnonzero(removed == 0) if "removed" in drawn else np.arange(v)
    labels = rng.choice(classes, (t, k) if k else (t,)).astype(np.int32)
    if active is not None:
        masked = rng.permutation(t)[active:]
        labels[masked], x = -100, x.at[masked].set(jnp.nan)
    elif t > 1:
        labels[t // 2] = -100
    arrays = {
        "bias": rng.normal(size=v).astype(np.float32),
        "removed": removed,
        "class_weights": rng.uniform(0.5, 2, v).astype(np.float32),
        "weights": rng.uniform(0.5, 2, t).astype(np.float32),
        "temperature": rng.uniform(0.5, 2, t).astype(np.float32),
    }
    given = {("bias" if n == "removed" else n): jnp.asarray(arrays[n]) for n in drawn}
    g = jnp.asarray(rng.normal(size=(3, t)), jnp.float32)

    def run(implementation):
        def logprob_loss(x, w):
            out = fused_linear_logprob(
                x, w, labels, entropy=True, w_layout=layout, implementation=implementation,
                **options, **given,
            )  # fmt: skip
            per_token = out.logprob.sum(1) if k else out.logprob
            return jnp.sum(g[0] * per_token + g[1] * out.entropy + g[2] * out.lse), out

        def ce_loss(x, w):
            out = fused_linear_ce(
                x, w, labels, w_layout=layout, implementation=implementation, **options, **given
            )
            return out if options.get("return_metrics") else (out, ())

        loss = logprob_loss if logprob else ce_loss
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(x, w)

    want = run("reference")
    with contextlib.ExitStack() as stack:
        for role in ROLES:
            stack.enter_context(tuning.override(_config(tiles, role, chip), role))
        if chip == "blackwell":
            b200 = _device.Chip("gpu", "NVIDIA B200", (10, 0))
            stack.enter_context(mock.patch.object(_device, "current_chip", lambda: b200))
        params = plgpu.InterpretGPUParams(detect_races=True)
        stack.enter_context(plgpu.force_gpu_interpret_mode(params))
        got = jax.block_until_ready(run("mosaic_gpu"))
        assert not interpreter.get_races().races_found, "the kernels race"

    # Sums in float32, but d-logits are rounded to the 16-bit dtype before the products, and what is
    # stored once more: a relative 2^-8 of each gradient's norm, an eighth of it with float16.
    unit = float(jnp.finfo(dtype).eps)
    (value, aux), grads = got
    (want_value, want_aux), want_grads = want
    np.testing.assert_allclose(value, want_value, rtol=1e-5, atol=1e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), aux, want_aux)
    for name, a, b in zip(("dx", "dw"), grads, want_grads, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.all(np.isfinite(a)), f"{name} is not finite"
        error, norm = np.linalg.norm(a - b), np.linalg.norm(b)
        assert error <= unit * norm, f"{name}: relative error {error / norm:.2e}, unit {unit:.2e}"


def _check_skipped() -> None:
    """70 rows of 300 are active: 128 are computed, and the products of tokens take 128."""
    import jax
    import jax.experimental.pallas.mosaic_gpu as plgpu
    import jax.numpy as jnp
    import numpy as np

    from pallas_loss import tuning
    from pallas_loss.backends.base import Backward, LinearOperands, LinearProblem, Wanted
    from pallas_loss.backends.mosaic import MosaicGpu
    from pallas_loss.losses import DLogits, LogitTransform

    t, h, v, active, computed = 300, 64, 140, 70, 128
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(t, h)), jnp.bfloat16).at[active:].set(0)
    operands = LinearOperands(
        x=x.at[computed:].set(jnp.nan),
        w=jnp.asarray(rng.normal(size=(v, h)), jnp.bfloat16),
        labels=jnp.zeros(t, jnp.int32),
        num_active=jnp.int32(active),
    )
    problem = LinearProblem("vh", jnp.dtype(jnp.bfloat16), LogitTransform(1.0, 1.0, None))
    backend, config = MosaicGpu(), tuning.HopperConfig(**SMALL)
    wanted = Wanted(dx=True, dw=True, dbias=True)

    @jax.jit
    def run(operands):
        sums = backend.row_sums(problem, operands)
        _, e = backend.exponentials(problem, operands, jnp.zeros(t))
        here = jnp.arange(t) < active
        c = DLogits(sums.m, alpha=jnp.where(here, 1 / (1 + sums.s), 0.0), at_label=-1.0 * here)
        kept = backend.from_exponentials(problem, operands, e, c, wanted, problem.compute_dtype)
        return sums, e, kept, backend.gradients(problem, operands, wanted, Backward(c))

    with contextlib.ExitStack() as stack:
        for role in ROLES:
            stack.enter_context(tuning.override(config, role))
        stack.enter_context(plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()))
        sums, e, kept, made_again = jax.block_until_ready(run(operands))
    for sums_of_row in jax.tree.leaves(sums):
        assert np.all(np.isfinite(sums_of_row))
    e = np.asarray(e, np.float32)
    assert np.all(np.isfinite(e[:computed]))
    assert np.all(np.isnan(e[computed:])), "a tile without an active row was computed"
    for grads in (kept, made_again):
        assert np.all(np.isfinite(np.asarray(grads.dw, np.float32)))
        assert np.all(np.isfinite(grads.dbias))
        assert np.all(np.isfinite(grads.dx[:active]))


if __name__ == "__main__":
    _main(*sys.argv[1:])
