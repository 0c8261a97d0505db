"""Programs for 8 GPUs compiled without one: what is communicated, and memory per device."""

import re

import aot
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from benchmarks.collectives import collectives
from pallas_loss import fused_ce, fused_linear_ce, fused_linear_logprob, fused_reverse_kl

T, H, V = 8192, 4096, 131072
MIB = 1 << 20
TARGETS = [("h100", "mosaic_gpu"), ("b200", "xla")]


def compiled(function, target, mesh, tokens):
    of = jax.ShapeDtypeStruct
    shapes = of((T, H), jnp.bfloat16), of((V, H), jnp.bfloat16), of((T,), jnp.int32)
    return aot.compile(
        function, *shapes, target=target, mesh=mesh, specs=(P(tokens), P("tp"), P(tokens))
    )


def cross_entropy_of(x, w, labels, implementation, tokens, **options):
    options = {"w_layout": "vh", "vocab_axis": "tp", "token_axes": tokens} | options
    return fused_linear_ce(x, w, labels, implementation=implementation, **options)


def cross_entropy(implementation, tokens, **options):
    def step(x, w, labels):
        loss = lambda x, w: cross_entropy_of(x, w, labels, implementation, tokens, **options)  # noqa: E731
        return jax.value_and_grad(loss, (0, 1))(x, w)

    return step


def recompute(implementation, tokens):
    return cross_entropy(implementation, tokens, backward="recompute")


@pytest.mark.slow
def test_gradients_made_in_the_forward():
    """dx once, in float32, also in the branch that computes again, dw after both; else vectors of
    tokens. The exponentials of one device's columns are all that is kept."""
    program = compiled(cross_entropy("mosaic_gpu", ("dp",)), "h100", {"dp": 2, "tp": 4}, "dp")
    t, v = T // 2, V // 4
    large = [c for c in collectives(program.hlo) if c[1] > 64 * t]
    assert sorted(large) == [*2 * [("all-reduce", 4 * t * H)], ("all-reduce", 2 * v * H)]
    assert "exponentials" in program.hlo
    assert program.temp_bytes < 2 * t * v + 300 * MIB
    # In the branch of what is in range the schedule sums dx while dw is made.
    dw = re.search(rf"= \(bf16\[{v},{H}\]\S*\) conditional\(", program.hlo)
    branch = program.hlo[program.hlo.rindex("\n}\n", 0, dw.start()) :]
    begin = re.search(rf"all-reduce-start[.\d]* = \(\(f32\[{t},{H}\]", branch)
    end = re.search(rf"all-reduce-done[.\d]* = f32\[{t},{H}\]", branch)
    dw = re.search(rf"= \(bf16\[{v},{H}\]\S*\) conditional\(", branch)
    assert begin.start() < dw.start() < end.start() < branch.index("\n}\n", dw.start())


@pytest.mark.slow
def test_the_sum_of_dw_over_tokens_goes_on_beside_the_layer_below():
    """It is no part of the branch that makes dw, which what needs dx waits for."""

    def step(y, a, w, labels):
        def loss(y, a, w):
            x = jnp.tanh(y @ a)
            return cross_entropy_of(x, w, labels, "mosaic_gpu", ("dp",))

        return jax.value_and_grad(loss, (0, 1, 2))(y, a, w)

    of = jax.ShapeDtypeStruct
    y, a, w = (of(shape, jnp.bfloat16) for shape in ((T, H), (H, H), (V, H)))
    specs = P("dp"), P(), P("tp"), P("dp")
    program = aot.compile(
        step, y, a, w, of((T,), jnp.int32), target="h100", mesh={"dp": 4, "tp": 2}, specs=specs
    )
    assert collectives(program.hlo).count(("all-reduce", 2 * V // 2 * H)) == 1
    entry = program.hlo[program.hlo.index("\nENTRY ") :]
    begin = re.search(rf"all-reduce-start[.\d]* = \(\(bf16\[{V // 2},{H}\]", entry)
    end = re.search(rf"all-reduce-done[.\d]* = bf16\[{V // 2},{H}\]", entry)
    assert "_dot" in entry[begin.start() : end.start()]


@pytest.mark.slow
def test_a_weight_sharded_on_h_is_gathered_once():
    """Before the guard, and not again for the products nor in the branch that computes again."""
    step = cross_entropy("mosaic_gpu", ("dp",), vocab_axis=None)
    of = jax.ShapeDtypeStruct
    shapes = of((T, H), jnp.bfloat16), of((V, H), jnp.bfloat16), of((T,), jnp.int32)
    specs = P("dp"), P(None, "dp"), P("dp")
    program = aot.compile(step, *shapes, target="h100", mesh={"dp": 8}, specs=specs)
    large = [c for c in collectives(program.hlo) if c[1] >= 2 * V * H // 8]
    assert large.count(("all-gather", 2 * V * H)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("target,implementation", [*TARGETS, ("b200", "mosaic_gpu")])
def test_vocabulary_over_eight_gpus(target, implementation):
    """Forward: m, s and z_label of every token from 8 shards. Backward: dx once, in float32."""
    program = compiled(recompute(implementation, ()), target, {"tp": 8}, None)
    assert collectives(program.hlo) == [("all-reduce", 4 * T * H), ("all-gather", 8 * 3 * 4 * T)]
    # dx before and after its sum, and one split of d-logits, [T, 8192] in bfloat16.
    assert program.temp_bytes < 2 * 4 * T * H + 2 * T * 8192 + 8 * MIB


@pytest.mark.slow
@pytest.mark.parametrize("target,implementation", TARGETS)
def test_two_by_four(target, implementation):
    """Beside it, dw over the tokens' axis; the loss and its denominator are scalars."""
    program = compiled(recompute(implementation, ("dp",)), target, {"dp": 2, "tp": 4}, "dp")
    t, w_bytes = T // 2, 2 * V * H // 4
    assert collectives(program.hlo) == [
        ("all-reduce", w_bytes),
        ("all-reduce", 4 * t * H),
        ("all-gather", 4 * 3 * 4 * t),
    ]
    assert program.temp_bytes < 210 * MIB


@pytest.mark.slow
def test_sequence_parallelism():
    """x [T/8, H] is gathered, dx scattered in float32; row sums go to the owner of the row."""
    program = compiled(recompute("mosaic_gpu", ("tp",)), "h100", {"tp": 8}, "tp")
    assert collectives(program.hlo) == [
        ("reduce-scatter", 4 * T * H),
        ("all-gather", 2 * T * H),
        ("all-to-all", 3 * 4 * T),
        ("all-gather", 3 * 4 * T),  # the coefficients of d-logits
        ("all-gather", 4 * T),  # the labels
        ("all-gather", T),  # which of them count
    ]
    assert program.temp_bytes < 480 * MIB


@pytest.mark.slow
@pytest.mark.parametrize("checked", [True, False])
def test_kernels_in_a_callers_shard_map(checked):
    """Without types of varying axes JAX sums copies once more: cotangents, and dx in its dtype."""

    def step(x, w, labels):
        def local(x, w, labels):
            return fused_linear_ce(
                x, w, labels, w_layout="vh", vocab_axis="tp", token_axes=("dp",), vocab_size=V,
                implementation="mosaic_gpu", backward="recompute",
            )  # fmt: skip

        specs = P("dp"), P("tp"), P("dp")
        loss = jax.shard_map(local, in_specs=specs, out_specs=P(), check_vma=checked)
        return jax.value_and_grad(loss, (0, 1))(x, w, labels)

    program = compiled(step, "h100", {"dp": 2, "tp": 4}, "dp")
    t = T // 2
    expected = [
        ("all-reduce", 2 * V * H // 4),
        ("all-reduce", 4 * t * H),
        ("all-gather", 4 * 3 * 4 * t),
    ]
    if not checked:
        expected[2:2] = [("all-reduce", 2 * t * H)]
        expected += [("all-reduce", 4 * t)]
    assert collectives(program.hlo) == expected
    assert program.temp_bytes < (210 if checked else 230) * MIB


@pytest.mark.slow
def test_other_paths_of_the_kernels_in_a_checked_shard_map():
    """Gradients from stored logits, and at candidates."""
    common = {"w_layout": "vh", "vocab_axis": "tp", "token_axes": ("dp",)}
    common |= {"implementation": "mosaic_gpu"}

    def local(x, w, labels):
        stored = fused_linear_logprob(x, w, labels, backward="stored", entropy=True, **common)
        several = jnp.stack([labels, labels + 1], axis=-1)
        candidates = fused_linear_logprob(x, w, several, **common).logprob
        rows = jnp.sum(jnp.sin(stored.logprob)) + jnp.sum(stored.entropy) + jnp.sum(candidates)
        return jax.lax.psum(rows, "dp")

    def step(x, w, labels):
        specs = P("dp"), P("tp"), P("dp")
        loss = jax.shard_map(local, in_specs=specs, out_specs=P())
        return jax.value_and_grad(loss, (0, 1))(x, w, labels)

    of = jax.ShapeDtypeStruct
    shapes = of((256, 128), jnp.bfloat16), of((8192, 128), jnp.bfloat16), of((256,), jnp.int32)
    program = aot.compile(
        step, *shapes, target="h100", mesh={"dp": 2, "tp": 4}, specs=(P("dp"), P("tp"), P("dp"))
    )
    assert ("all-reduce", 2 * 8192 // 4 * 128) in collectives(program.hlo)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["h100", "b200"])
def test_gradients_made_in_the_forward_in_a_checked_shard_map(target):
    """dx once in either branch, in float32; dw once, after both."""
    t, h, v = 512, 128, 8192

    def local(x, w, labels):
        return fused_linear_ce(
            x, w, labels, w_layout="vh", vocab_axis="tp", token_axes="dp",
            implementation="mosaic_gpu", backward="in_forward",
        )  # fmt: skip

    def step(x, w, labels):
        specs = P("dp"), P("tp"), P("dp")
        loss = jax.shard_map(local, in_specs=specs, out_specs=P())
        return jax.value_and_grad(loss, (0, 1))(x, w, labels)

    of = jax.ShapeDtypeStruct
    shapes = of((t, h), jnp.bfloat16), of((v, h), jnp.bfloat16), of((t,), jnp.int32)
    program = aot.compile(
        step, *shapes, target=target, mesh={"dp": 2, "tp": 4}, specs=(P("dp"), P("tp"), P("dp"))
    )
    assert "exponentials" in program.hlo
    dx, sums = ("all-reduce", 4 * t // 2 * h), ("all-gather", 4 * 3 * 4 * t // 2)
    dw, shift = ("all-reduce", 2 * v // 4 * h), ("all-reduce", 4 * t // 2)
    assert collectives(program.hlo) == [dw, dx, dx, sums, sums, shift]


@pytest.mark.slow
@pytest.mark.parametrize(
    "target,implementation,inplace",
    [("h100", "mosaic_gpu", False), ("b200", "mosaic_gpu", True), ("h100", "triton", True)],
)
def test_losses_from_logits_in_a_checked_shard_map(target, implementation, inplace):
    """A few row sums, and nothing as large as a row; the last shard is short of 100 columns."""
    t, v = 512, 4096

    def local(z, target_logits, labels):
        options = {"vocab_axis": "tp", "token_axes": "dp", "implementation": implementation}
        options |= {"inplace": inplace, "vocab_size": v - 100}
        per_token = fused_ce(z, labels, label_smoothing=0.1, reduction="none", **options)
        kl = fused_reverse_kl(z, target_logits, labels=labels, **options)
        return kl + jax.lax.psum(jnp.sum(jnp.sin(per_token)), "dp")

    def step(z, target_logits, labels):
        specs = P("dp", "tp"), P("dp", "tp"), P("dp")
        loss = jax.shard_map(local, in_specs=specs, out_specs=P())
        return jax.value_and_grad(loss)(z, target_logits, labels)

    of = jax.ShapeDtypeStruct
    shapes = of((t, v), jnp.bfloat16), of((t, v), jnp.bfloat16), of((t,), jnp.int32)
    specs = P("dp", "tp"), P("dp", "tp"), P("dp")
    program = aot.compile(step, *shapes, target=target, mesh={"dp": 2, "tp": 4}, specs=specs)
    five = ("all-gather", 4 * 5 * 4 * t // 2)
    assert collectives(program.hlo) == [five, five]
