"""What a call over devices refuses; `test_sharding.py` runs this file on 8 devices."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from check_contract import ce, draw
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from sharded import assert_equal, mesh_of

from pallas_loss import UnsupportedError, fused_ce, fused_linear_logprob


@pytest.mark.parametrize(
    "options,message",
    [
        ({"vocab_axis": "model"}, r"name \['model'\], but the mesh has axes \('dp', 'tp'\)"),
        ({"token_axes": ("dp", "dp")}, "named twice"),
        ({"vocab_axis": ("dp", "tp"), "token_axes": "dp"}, "all of vocab_axis or none"),
        ({"token_axes": ("dp", "tp")}, "6 does not divide|does not divide over"),
        ({"vocab_size": 17}, r"vocab_size must be in \[1, 16\]"),
    ],
)
def test_bad_axes(options, message):
    x, w, labels = draw(t=6)
    with jax.set_mesh(mesh_of({"dp": 2, "tp": 4})), pytest.raises(ValueError, match=message):
        ce(x, w, labels, **options)


def test_axes_without_a_mesh():
    x, w, labels = draw()
    with pytest.raises(ValueError, match="the mesh is not there: call under jax.set_mesh"):
        ce(x, w, labels, vocab_axis="tp")
    with pytest.raises(TypeError, match="vocab_axis must name mesh axes, got 3"):
        fused_linear_logprob(x, w, labels, vocab_axis=3)


def test_an_entry_for_each_axis_of_the_tokens():
    x, w, labels = draw()
    with jax.set_mesh(mesh_of({"a": 2, "b": 2, "c": 2})):
        with pytest.raises(ValueError, match="several mesh axes for one go in a tuple"):
            ce(x.reshape(4, 2, 4), w, labels.reshape(4, 2), token_axes=("a", "b", "c"))
        f = jax.jit(partial(ce, token_axes=(("a", "b"), "c")))
        found = f(x.reshape(4, 2, 4), w, labels.reshape(4, 2))
    assert_equal(found, ce(x, w, labels))


def test_tokens_that_are_the_same_on_every_device():
    x, w, labels = draw()
    with jax.set_mesh(mesh_of({"dp": 2})):
        f = jax.shard_map(partial(ce, token_axes="dp"), in_specs=P(), out_specs=P())
        with pytest.raises(ValueError, match=r"x is the same on all devices of \['dp'\]"):
            f(x, w, labels)


def test_a_normalizer_that_is_each_devices_own():
    """As a count of its own tokens is: the loss would be the sum of the devices' means."""
    x, w, labels = draw()
    count = lambda labels: jnp.sum(labels >= 0, dtype=jnp.float32)  # noqa: E731
    placed = {"vocab_axis": "tp", "token_axes": "dp"}
    fused = partial(fused_ce, implementation="xla", **placed)
    hidden = lambda *a: ce(*a, normalizer=count(a[-1]), **placed)  # noqa: E731
    logits = lambda z, y: fused(z, y, normalizer=count(y))  # noqa: E731
    with jax.set_mesh(mesh_of({"dp": 2, "tp": 4})):
        for f, specs, args in (
            (hidden, (P("dp"), P(None, "tp"), P("dp")), (x, w, labels)),
            (logits, (P("dp", "tp"), P("dp")), (x @ w, labels)),
        ):
            with pytest.raises(ValueError, match=r"normalizer is each device's own over \['dp'\]"):
                jax.shard_map(f, in_specs=specs, out_specs=P())(*args)


def test_gradients_in_the_forward_take_one_chunk_of_a_device():
    x, w, labels = draw()
    size = w.shape[1] // 2 * 4
    with jax.set_mesh(mesh_of({"tp": 2})):
        in_forward = partial(ce, vocab_axis="tp", backward="in_forward")
        in_forward(x, w, labels, workspace_bytes=labels.size * size)
        with pytest.raises(UnsupportedError, match="one chunk"):
            in_forward(x, w, labels, workspace_bytes=labels.size * size - 1)


def test_axes_that_are_half_manual():
    x, w, labels = draw()
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
    for named in ({"vocab_axis": "tp", "token_axes": "dp"}, {"vocab_axis": "tp"}):
        f = jax.shard_map(
            partial(ce, **named), mesh=mesh, axis_names={"dp"}, in_specs=(P("dp"), P(), P("dp")),
            out_specs=P("dp"),
        )  # fmt: skip
        with jax.set_mesh(mesh), pytest.raises(UnsupportedError, match="manual"):
            jax.jit(f)(x, w, labels)
