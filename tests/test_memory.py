"""No `[T, V]` array in the compiled program, proved at production sizes without allocating them."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from pallas_loss import fused_linear_ce

GIB = 2**30
T, H, V = 8192, 4096, 128256


@functools.cache
def program(tokens=T, hidden=H, vocab=V, dtype="float32", layout="hv", kind="mean", metrics=False):
    """Value and both gradients, compiled for this machine from shapes alone."""
    shape = jax.ShapeDtypeStruct
    w_shape = (hidden, vocab) if layout == "hv" else (vocab, hidden)
    x, w = shape((tokens, hidden), dtype), shape(w_shape, dtype)
    labels, cotangent = shape((tokens,), jnp.int32), shape((tokens,), jnp.float32)

    def step(x, w, labels, cotangent):
        def loss(x, w):
            result = fused_linear_ce(
                x,
                w,
                labels,
                w_layout=layout,
                reduction="none" if kind == "per_token" else "mean",
                return_metrics=metrics,
                implementation="xla",
            )
            return result if metrics else (result, None)

        value, vjp, extra = jax.vjp(loss, x, w, has_aux=True)
        return value, extra, vjp(cotangent if kind == "per_token" else jnp.float32(1))

    return jax.jit(step).lower(x, w, labels, cotangent).compile()


def temporaries(**sizes):
    """Bytes of temporary memory."""
    return program(**sizes).memory_analysis().temp_size_in_bytes


def buffers(compiled):
    """The shapes of every value in the program."""
    found = re.findall(r"\b(?:pred|[a-z]+\d+\w*)\[([\d,]*)\]", compiled.as_text())
    return {tuple(int(n) for n in dims.split(",") if n) for dims in found}


def count(dims):
    """The number of elements."""
    return functools.reduce(int.__mul__, dims, 1)


VARIANTS = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "vh": {"layout": "vh"},
    "per token": {"kind": "per_token"},
    "metrics": {"metrics": True, "dtype": "bfloat16", "layout": "vh"},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_temporaries_of_a_llama_3_step(variant):
    """Under 0.6 GiB where the float32 logits alone are 3.9."""
    assert temporaries(**VARIANTS[variant]) < 0.6 * GIB


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_buffer_of_logits_size(variant):
    """No `[T, V]` in either order, of any dtype; no other value of that many elements."""
    compiled = program(**VARIANTS[variant])
    text = compiled.as_text()
    assert f"[{T},{V}]" not in text
    assert f"[{V},{T}]" not in text
    # The largest arrays are w and dw, half the logits' size here.
    assert max(count(dims) for dims in buffers(compiled)) <= H * V


@pytest.mark.parametrize("layout", ["hv", "vh"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_temporaries_do_not_grow_with_the_vocabulary(layout, dtype):
    """From 32,768 classes to 262,144: at most a few vectors of V beside the same tiles."""
    sizes = {"tokens": 2048, "hidden": 1024, "layout": layout, "dtype": dtype}
    small, large = (temporaries(vocab=v, **sizes) for v in (32768, 262144))
    assert large <= small + 16 * (262144 - 32768)
    assert large <= 1.05 * small


def test_temporaries_do_not_grow_with_the_tokens_times_vocabulary():
    """Four times the tokens cost what their own rows cost: `dx` and vectors, not logits."""
    sizes = {"hidden": 256, "vocab": 65536}
    small, large = (temporaries(tokens=t, **sizes) for t in (4096, 16384))
    assert large - small <= (16384 - 4096) * (2 * 256 + 32) * 4


def test_the_check_sees_full_logits():
    """The measure itself: the dense loss fails both checks at a small size."""

    def dense(x, w, labels):
        z = jnp.dot(x, w, preferred_element_type=jnp.float32)
        nll = jax.nn.logsumexp(z, axis=1) - jnp.take_along_axis(z, labels[:, None], axis=1)[:, 0]
        return jnp.mean(nll)

    shape = jax.ShapeDtypeStruct
    arguments = (shape((512, 64), "float32"), shape((64, 4096), "float32"), shape((512,), "int32"))
    compiled = jax.jit(jax.value_and_grad(dense, (0, 1))).lower(*arguments).compile()
    assert compiled.memory_analysis().temp_size_in_bytes >= 512 * 4096 * 4
    assert (512, 4096) in buffers(compiled)
