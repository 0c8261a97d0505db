"""Gradients made in the forward, in a caller's shard_map; `test_sharding.py` runs this file."""

import logging
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from check_contract import ce, draw
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import assert_equal, mesh_of

from pallas_loss import UnsupportedError, plans, select
from pallas_loss.api.metrics import Metrics
from pallas_loss.backends.xla import Xla


def manual(tokens, checked, **options):
    """The loss of shards over ``dp`` and ``tp``, a function of whole arrays."""
    return jax.shard_map(
        partial(ce, vocab_axis="tp", token_axes=tokens, vocab_size=16, **options),
        in_specs=(P(tokens), P(None, "tp"), P(tokens)),
        out_specs=P(),
        check_vma=checked,
    )


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("tokens", [("dp",), ("dp", "tp")], ids=str)
def test_one_row_out_of_range_takes_all_devices_to_the_other_plan(tokens, checked):
    """A branch with collectives in it: either all that meet there go, or none."""
    x, w, labels = draw()
    x = x.at[0].set(jnp.array([128.0, 0, 0, 0]))
    labels = labels.at[0].set(jnp.argmin(w[0]))
    assert 128 * jnp.ptp(w[0]) > 100
    grad = lambda f: jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(x, w, labels)  # noqa: E731
    with jax.set_mesh(mesh_of({"dp": 2, "tp": 4})):
        found = grad(manual(tokens, checked, backward="in_forward"))
    assert_equal(found, grad(ce))


@pytest.mark.parametrize("checked", [True, False])
def test_chunks_of_a_devices_tokens(checked):
    """512 tokens a device, of which the workspace holds the exponentials of 256."""
    x, w, labels = draw(t=1024)
    grad = lambda f: jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(x, w, labels)  # noqa: E731
    options = {"backward": "in_forward", "workspace_bytes": 256 * 8 * 4}
    with jax.set_mesh(mesh_of({"dp": 2, "tp": 2})):
        found = grad(manual(("dp",), checked, **options))
        with pytest.raises(UnsupportedError, match="one chunk"):
            manual(("dp", "tp"), checked, **options)(x, w, labels)
    assert_equal(found, grad(ce))


@pytest.mark.parametrize("checked", [True, False])
def test_auto_takes_the_faster_plan_in_a_shard_map(checked, monkeypatch, caplog):
    """Of a backend that prefers it; the metrics beside the loss have gradients too."""

    class Fast(Xla):
        name = "fast"
        prefers_in_forward = True

    monkeypatch.setattr(select, "LINEAR_BACKENDS", (*select.LINEAR_BACKENDS, Fast()))
    plans._log_plan.cache_clear()
    x, w, labels = draw()

    def total(f, x, w):
        loss, metrics = f(x, w, labels)
        return loss + jnp.sum(jnp.sin(metrics.lse)) + metrics.nll

    options = {"implementation": "fast", "return_metrics": True, "z_loss": 0.1}
    wanted = jax.value_and_grad(
        partial(total, partial(ce, **options | {"implementation": "xla"})), (0, 1)
    )(x, w)
    with jax.set_mesh(mesh_of({"dp": 2, "tp": 4})), caplog.at_level(logging.INFO):
        outs = (P(), Metrics(P(), P(), P(), P(), P("dp"), P("dp")))
        f = jax.shard_map(
            partial(ce, vocab_axis="tp", token_axes="dp", vocab_size=16, **options),
            in_specs=(P("dp"), P(None, "tp"), P("dp")), out_specs=outs, check_vma=checked,
        )  # fmt: skip
        found = jax.jit(jax.value_and_grad(partial(total, f), (0, 1)))(x, w)
    assert "gradients: in_forward (one number, and it fits)" in caplog.text
    assert_equal(found, wanted)


@pytest.mark.parametrize(
    "tokens,vocab,way,split_h",
    [
        ("dp", "tp", "auto", False),
        ("dp", "tp", "auto", True),
        ("dp", "tp", "explicit", True),
        (("dp", "tp"), None, "auto", False),
        ("dp", None, "explicit", True),
    ],
    ids=str,
)
def test_whole_arrays_and_the_metrics_cotangents(tokens, vocab, way, split_h):
    """dw in parts until after the branch; w gathered before it; a row out of range or none."""
    x, w, labels = draw(t=16, h=8)
    columns = P("dp" if split_h else None, vocab)
    arrays = dict(x=(x, P(tokens)), w=(w, columns), labels=(labels.at[3].set(-100), P(tokens)))

    def total(x, w, labels, **placed):
        loss, metrics = ce(x, w, labels, backward="in_forward", return_metrics=True, **placed)
        return loss + jnp.sum(jnp.sin(metrics.lse)) + metrics.nll

    mesh = mesh_of({"dp": 2, "tp": 4}, way)
    for far in (0.0, 128.0):
        arrays["x"] = x.at[0].add(far), P(tokens)
        with jax.set_mesh(mesh):
            on_mesh = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in arrays.values()]
            f = partial(total, vocab_axis=vocab, token_axes=tokens)
            found = jax.jit(jax.value_and_grad(f, (0, 1)))(*on_mesh)
        if way == "explicit":
            assert jax.typeof(found[1][1]).sharding.spec == columns
        assert_equal(found, jax.value_and_grad(total, (0, 1))(*(a for a, _ in arrays.values())))


def test_chunks_on_a_mesh_whose_axes_split_nothing():
    """One device for each axis that is named: chunks, but not with types that a loop lacks."""
    x, w, labels = draw(t=600)
    options = {"backward": "in_forward", "workspace_bytes": 256 * 16 * 4}
    f = partial(ce, token_axes="dp", **options)
    wanted = jax.grad(partial(ce, **options), (0, 1))(x, w, labels)
    with jax.set_mesh(mesh_of({"dp": 1, "other": 8})):
        assert_equal(jax.jit(jax.grad(f, (0, 1)))(x, w, labels), wanted)
    with jax.set_mesh(mesh_of({"dp": 1}, "explicit")):
        with pytest.raises(UnsupportedError, match="one chunk"):
            jax.jit(f)(x, w, labels)
        assert_equal(jax.jit(jax.grad(partial(f, backward="auto"), (0, 1)))(x, w, labels), wanted)
