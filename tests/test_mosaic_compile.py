"""The kernels as the real assembler sees them: registers, shared and tensor memory, temporaries.

Compiled for sm_90a and sm_100a on a machine without a GPU (``aot``), at the shapes of a real head.
"""

import functools
import re

import aot
import jax
import jax.numpy as jnp
import pytest

from pallas_loss import fused_ce, fused_linear_ce, fused_linear_logprob, fused_reverse_kl, tuning

T, H, V = 8192, 4096, 128256
WHOLE = 15 * 8448  # splits into equal parts, so that each kernel is compiled once
MIB = 1 << 20

# name: (options, arrays given as [V] or scalar operands, changes of the shape)
VARIANTS = {
    "plain vh": ({"w_layout": "vh"}, {}, {}),
    "plain hv": ({}, {}, {}),
    "metrics": ({"return_metrics": True}, {}, {}),
    "soft cap": ({"logit_soft_cap": 30.0}, {}, {}),
    "smoothing, bias, temperature": (
        {"label_smoothing": 0.1},
        {"bias": (WHOLE,), "temperature": ()},
        {},
    ),
    "class weights": ({"label_smoothing": 0.1}, {"class_weights": (WHOLE,)}, {}),
    "z-loss, scale": ({"z_loss": 1e-4}, {"logit_scale": ()}, {}),
    "ragged": ({}, {}, {"T": 8191, "H": 4090, "V": 128255}),
    "float16": ({"w_layout": "vh"}, {}, {"dtype": jnp.float16}),
    "everything": (
        {"label_smoothing": 0.1, "z_loss": 1e-4, "logit_soft_cap": 30.0, "return_metrics": True},
        {"bias": (WHOLE,), "class_weights": (WHOLE,), "temperature": (), "logit_scale": ()},
        {},
    ),
}
# The others make their gradients in the forward, beside which the recompute plan is the safe way.
RECOMPUTED = ("float16", "everything")
LOGPROB_VARIANTS = {
    "logprob": {},
    "entropy": {"entropy": True},
    "stored": {"backward": "stored"},
    "stored, entropy, soft cap": {"backward": "stored", "entropy": True, "logit_soft_cap": 30.0},
}

# What multiplies, by target, and the variants that are compiled for it: for Blackwell those that
# have each option and each epilogue once.
PRODUCTS = {"h100": "HGMMA", "b200": "UTCHMMA", "b300": "UTCHMMA"}
BLACKWELL_FORMS = {
    "two blocks to a tile": ({}, r"UTCHMMA\.2CTA", r"UTMALDG\.4D\.2CTA"),
    "192 columns": (
        {"block_n": 192, "epilogue_n": 32},
        r"UTCHMMA\.2CTA",
        r"UTMALDG\.4D\.2CTA",
    ),
    "one block to a tile": ({"collective": False, "stages": 3}, "UTCHMMA", r"UTMALDG\.4D"),
}
CE_TARGETS = [("h100", name) for name in VARIANTS]
CE_TARGETS += [("b200", name) for name in ("plain vh", "metrics", "ragged", "everything")]
LOGPROB_TARGETS = [("h100", name) for name in LOGPROB_VARIANTS]
LOGPROB_TARGETS += [("b200", name) for name in ("entropy", "stored, entropy, soft cap")]


def _shapes(t=T, h=H, v=V, dtype=jnp.bfloat16, layout="vh"):
    of = jax.ShapeDtypeStruct
    return of((t, h), dtype), of((v, h) if layout == "vh" else (h, v), dtype), of((t,), jnp.int32)


def _ce(wrt=(0, 1), **options):
    def function(x, w, labels, arrays):
        def loss(*primals):
            operands = [x, w]
            for i, primal in zip(wrt, primals, strict=True):
                operands[i] = primal
            return fused_linear_ce(
                *operands, labels, implementation="mosaic_gpu", **options, **arrays
            )

        metrics = options.get("return_metrics", False)
        grad = jax.value_and_grad(loss, tuple(range(len(wrt))), has_aux=metrics)
        return grad(*((x, w)[i] for i in wrt))

    return function


def _assert_fits(kernels, names, target):
    assert {k.name for k in kernels} == names
    for kernel in kernels:
        assert kernel.spill_bytes == 0, f"{kernel.name} spills {kernel.spill_bytes} bytes"
        assert kernel.smem_bytes <= aot.SMEM_LIMIT_BYTES, f"{kernel.name}: {kernel.smem_bytes}"
        products = kernel.opcodes()[PRODUCTS[target]]
        assert products > 0, f"{kernel.name} does not use the tensor cores"
        wanted = {0 if target == "h100" else tuning.TMEM_COLUMNS}
        if target != "h100" and kernel.name == "store_dw":
            wanted.add(256)  # of the lean way, whose splits take two accumulators of 128 columns
        assert kernel.tmem_columns in wanted, f"{kernel.name}: {kernel.tmem_columns}"


@pytest.mark.slow
@pytest.mark.parametrize(("target", "name"), CE_TARGETS)
def test_no_variant_of_cross_entropy_spills(target, name):
    """Every option fits in registers and in shared memory; one that is off is not there."""
    options, arrays, change = VARIANTS[name]
    shapes = _shapes(
        change.get("T", T),
        change.get("H", H),
        change.get("V", WHOLE),
        change.get("dtype", jnp.bfloat16),
        options.get("w_layout", "hv"),
    )
    arrays = {n: jax.ShapeDtypeStruct(shape, jnp.float32) for n, shape in arrays.items()}
    kernels = aot.ptxas_report(_ce(**options), *shapes, arrays, target=target)
    in_forward = name not in RECOMPUTED
    names = {"row_sums", "dlogits", "add_dx", "store_dw"}
    if in_forward:
        names |= {"exponentials", "store_dx", "whole_dw"}
    _assert_fits(kernels, names, target)


@pytest.mark.slow
@pytest.mark.parametrize(("target", "name"), LOGPROB_TARGETS)
def test_no_variant_of_logprob_spills(target, name):
    """Joint cotangents of all outputs, recomputed and stored."""
    options = LOGPROB_VARIANTS[name]

    def function(x, w, labels, g):
        def loss(x, w):
            out = fused_linear_logprob(
                x, w, labels, w_layout="vh", implementation="mosaic_gpu", **options
            )
            total = jnp.sum(g[0] * out.logprob + g[1] * out.lse)
            return total + (jnp.sum(g[2] * out.entropy) if out.entropy is not None else 0.0)

        return jax.grad(loss, (0, 1))(x, w)

    g = jax.ShapeDtypeStruct((3, T), jnp.float32)
    kernels = aot.ptxas_report(function, *_shapes(), g, target=target)
    stored = options.get("backward") == "stored"
    names = {"store"} if stored else {"row_sums", "dlogits"}
    _assert_fits(kernels, names | {"add_dx", "store_dw"}, target)


@pytest.mark.slow
def test_what_a_logit_costs():
    """Entropy is two instructions a logit, and the vocabulary's end none where it is not.

    A thread has 128 logits of a tile, in a body for the tiles with labels and in one without.
    """

    def instructions(vocab, entropy):
        def function(x, w, labels):
            return fused_linear_logprob(
                x, w, labels, w_layout="vh", implementation="mosaic_gpu", entropy=entropy
            )

        (kernel,) = aot.ptxas_report(function, *_shapes(v=vocab), target="h200")
        _assert_fits([kernel], {"row_sums"}, "h100")
        return sum(kernel.opcodes().values())

    plain = instructions(V, False)
    assert 2 * 128 * 2 < instructions(V, True) - plain < 2 * 128 * 2.5
    assert instructions(V - 1, False) - plain < 128 * 2  # in one body of the two


@pytest.mark.slow
@pytest.mark.parametrize("form", BLACKWELL_FORMS)
def test_blackwell_forms(form):
    """Who multiplies: two blocks together, or one by itself."""
    options, product, load = BLACKWELL_FORMS[form]

    def function(x, w, labels):
        with tuning.override(tuning.BlackwellConfig(**options), "row_sums"):
            return fused_linear_ce(x, w, labels, w_layout="vh", implementation="mosaic_gpu")

    kernels = aot.ptxas_report(function, *_shapes(), target="b200")
    _assert_fits(kernels, {"row_sums"}, "b200")
    (kernel,) = kernels
    assert re.search(rf"{product} ", kernel.sass) and re.search(rf"{load} ", kernel.sass)
    # A thread owns a row: sums over columns need no other thread's.
    assert kernel.opcodes()["SHFL"] < 10


@pytest.mark.slow
def test_b300():
    """10.3 assembles for another target, sm_103a, the same kernels."""
    function = functools.partial(fused_linear_ce, w_layout="vh", implementation="mosaic_gpu")
    kernels = aot.ptxas_report(function, *_shapes(), target="b300")
    _assert_fits(kernels, {"row_sums"}, "b300")
    assert ".target sm_103a" in kernels[0].ptx


@pytest.mark.slow
@pytest.mark.parametrize(("target", "layout"), [("h100", "vh"), ("h100", "hv"), ("b200", "vh")])
def test_temporaries_of_value_and_gradients(target, layout):
    """A 128256-word head over 8192 tokens in under 270 MiB, and no logits of any dtype."""
    shapes = _shapes(layout=layout)
    function = _ce(w_layout=layout, backward="recompute")
    program = aot.compile(function, *shapes, {}, target=target)
    assert program.temp_bytes < 270 * MIB
    assert f"[{T},{V}]" not in program.hlo and f"[{V},{T}]" not in program.hlo


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["vh", "hv"])
def test_temporaries_of_gradients_made_in_the_forward(layout):
    """In one chunk: the exponentials and 300 MiB, and nothing of `w`'s size is copied.

    Neither of the products' two ways, for many active rows and for few, copies what it reads.
    """
    function = _ce(w_layout=layout, backward="in_forward")
    cublas = {"xla_gpu_enable_triton_gemm": False}  # as on a device
    program = aot.compile(function, *_shapes(layout=layout), {}, target="h100", options=cublas)
    assert T * V * 2 < program.temp_bytes < T * V * 2 + 300 * MIB
    assert "conditional(" in program.hlo
    assert not re.search(rf"= bf16\[(\d+,{V}|{V},\d+)\]\S* copy\(", program.hlo)
    # dx leaves its product in float32, and is scaled and cast in one pass.
    results = re.findall(r"= (.*) fusion\(%", program.hlo)
    assert results and not any(f"f32[{T},{H}]" in made for made in results)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [16384, 16000])
def test_a_workspace_bounds_the_temporaries(tokens):
    """Equal chunks, and a smaller last one: exponentials and the sum of dw within the bound."""
    workspace = 4 << 30
    function = _ce(w_layout="vh", backward="in_forward", workspace_bytes=workspace)
    program = aot.compile(function, *_shapes(tokens), {}, target="h100")
    assert program.temp_bytes < workspace + 600 * MIB


@pytest.mark.slow
def test_a_frozen_operand_costs_nothing():
    """LoRA and probes: the product of the gradient that is not wanted is not in the program."""
    how = {"w_layout": "vh", "backward": "recompute"}
    only_dx = aot.compile(_ce((0,), **how), *_shapes(), {}, target="h100")
    only_dw = aot.compile(_ce((1,), **how), *_shapes(), {}, target="h100")
    assert "add_dx" in only_dx.hlo and "store_dw" not in only_dx.hlo
    assert "store_dw" in only_dw.hlo and "add_dx" not in only_dw.hlo
    assert only_dx.output_bytes < V * H


@pytest.mark.slow
def test_a_million_words():
    """T V past 2^31: every offset in the kernels is a product within one dimension."""
    program = aot.compile(_ce(w_layout="vh"), *_shapes(4096, 4096, 1_048_576), {}, target="h100")
    assert program.temp_bytes < 400 * MIB


@pytest.mark.slow
def test_kernels_compile_where_jax_has_64_bits():
    """Every launch, traced and lowered with `jax_enable_x64`, which others' code may need."""

    def step(x, w, labels, bias):
        def loss(x, w, bias):
            in_forward = fused_linear_ce(x, w, labels, bias=bias, backward="in_forward")
            recompute = fused_linear_ce(x, w, labels, label_smoothing=0.1, backward="recompute")
            stored = fused_linear_logprob(x, w, labels, entropy=True, backward="stored")
            rows = fused_ce(x @ w, labels) + fused_reverse_kl(x @ w, x @ w + 1)
            return in_forward + recompute + jnp.sum(stored.logprob * stored.entropy) + rows

        return jax.value_and_grad(loss, argnums=(0, 1, 2))(x, w, bias)

    of = jax.ShapeDtypeStruct
    x, w = of((256, 128), jnp.bfloat16), of((128, 1024), jnp.bfloat16)
    shapes = x, w, of((256,), jnp.int64), of((1024,), jnp.float32)
    program = aot.compile(step, *shapes, target="h100", x64=True)
    for kernel in ("exponentials", "store_dx", "row_sums", "dlogits", "store", "rows_both"):
        assert f"{kernel}_mosaic_gpu" in program.hlo
