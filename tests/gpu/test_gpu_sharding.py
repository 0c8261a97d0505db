"""The losses over the GPUs of this host, kernels and NCCL: `make gpu-test`, on two GPUs or more.

The wanted values are those of one of them. d-logits are rounded to bfloat16 before they are
multiplied, from logits that another tiling may have summed in another order, and `dw` is a sum over
devices of parts that were rounded too: gradients agree to half a unit of bfloat16 in norm. Where
they are made in the forward, the rows of x times their scale are rounded as well, for another scale
on another mesh: 0.53 of a unit was seen.
"""

import functools
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "multi"))
from jax.sharding import PartitionSpec as P
from sharded import Problem, mesh_of, on_mesh, one_device

from pallas_loss import fused_ce, fused_reverse_kl

IMPLEMENTATION = "mosaic_gpu"
N = len(jax.devices())


def _several_hoppers() -> bool:
    return N > 1 and getattr(jax.devices()[0], "compute_capability", "") == "9.0"


pytestmark = pytest.mark.skipif(not _several_hoppers(), reason="needs two Hopper GPUs (sm_90)")

EVERYTHING = Problem(
    batch=(8, 128),
    hidden=1024,
    vocab=32768,
    layout="vh",
    dtype="bfloat16",
    std=2.5,
    arrays=("bias", "where", "weights", "class_weights", "temperature", "logit_scale"),
    options={"label_smoothing": 0.1, "z_loss": 1e-3, "logit_soft_cap": 20.0},
    implementation=IMPLEMENTATION,
)
PLAIN = replace(EVERYTHING, arrays=(), options={})
LOGPROB = replace(
    EVERYTHING,
    loss="logprob",
    arrays=("temperatures",),
    options={"entropy": True},
    candidates=4,
)
STORED = replace(PLAIN, loss="logprob", options={"entropy": True, "backward": "stored"})
RECOMPUTE = replace(PLAIN, options={"backward": "recompute"})
UNEVEN = replace(PLAIN, vocab=32001)
VOCAB, TOKENS = {"dp": 1, "tp": N}, {"dp": N, "tp": 1}
MIXED = {"dp": 2, "tp": N // 2} if N > 2 else TOKENS

CASES = {
    "vocabulary": (EVERYTHING, VOCAB, "auto", ("dp",)),
    "tokens": (PLAIN, TOKENS, "auto", ("dp",)),
    "both": (EVERYTHING, MIXED, "explicit", ("dp",)),
    "shard_map, gradient outside": (PLAIN, VOCAB, "outside", ("dp",)),
    "shard_map, unchecked": (PLAIN, MIXED, "outside unchecked", ("dp",)),
    "shard_map, gradient inside": (EVERYTHING, VOCAB, "inside", ("dp",)),
    "shard_map, recompute": (RECOMPUTE, VOCAB, "outside", ("dp",)),
    "shard_map, in the forward": (PLAIN, MIXED, "inside", ("dp",)),
    "shard_map, in the forward, sequence": (PLAIN, VOCAB, "outside", ("dp", "tp")),
    "sequence": (PLAIN, VOCAB, "auto", ("dp", "tp")),
    "uneven": (UNEVEN, VOCAB, "auto", ("dp",)),
    "candidates and entropy": (LOGPROB, VOCAB, "auto", ("dp",)),
    "stored": (STORED, VOCAB, "auto", ("dp",)),
}


@functools.cache
def _wanted(problem):
    return jax.device_get(jax.jit(lambda: one_device(problem))())


def _relative(found, wanted) -> float:
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    assert np.all(np.isfinite(found))
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize("case", CASES)
def test_several_gpus_agree_with_one(case):
    """Value, outputs and all gradients; three runs give the same bits."""
    problem, sizes, way, tokens = CASES[case]
    first, *others = jax.device_get(on_mesh(problem, sizes, way, tokens, calls=3))
    for other in others:
        for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(other), strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    (value, outputs), gradients = first
    (wanted, wanted_outputs), wanted_gradients = _wanted(problem)
    assert _relative(value, wanted) <= 1e-5
    for found, one in zip(jax.tree.leaves(outputs), jax.tree.leaves(wanted_outputs), strict=True):
        assert _relative(found, one) <= 2e-5
    bfloat16 = float(jnp.finfo(jnp.bfloat16).eps)
    for name, one in wanted_gradients.items():
        assert _relative(gradients[name], one) <= 0.6 * bfloat16, name


@pytest.mark.parametrize("implementation", ["mosaic_gpu", "triton"])
@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("inplace", [True, False])
def test_losses_from_logits_in_a_shard_map(implementation, checked, inplace):
    """Each device's columns, the last device's short of 100; the gradient is that of one device."""
    t, v = 256, 8192
    keys = jax.random.split(jax.random.key(0), 3)
    z, target = (2 * jax.random.normal(k, (t, v), jnp.bfloat16) for k in keys[:2])
    labels = jax.random.randint(keys[2], (t,), 0, v - 100)

    def loss(z, target, labels, **placed):
        options = {"implementation": implementation, "vocab_size": v - 100, "inplace": inplace}
        options |= placed
        ce = fused_ce(z, labels, label_smoothing=0.1, **options)
        return ce + jnp.sum(fused_reverse_kl(z, target, reduction="none", **options)) / t

    wanted = jax.jit(jax.value_and_grad(loss))(z, target, labels)
    with jax.set_mesh(mesh_of({"tp": N})):
        columns = P(None, "tp")
        split = jax.shard_map(
            functools.partial(loss, vocab_axis="tp"), in_specs=(columns, columns, P()),
            out_specs=P(), check_vma=checked,
        )  # fmt: skip
        found = jax.jit(jax.value_and_grad(split))(z, target, labels)
    assert _relative(found[0], wanted[0]) <= 1e-6
    assert _relative(found[1], wanted[1]) <= float(jnp.finfo(jnp.bfloat16).eps) / 2
    assert not np.asarray(found[1])[:, -100:].any()
