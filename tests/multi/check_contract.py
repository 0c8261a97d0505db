"""What a call over devices promises; `test_sharding.py` runs this file on 8 devices."""

import logging
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from sharded import assert_equal, mesh_of

from pallas_loss import fused_ce, fused_linear_ce
from pallas_loss.nnx import LMHead
from pallas_loss.sharding.find import _log_moved_columns

ce = partial(fused_linear_ce, implementation="xla")


def close(found, wanted, atol=2e-6):
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=0, atol=atol)


def draw(t=8, h=4, v=16, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    x, w = jax.random.normal(keys[0], (t, h), dtype), jax.random.normal(keys[1], (h, v), dtype)
    return x, w, jax.random.randint(keys[2], (t,), 0, v)


# --- sums over devices ---


@pytest.mark.parametrize("n", [1, 2, 4])
def test_replicated_weight_of_data_parallelism(n):
    """jax-ml/jax#36886: the gradient of a replicated weight is counted once."""
    x = jnp.array([[1.0, 0], [0, 1], [1, 1], [0, 0]])
    labels, w = jnp.array([0, 1, 0, 1]), jnp.zeros((2, 2))
    dw = [[-1, 0], [1, 0]]
    vh = partial(ce, reduction="sum", w_layout="vh")
    specs = P("dp"), P(), P("dp")
    with jax.set_mesh(mesh_of({"dp": n})):
        for checked in (True, False):
            mapped = partial(jax.shard_map, in_specs=specs, check_vma=checked)
            # The gradient of the global sum, from outside.
            f = mapped(partial(vh, token_axes="dp"), out_specs=P())
            value, found = jax.jit(jax.value_and_grad(f, argnums=1))(x, w, labels)
            close(value, 2.772589)
            close(found, dw)

            # The gradient of the local sum, from inside; checked, JAX has added it up already.
            def local(x, w, labels, checked=checked):
                found = jax.grad(vh, argnums=1)(x, w, labels)
                return found if checked else lax.psum(found, "dp")

            close(jax.jit(mapped(local, out_specs=P()))(x, w, labels), dw)
        # The gradient of the global sum, from inside.
        inside = jax.grad(partial(vh, token_axes="dp"), argnums=1)
        close(jax.jit(jax.shard_map(inside, in_specs=specs, out_specs=P()))(x, w, labels), dw)


def test_unchecked_gradients_inside_are_those_of_the_sum_over_devices():
    """JAX's own convention, and the documented one: n times, each copy's part added."""
    x, w, labels = draw()
    sizes = {"dp": 2, "tp": 4}
    options = {"vocab_axis": "tp", "token_axes": "dp", "vocab_size": 16}

    def inside(x, w):
        y = labels.reshape(2, 4)[lax.axis_index("dp")]
        dx, dw = jax.grad(partial(ce, **options), argnums=(0, 1))(x, w, y)
        return lax.psum(dx, "tp") / 8, lax.psum(dw, "dp") / 8

    specs = P("dp"), P(None, "tp")
    with jax.set_mesh(mesh_of(sizes)):
        f = jax.shard_map(inside, in_specs=specs, out_specs=specs, check_vma=False)
        found = jax.jit(f)(x, w)
    assert_equal(found, jax.grad(ce, argnums=(0, 1))(x, w, labels))


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("sizes", [{"dp": 1, "tp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_dx_of_a_split_vocabulary(sizes, checked):
    """apple/ml-cross-entropy#42: the parts of dx are added, on every device."""
    w = jnp.array([[1.0, 0], [0, 1], [-1, 0], [0, -1]])
    x, labels = jnp.tile(jnp.array([[1.0, 0]]), (2, 1)), jnp.array([0, 0])
    loss = partial(ce, reduction="sum", w_layout="vh", vocab_axis="tp", token_axes="dp")
    with jax.set_mesh(mesh_of(sizes)):
        f = jax.shard_map(
            partial(loss, vocab_size=4),
            in_specs=(P("dp"), P("tp"), P("dp")),
            out_specs=P(),
            check_vma=checked,
        )
        dx, dw = jax.jit(jax.grad(f, argnums=(0, 1)))(x, w, labels)
    close(dx, [[-0.537883, 0]] * 2)
    close(dw, jax.grad(partial(ce, reduction="sum", w_layout="vh"), argnums=1)(x, w, labels))


@pytest.mark.parametrize("n", [1, 2, 4])
def test_smoothing_counts_the_whole_vocabulary(n):
    """NVIDIA/Megatron-LM#737: e/V with the global V; finite for logits a thousand times larger."""
    z = jnp.arange(8) / 2
    eye = jnp.eye(8)
    loss = partial(ce, label_smoothing=0.1, vocab_axis="tp", labels=jnp.array([2]))
    with jax.set_mesh(mesh_of({"tp": n})):
        value, dz = jax.jit(jax.value_and_grad(lambda z: loss(z[None], eye)))(z)
        close(value, 3.339267)
        close(dz[2], -0.879600)
        assert jnp.isfinite(jax.jit(lambda z: loss(z[None], eye))(1000 * z))


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("plan", ["recompute", "in_forward", "soft cap"])
def test_values_that_vary_over_the_vocabulary_axis(plan, inside):
    """Tokens that the caller gathered himself vary by type; his gather adds up their gradients."""
    x, w, labels = draw()
    arrays = {"x": x, "w": w, "weights": jnp.linspace(0.25, 2, 8), "logit_scale": jnp.float32(0.8)}
    options = {"logit_soft_cap": 4.0} if plan == "soft cap" else {"backward": plan}

    def local(arrays, labels):
        gathered = {k: lax.all_gather(arrays[k], "tp", tiled=True) for k in ("x", "weights")}
        labels = lax.all_gather(labels, "tp", tiled=True)
        placed = {"vocab_axis": "tp", "token_axes": "dp"}
        return ce(**arrays | gathered, labels=labels, **placed, **options)

    rows = P(("dp", "tp"))
    specs = {"x": rows, "w": P(None, "tp"), "weights": rows, "logit_scale": P()}
    with jax.set_mesh(mesh_of({"dp": 2, "tp": 4})):
        mapped = partial(jax.shard_map, in_specs=(specs, rows))
        if inside:
            f = mapped(jax.value_and_grad(local), out_specs=(P(), specs))
        else:
            f = jax.value_and_grad(mapped(local, out_specs=P()))
        found = jax.jit(f)(arrays, labels)
    wanted = jax.value_and_grad(lambda a: ce(**a, labels=labels, **options))(arrays)
    assert_equal(found, wanted)


# --- a weight that is not what it is said to be ---


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_replicated_weight_under_jit_gives_the_right_value(kind):
    """NVIDIA/Megatron-LM#7452: never loss + log(n)."""
    with jax.set_mesh(mesh_of({"tp": 2}, kind)):
        x, w, labels = (jax.device_put(a, P()) for a in (jnp.ones((1, 3)), jnp.zeros((3, 4)), [0]))
        close(jax.jit(partial(ce, vocab_axis="tp"))(x, w, jnp.asarray(labels)), 1.386294)


@pytest.mark.parametrize("checked", [True, False])
def test_replicated_weight_in_shard_map_is_refused(checked):
    x, w, labels = jnp.ones((1, 3)), jnp.zeros((3, 4)), jnp.array([0])
    with jax.set_mesh(mesh_of({"tp": 2})):
        for options in ({}, {"vocab_size": 4}):
            f = jax.shard_map(
                partial(ce, vocab_axis="tp", **options),
                in_specs=P(),
                out_specs=P(),
                check_vma=checked,
            )
            with pytest.raises(ValueError, match="w (is|holds)|vocab_size"):
                f(x, w, labels)


@pytest.mark.parametrize("columns", [10, 12])
def test_vocabulary_of_ten_over_four(columns):
    """Padded inside, or by the caller who says so."""
    size = {} if columns == 10 else {"vocab_size": 10}
    loss = partial(ce, vocab_axis="tp", **size)
    w, x = jnp.zeros((3, columns)), jnp.ones((1, 3))
    with jax.set_mesh(mesh_of({"tp": 4})):
        value, dw = jax.jit(jax.value_and_grad(loss, argnums=1))(x, w, jnp.array([9]))
    close(value, 2.302585)
    close(dw[:, :9], 0.1)
    close(dw[:, 9], -0.9)
    assert (dw[:, 10:] == 0).all()


def test_padded_head_on_one_device():
    """vocab_size needs no mesh."""
    x, w, labels = draw(v=16)
    found = jax.value_and_grad(partial(ce, vocab_size=13), argnums=(0, 1))(x, w, labels % 13)
    value, (dx, dw) = jax.value_and_grad(ce, argnums=(0, 1))(x, w[:, :13], labels % 13)
    assert_equal(found, (value, (dx, jnp.pad(dw, ((0, 0), (0, 3))))))


# --- labels and rows ---


def test_bad_labels_removed_classes_ties_and_masked_nan():
    """As on one device: NaN for a label out of range, 0 for what does not count."""
    x, w, labels = draw()
    labels = labels.at[0].set(16).at[1].set(-100).at[2].set(-1)
    x = x.at[1].set(jnp.nan)
    bias = jnp.zeros(16).at[5].set(-jnp.inf)
    w = w.at[:, 12].set(w[:, 3])  # a tie between shards wherever class 3 wins
    loss = partial(ce, reduction="none", bias=bias, return_metrics=True)
    wanted = jax.value_and_grad(lambda *a: jnp.nansum(loss(*a)[0]), argnums=(0, 1))(x, w, labels)
    _, metrics = loss(x, w, labels)
    with jax.set_mesh(mesh_of({"dp": 2, "tp": 4})):
        on = partial(loss, vocab_axis="tp", token_axes="dp")
        grad = jax.value_and_grad(lambda *a: jnp.nansum(on(*a)[0]), argnums=(0, 1))
        assert_equal(jax.jit(grad)(x, w, labels), wanted)
        found = jax.jit(on)(x, w, labels)
    assert_equal(found, (loss(x, w, labels)[0], metrics))
    assert math.isnan(found[0][0]) and found[0][1] == 0 and math.isnan(found[0][2])


# --- types, transformations, other placements ---


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_weight_sharded_on_h_too(kind, caplog):
    """FSDP: gathered at each use, which the log says where types tell; dw comes back sharded."""
    x, w, labels = draw()
    options = {"vocab_axis": "tp", "token_axes": "dp", "return_metrics": True}
    f = jax.value_and_grad(partial(ce, **options), argnums=(0, 1), has_aux=True)
    with jax.set_mesh(mesh_of({"dp": 2, "tp": 4}, kind)), caplog.at_level(logging.INFO):
        specs = P("dp"), P("dp", "tp"), P("dp")
        args = [jax.device_put(a, s) for a, s in zip((x, w, labels), specs, strict=True)]
        found = jax.jit(f)(*args)
        if kind == "explicit":
            assert found[1][1].sharding.spec == P("dp", "tp")
            assert "sharded on H over ('dp',): each use gathers it" in caplog.text
    wanted = jax.value_and_grad(partial(ce, return_metrics=True), argnums=(0, 1), has_aux=True)
    assert_equal(found, wanted(x, w, labels))


@pytest.mark.parametrize("explicit", ["dp", "tp"])
def test_a_mesh_of_both_kinds_of_axes(explicit):
    """Types tell of the Explicit axis, XLA lays out the Auto one."""
    x, w, labels = draw()
    kinds = tuple(AxisType.Explicit if a == explicit else AxisType.Auto for a in ("dp", "tp"))

    def both(x, w, **placed):
        logits = fused_ce(x @ w, labels, implementation="xla", vocab_size=15, **placed)
        return logits + ce(x, w, labels, backward="in_forward", **placed)

    with jax.set_mesh(jax.make_mesh((2, 4), ("dp", "tp"), axis_types=kinds)):
        args = jax.device_put(x, P("dp")), jax.device_put(w, P(None, "tp"))
        placed = {"vocab_axis": "tp", "token_axes": "dp"}
        found = jax.jit(jax.value_and_grad(partial(both, **placed), argnums=(0, 1)))(*args)
    assert_equal(found, jax.value_and_grad(both, argnums=(0, 1))(x, w))


@pytest.mark.parametrize("axes", [("tp", "dp"), ("dp", "tp")], ids=str)
@pytest.mark.parametrize("named", [{}, {"token_axes": "dp"}, {"vocab_axis": ("dp", "tp")}], ids=str)
def test_columns_sharded_over_the_axis_of_the_tokens_too(named, axes, caplog):
    """FSDP along V: what is named stands, and the type of the other gives way to it."""
    x, w, labels = draw()
    _log_moved_columns.cache_clear()
    with jax.set_mesh(mesh_of({"dp": 2, "tp": 4}, "explicit")), caplog.at_level(logging.INFO):
        specs = P("dp"), P(None, axes), P("dp")
        args = [jax.device_put(a, s) for a, s in zip((x, w, labels), specs, strict=True)]
        found = jax.jit(jax.value_and_grad(partial(ce, **named), argnums=(0, 1)))(*args)
        assert found[1][1].sharding.spec == specs[1]
    assert ("gathers them over these" in caplog.text) == ("vocab_axis" not in named)
    assert_equal(found, jax.value_and_grad(ce, argnums=(0, 1))(x, w, labels))


def test_vmap_scan_and_checkpoint():
    """Transformed as the loss on one device is."""
    x, w, labels = draw()
    xs, ys = jnp.stack([x, 2 * x, -x]), jnp.stack([labels, labels, 15 - labels])

    def total(loss):
        def f(w):
            each = jax.vmap(loss, in_axes=(0, None, 0))(xs, w, ys)
            step = jax.checkpoint(lambda c, xy: (c + loss(xy[0], w, xy[1]), None))
            return jnp.sum(each) + lax.scan(step, jnp.zeros(()), (xs, ys))[0]

        return jax.jit(jax.value_and_grad(f))

    with jax.set_mesh(mesh_of({"dp": 2, "tp": 4})):
        found = total(partial(ce, vocab_axis="tp", token_axes="dp"))(w)
    assert_equal(found, total(ce)(w))


def test_a_mesh_that_no_axis_is_named_of(caplog):
    """XLA then decides, which may gather: said once."""
    x, w, labels = draw()
    with jax.set_mesh(mesh_of({"only": 2})), caplog.at_level(logging.WARNING):
        found = [jax.jit(ce)(x, w, labels), jax.jit(partial(ce, z_loss=0.1))(x, w, labels)]
    assert caplog.text.count("names neither vocab_axis nor token_axes of ('only',)") == 1
    assert_equal(found[0], ce(x, w, labels))


def test_several_axes_split_the_vocabulary():
    x, w, labels = draw()
    grad = lambda f: jax.jit(jax.value_and_grad(f, argnums=(0, 1)))  # noqa: E731
    with jax.set_mesh(mesh_of({"dp": 2, "tp": 4})):
        found = grad(partial(ce, vocab_axis=("dp", "tp")))(x, w, labels)
    assert_equal(found, grad(ce)(x, w, labels))


def test_head_on_a_mesh():
    """The parameters are made sharded, and the losses know the axes."""
    x, _, labels = draw()
    with jax.set_mesh(mesh_of({"dp": 2, "tp": 4})):
        head = LMHead(4, 16, use_bias=True, vocab_axis="tp", token_axes=("dp",), rngs=nnx.Rngs(0))
        assert head.kernel[...].sharding.spec == P(None, "tp")
        assert head.bias[...].sharding.spec == P("tp")
        both = jax.jit(lambda x: (head.loss(x, labels), head.logprob(x, labels).lse))
        found = both(x)
        assert head(x).shape == (8, 16)
        with pytest.raises(ValueError, match="vocab = 18 does not divide over the 4 devices"):
            LMHead(4, 18, vocab_axis="tp", rngs=nnx.Rngs(0))
    alone = LMHead(4, 16, use_bias=True, rngs=nnx.Rngs(0))
    assert_equal(found, (alone.loss(x, labels), alone.logprob(x, labels).lse))
