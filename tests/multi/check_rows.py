"""Losses from logits over 8 devices; `test_sharding.py` runs this file."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.collectives import collectives
from pallas_loss import (
    UnsupportedError,
    fused_ce,
    fused_forward_kl,
    fused_reverse_kl,
    fused_soft_ce,
)

BATCH, V = (8, 3), 48
MESHES = {
    "2x4": {"dp": 2, "tp": 4},
    "4x2": {"dp": 4, "tp": 2},
    "1x8": {"dp": 1, "tp": 8},
    "8x1": {"dp": 8, "tp": 1},
}
LOSSES = ("ce", "soft_ce", "soft_ce, logits", "reverse_kl", "forward_kl")


def draw():
    """Logits, a target, labels some of which are ignored, weights, class weights."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    labels = rng.integers(0, V, BATCH).astype(np.int32)
    labels[1, 2] = -100
    weights = rng.uniform(0.5, 2, BATCH).astype(np.float32)
    classes = rng.uniform(0.5, 2, V).astype(np.float32)
    return 3 * normal(*BATCH, V), 3 * normal(*BATCH, V), labels, weights, classes


def loss_of(name, target, labels, weights, classes, **options):
    """A function of the logits and a temperature."""
    common = {"weights": weights, "implementation": "xla"} | options
    if name == "ce":
        f = partial(
            fused_ce, labels=labels, class_weights=classes, label_smoothing=0.1, z_loss=0.01,
            logit_soft_cap=5.0, return_metrics=True,
        )  # fmt: skip
        return lambda z, tau: f(z, temperature=tau, **common)
    f = {
        "soft_ce": partial(fused_soft_ce, target_probs=jax.nn.softmax(target)),
        "soft_ce, logits": partial(fused_soft_ce, target_logits=target),
        "reverse_kl": partial(fused_reverse_kl, target_logits=target),
        "forward_kl": partial(fused_forward_kl, target_logits=target),
    }[name]
    return lambda z, tau: (f(z, temperature=tau, labels=labels, **common), ())


def step_of(name, reduction, z, *rest, **options):
    """Loss and metrics, and the gradients of logits and temperature; per-token cotangents."""

    def total(z, tau, target, labels, weights, classes):
        loss = loss_of(name, target, labels, weights, classes, reduction=reduction, **options)
        value, aux = loss(z, tau)
        g = jnp.cos(jnp.arange(value.size, dtype=jnp.float32)).reshape(value.shape)
        return jnp.sum(g * value), (value, aux)

    return jax.value_and_grad(total, (0, 1), has_aux=True)


def put(mesh, arrays):
    """Each array where the loss wants it."""
    z, target, labels, weights, classes = arrays
    place = lambda a, *spec: jax.device_put(a, NamedSharding(mesh, P(*spec)))  # noqa: E731
    return (
        place(z, "dp", None, "tp"), place(target, "dp", None, "tp"), place(labels, "dp"),
        place(weights, "dp"), place(classes, "tp"),
    )  # fmt: skip


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_is_that_of_one_device(name, mesh, kind):
    """Value, metrics, gradients of logits and temperature; the mean, and a cotangent a token."""
    arrays, tau = draw(), jnp.float32(1.3)
    z, *rest = arrays
    devices = jax.make_mesh(tuple(MESHES[mesh].values()), ("dp", "tp"), axis_types=(kind,) * 2)
    for reduction in ("mean", "none"):
        wanted = jax.jit(step_of(name, reduction, z))(z, tau, *rest)
        with jax.set_mesh(devices):
            here = put(devices, arrays)
            step = step_of(name, reduction, z, vocab_axis="tp", token_axes=("dp",))
            found = jax.jit(step)(here[0], tau, *here[1:])
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
            assert np.linalg.norm(a - b) <= 3e-6 * np.linalg.norm(b) + 1e-7


@pytest.mark.parametrize("name", ["ce", "reverse_kl"])
def test_only_row_sums_travel(name):
    """No all-gather of anything with columns; the gradient stays where the logits are."""
    arrays = draw()
    devices = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(devices):
        here = put(devices, arrays)
        step = step_of(name, "mean", None, vocab_axis="tp", token_axes=("dp",))
        compiled = jax.jit(step).lower(here[0], jnp.float32(1.3), *here[1:]).compile()
    tokens = BATCH[0] * BATCH[1] // 2
    assert all(size <= 4 * 8 * 4 * tokens for _, size in collectives(compiled.as_text()))
    assert collectives(compiled.as_text())


def test_what_cannot_lie_so_is_refused():
    """Columns that do not divide, an axis used twice, the inside of a shard_map."""
    z, _, labels, _, _ = draw()
    devices = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(devices):
        with pytest.raises(ValueError, match="46 columns of logits .* 4 devices"):
            fused_ce(z[..., :46], labels, vocab_axis="tp")
        with pytest.raises(ValueError, match="token_axes too"):
            fused_ce(z, labels, vocab_axis="tp", token_axes=(("dp", "tp"),))
        inside = jax.shard_map(
            partial(fused_ce, vocab_axis="tp"), in_specs=(P(None, None, "tp"), P()), out_specs=P()
        )
        with pytest.raises(UnsupportedError, match=r"jax\.set_mesh"):
            inside(z, labels)
