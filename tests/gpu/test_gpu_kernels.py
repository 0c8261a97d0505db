"""The kernels on a Hopper or Blackwell GPU, at real shapes: `make gpu-test`.

The truth is float64, on a few rows; the rule is that of the conformance suite: at most twice the
error of the plain float32-accumulating computation in the same dtype, plus four float32 units.
"""

import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_loss import fused_linear_ce, fused_linear_logprob

IMPLEMENTATION = "mosaic_gpu"
EPSILON = 2.0**-22
CE_OPTIONS = {
    "recompute": {"backward": "recompute"},
    "recompute; smoothing, z-loss, soft cap": {
        "backward": "recompute",
        "label_smoothing": 0.1,
        "z_loss": 1e-3,
        "logit_soft_cap": 20.0,
    },
    "in forward": {"backward": "in_forward"},
    "in forward; z-loss, soft cap": {
        "backward": "in_forward",
        "z_loss": 1e-3,
        "logit_soft_cap": 20.0,
    },
    "in forward; smoothing, chunks": {
        "backward": "in_forward",
        "label_smoothing": 0.1,
        "workspace_bytes": 1 << 28,
    },
}


def _has_kernels() -> bool:
    return getattr(jax.devices()[0], "compute_capability", "").split(".")[0] in ("9", "10")


pytestmark = pytest.mark.skipif(not _has_kernels(), reason="needs a GPU of sm_90 or sm_10x")


def _problem(t, h, v, layout, dtype=jnp.bfloat16):
    keys = jax.random.split(jax.random.key(t + v), 3)
    x = jax.random.normal(keys[0], (t, h), dtype)
    w = (jax.random.normal(keys[1], (h, v)) * 2.5 / h**0.5).astype(dtype)
    labels = jax.random.randint(keys[2], (t,), 0, v).at[t // 2].set(-100)
    return x, (w.T if layout == "vh" else w), labels


def _gradients(implementation, x, w, labels, **options):
    loss = partial(fused_linear_ce, implementation=implementation, **options)
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(x, w, labels)


def _relative(got, want) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert np.all(np.isfinite(got))
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@pytest.mark.parametrize("options", CE_OPTIONS)
@pytest.mark.parametrize(
    ("shape", "layout"),
    [((1024, 4096, 32000), "vh"), ((1000, 1152, 50257), "hv"), ((333, 2880, 20001), "vh")],
)
def test_real_shapes_agree_with_the_reference(shape, layout, options):
    """Value and gradients, aligned and ragged: as far apart as two roundings of d-logits."""
    x, w, labels = _problem(*shape, layout)
    options = {**CE_OPTIONS[options], "w_layout": layout}
    value, grads = _gradients(IMPLEMENTATION, x, w, labels, **options)
    want, want_grads = _gradients("reference", x, w, labels, **options)
    assert abs(float(value) - float(want)) <= 4 * EPSILON * abs(float(want))
    for got, reference in zip(grads, want_grads, strict=True):
        # A rounding of d-logits apart, or of the exponentials and of the rows' scales.
        assert _relative(got, reference) <= float(jnp.finfo(x.dtype).eps) / 3


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_rows_against_float64(dtype):
    """Loss and dx of single tokens against float64 NumPy, per-token cotangents."""
    x, w, labels = _problem(512, 1024, 32000, "hv", dtype)
    g = jax.random.normal(jax.random.key(1), labels.shape)
    loss = partial(fused_linear_ce, reduction="none", implementation=IMPLEMENTATION)
    value, vjp = jax.vjp(lambda x: loss(x, w, labels), x)
    (dx,) = vjp(g)
    w64 = np.asarray(w, np.float64)
    for row in (0, 1, 300, 511):
        z = np.asarray(x[row], np.float64) @ w64
        lse = np.log(np.sum(np.exp(z - z.max()))) + z.max()
        y = int(labels[row])
        assert abs(float(value[row]) - (lse - z[y])) <= 64 * EPSILON * abs(lse)
        d = np.exp(z - lse)
        d[y] -= 1
        assert _relative(dx[row], float(g[row]) * (w64 @ d)) <= 2 * float(jnp.finfo(dtype).eps)
    np.testing.assert_array_equal(np.asarray(dx[labels.shape[0] // 2], np.float32), 0)


@pytest.mark.parametrize("backward", ["recompute", "stored"])
@pytest.mark.parametrize("k", [None, 8])
def test_logprob_and_entropy(backward, k):
    """Joint cotangents, a temperature per token, candidates: against the reference."""
    x, w, labels = _problem(1000, 1152, 20001, "vh")
    if k:
        labels = jax.random.randint(jax.random.key(2), (len(x), k), 0, len(w))
    g = jax.random.normal(jax.random.key(3), (3, len(x)))
    tau = jnp.linspace(0.5, 2.0, len(x))

    def gradients(implementation, backward):
        def loss(x, w):
            out = fused_linear_logprob(
                x, w, labels, temperature=tau, entropy=True, w_layout="vh",
                implementation=implementation, backward=backward,
            )  # fmt: skip
            logprob = out.logprob.sum(1) if k else out.logprob
            return jnp.sum(g[0] * logprob + g[1] * out.entropy + g[2] * out.lse)

        return jax.jit(jax.grad(loss, argnums=(0, 1)))(x, w)

    for got, want in zip(
        gradients(IMPLEMENTATION, backward), gradients("reference", "recompute"), strict=True
    ):
        assert _relative(got, want) <= float(jnp.finfo(x.dtype).eps)


def test_one_hot_row_takes_the_safe_way():
    """Among a thousand ordinary rows, one whose label lies 300 below its maximum."""
    x, w, labels = _problem(1000, 1152, 20001, "vh")
    x = x.at[7].set(w[5] * 60)
    value, grads = _gradients(IMPLEMENTATION, x, w, labels, w_layout="vh", backward="in_forward")
    want, want_grads = _gradients(IMPLEMENTATION, x, w, labels, w_layout="vh", backward="recompute")
    jax.tree.map(np.testing.assert_array_equal, (value, grads), (want, want_grads))


@pytest.mark.parametrize("backward", ["recompute", "in_forward"])
@pytest.mark.parametrize("layout", ["vh", "hv"])
def test_two_runs_are_bitwise_equal(layout, backward):
    """No atomics between blocks: the same call twice gives the same bits."""
    x, w, labels = _problem(1000, 1152, 50257, layout)
    loss = partial(
        fused_linear_ce, w_layout=layout, implementation=IMPLEMENTATION, backward=backward
    )
    run = jax.jit(jax.value_and_grad(loss, (0, 1)))
    jax.tree.map(np.testing.assert_array_equal, run(x, w, labels), run(x, w, labels))


def test_first_call_in_memory_full_of_nan():
    """What lies in fresh buffers must not be read: the first call of a process is right."""
    script = f"""
        import sys, jax, jax.numpy as jnp
        sys.path.insert(0, "tests/gpu")
        from test_gpu_kernels import _gradients, _problem, _relative
        full = [jnp.full((1 << 28,), jnp.nan) for _ in range(16)]
        jax.block_until_ready(full)
        for a in full:
            a.delete()
        x, w, labels = _problem(1000, 1152, 20001, "vh")
        want = _gradients("reference", x, w, labels, w_layout="vh")
        for backward, tolerance in (("recompute", 2e-3), ("in_forward", 4e-3)):
            first = _gradients("{IMPLEMENTATION}", x, w, labels, w_layout="vh", backward=backward)
            for got, reference in zip(first[1], want[1]):
                assert _relative(got, reference) < tolerance, (backward, _relative(got, reference))
    """
    lines = "\n".join(line[8:] for line in script.splitlines())
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_more_than_two_to_the_31_logits():
    """4096 x 1M: rows of the last column tiles are as right as the first."""
    x, w, labels = _problem(4096, 256, 1_048_576, "vh")
    labels = labels.at[:4].set(jnp.array([0, 1_048_575, 524_288, 1_000_000]))
    loss = partial(fused_linear_ce, reduction="none", w_layout="vh", implementation=IMPLEMENTATION)
    value = jax.jit(loss)(x, w, labels)[:4]
    want = fused_linear_ce(
        x[:4], w, labels[:4], reduction="none", w_layout="vh", implementation="xla"
    )
    np.testing.assert_allclose(value, want, rtol=64 * EPSILON)
