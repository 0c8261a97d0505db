"""Losses from logits over 8 devices; `test_sharding.py` runs this file."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from sharded import WAYS, mesh_of

from pallas_loss import (
    fused_ce,
    fused_forward_kl,
    fused_reverse_kl,
    fused_soft_ce,
    tuning,
)
from pallas_loss.api.metrics import Metrics

BATCH, V = (8, 3), 48
MESHES = {
    "2x4": {"dp": 2, "tp": 4},
    "4x2": {"dp": 4, "tp": 2},
    "1x8": {"dp": 1, "tp": 8},
    "8x1": {"dp": 8, "tp": 1},
}
LOSSES = ("ce", "soft_ce", "soft_ce, logits", "reverse_kl", "forward_kl")
ROWS = P("dp")
SPECS = {
    "logits": P("dp", None, "tp"),
    "temperature": P(),
    "weights": ROWS,
    "target": P("dp", None, "tp"),
    "labels": ROWS,
    "where": ROWS,
    "classes": P("tp"),
    "g": ROWS,
}
DIFFERENTIATED = ("logits", "temperature", "weights")


def draw(name="ce", vocab=V, padding=0):
    """Arrays by name; some tokens do not count, one of them full of NaN, as are padding columns."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    labels = rng.integers(0, vocab, BATCH).astype(np.int32)
    labels[1, 2] = -100
    where = np.ones(BATCH, bool)
    where[5, 0] = False
    logits, target = 3 * normal(*BATCH, vocab), 3 * normal(*BATCH, vocab)
    logits[1, 2] = np.nan
    if name == "soft_ce":
        target = np.asarray(jax.nn.softmax(target))
    uniform = lambda *shape: rng.uniform(0.5, 2, shape).astype(np.float32)  # noqa: E731
    by_column = {"logits": logits, "target": target, "classes": uniform(vocab)}
    pad = lambda a: np.pad(  # noqa: E731
        a, [(0, 0)] * (a.ndim - 1) + [(0, padding)], constant_values=np.nan
    )
    return {k: pad(a) for k, a in by_column.items()} | {
        "temperature": np.float32(1.3), "weights": uniform(*BATCH), "labels": labels,
        "where": where, "g": uniform(*BATCH),
    }  # fmt: skip


def loss_of(name, arrays, **options):
    """``(loss, metrics or nothing)``."""
    a = arrays
    options = {"implementation": "xla"} | options
    options |= {k: a[k] for k in ("temperature", "weights", "labels", "where")}
    if name == "ce":
        return fused_ce(
            a["logits"], class_weights=a["classes"], label_smoothing=0.1, z_loss=0.01,
            logit_soft_cap=5.0, return_metrics=True, **options,
        )  # fmt: skip
    f = {
        "soft_ce": lambda z, t, **o: fused_soft_ce(z, target_probs=t, **o),
        "soft_ce, logits": lambda z, t, **o: fused_soft_ce(z, target_logits=t, **o),
        "reverse_kl": partial(fused_reverse_kl, target_temperature=0.8),
        "forward_kl": fused_forward_kl,
    }[name]
    return f(a["logits"], a["target"], **options), ()


def total_of(name, reduction, placed, chosen, arrays, over=()):
    """A number, with a cotangent of its own for every token's loss; and what it is made of."""
    value, aux = loss_of(name, arrays | chosen, reduction=reduction, **placed)
    if reduction != "none":
        return 0.7 * value, (value, aux)
    total = jnp.sum(arrays["g"] * value)
    return (jax.lax.psum(total, over) if over else total), (value, aux)


def step(name, reduction, way="auto", **placed):
    """Of the arrays: ``((total, (loss, metrics)), gradients by name)``."""
    over = ("dp",) if placed and way not in ("auto", "explicit") else ()
    total = partial(total_of, name, reduction, placed, over=over)
    if over:
        rows = ROWS if reduction == "none" else P()
        metrics = Metrics(rows, rows, P(), P(), ROWS, ROWS) if name == "ce" else ()
        wrt = {k: SPECS[k] for k in DIFFERENTIATED}
        outs = P(), (rows, metrics)
        mapped = partial(jax.shard_map, in_specs=(wrt, SPECS), check_vma="unchecked" not in way)
        if way == "inside":
            inside = jax.value_and_grad(total, has_aux=True)
            return lambda a: mapped(inside, out_specs=(outs, wrt))(_chosen(a), a)
        total = mapped(total, out_specs=outs)
    return lambda a: jax.value_and_grad(total, has_aux=True)(_chosen(a), a)


def _chosen(arrays):
    return {k: arrays[k] for k in DIFFERENTIATED}


def put(arrays, columns=True):
    """Each array where the loss wants it; on every device its columns, where they do not divide."""
    uneven = {} if columns else {"logits": ROWS, "target": ROWS, "classes": P()}
    return {k: jax.device_put(a, (SPECS | uneven)[k]) for k, a in arrays.items()}


@cache
def on_one_device(name, reduction, vocab):
    return jax.device_get(jax.jit(step(name, reduction))(draw(name, vocab)))


def on_mesh(name, reduction, mesh, way, vocab=V, padding=0, **options):
    placed = {"vocab_axis": "tp", "token_axes": ("dp",)} | options
    if padding or way == "outside unchecked":
        placed["vocab_size"] = vocab
    with jax.set_mesh(mesh_of(MESHES[mesh], way)):
        even = (vocab + padding) % MESHES[mesh]["tp"] == 0
        arrays = put(draw(name, vocab, padding), even)
        return jax.jit(step(name, reduction, way, **placed))(arrays)


def assert_that_of_one_device(name, reduction, *where, vocab=V, padding=0, **options):
    """Value, metrics and gradients; those of padding are 0, and the shape is the caller's."""
    wanted = on_one_device(name, reduction, vocab)
    found = on_mesh(name, reduction, *where, vocab=vocab, padding=padding, **options)
    d = found[1]["logits"]
    assert d.shape == (*BATCH, vocab + padding)
    assert (d[..., vocab:] == 0).all()
    found[1]["logits"] = d[..., :vocab]
    leaves = zip(jax.tree.leaves_with_path(found), jax.tree.leaves(wanted), strict=True)
    for (path, a), b in leaves:
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        name = jax.tree_util.keystr(path)
        assert np.linalg.norm(a - b) <= 3e-6 * np.linalg.norm(b) + 1e-7, name


@pytest.mark.parametrize(
    "name,mesh,way",
    [(n, "2x4", w) for n in LOSSES for w in ("auto", "explicit")]
    + [(n, m, "auto") for n in ("ce", "reverse_kl") for m in ("4x2", "1x8", "8x1")],
)
def test_whole_arrays(name, mesh, way):
    """Value, metrics, gradients; the mean, and a cotangent a token."""
    for reduction in ("mean", "none"):
        assert_that_of_one_device(name, reduction, mesh, way)


@pytest.mark.parametrize("way", ["outside", "outside unchecked", "inside"])
@pytest.mark.parametrize(
    "name,mesh",
    [(n, "2x4") for n in ("ce", "soft_ce", "reverse_kl")] + [("ce", m) for m in ("4x2", "8x1")],
)
def test_in_a_callers_shard_map(name, mesh, way):
    """On this device's shards; likewise."""
    for reduction in ("mean", "none"):
        assert_that_of_one_device(name, reduction, mesh, way)


@pytest.mark.parametrize("way", ["outside", "outside unchecked"])
@pytest.mark.parametrize("name", ["ce", "reverse_kl"])
def test_sums_a_normalizer_and_gradients_in_place(name, way):
    """Several tiles of rows to a shard, and the reference, which takes all at once."""
    with tuning.override(tuning.XlaConfig(token_tile=5, vocab_tile=12)):
        assert_that_of_one_device(name, "sum", "2x4", way, inplace=True)
    wanted = jax.jit(step(name, "mean", normalizer=7.5, vocab_axis=None))(draw(name))
    for how in ({"inplace": True}, {"implementation": "reference"}):
        found = on_mesh(name, "mean", "2x4", way, normalizer=7.5, **how)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name,vocab", [("ce", 46), ("reverse_kl", 5)])
def test_uneven_vocabulary(name, vocab, way):
    """46 columns over 4 shards of 12; 5 over 4 of 2, one of which has none: padding is no class."""
    padding = 0 if way in ("auto", "explicit") else -vocab % 4
    for reduction in ("mean", "none"):
        assert_that_of_one_device(name, reduction, "2x4", way, vocab=vocab, padding=padding)


@pytest.mark.parametrize("way", ["auto", "outside"])
@pytest.mark.parametrize("mesh", ["1x8", "8x1"])
def test_columns_to_spare(mesh, way):
    """vocab_size says so, also where an axis of one device splits them, and without a mesh."""
    assert_that_of_one_device("ce", "mean", mesh, way, vocab=13, padding=3)
    wanted, found = (
        jax.jit(step("ce", "mean", **placed))(draw(vocab=13, padding=padding))
        for placed, padding in (({}, 0), ({"vocab_size": 13}, 3))
    )
    d = found[1]["logits"]
    assert (d[..., 13:] == 0).all()
    np.testing.assert_allclose(d[..., :13], wanted[1]["logits"], rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(found[0][0], wanted[0][0], rtol=1e-6)


def test_a_loss_that_is_each_devices_own():
    """No axis is named: this device's tokens, all of their columns, typed or not."""
    a = draw()
    loss = partial(fused_ce, implementation="xla")
    alone = [
        jax.value_and_grad(loss)(a["logits"][i : i + 4], a["labels"][i : i + 4]) for i in (0, 4)
    ]
    wanted = np.array([v for v, _ in alone]), np.concatenate([d for _, d in alone])

    def local(logits, labels):
        value, d = jax.value_and_grad(loss)(logits, labels)
        return value[None], d

    with (
        jax.set_mesh(mesh_of({"dp": 2})),
        tuning.override(tuning.XlaConfig(token_tile=5, vocab_tile=V)),
    ):
        for checked in (True, False):
            f = jax.shard_map(local, in_specs=ROWS, out_specs=ROWS, check_vma=checked)
            found = jax.jit(f)(a["logits"], a["labels"])
            for got, want in zip(found, wanted, strict=True):
                np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_labels_that_vary_over_the_vocabulary_axis(reduction):
    """By type, as what the caller gathered over it does."""
    a = draw()
    logits, labels = a["logits"][:, 0], a["labels"][:, 0]
    loss = partial(fused_ce, implementation="xla", reduction=reduction, return_metrics=True)

    def local(logits, labels):
        labels = jax.lax.all_gather(labels, "tp", tiled=True)
        value, metrics = loss(logits, labels, vocab_axis="tp", token_axes="dp")
        return jax.lax.psum(jnp.sum(value), "dp") if reduction == "none" else value, metrics

    with jax.set_mesh(mesh_of(MESHES["2x4"])):
        rows = ROWS if reduction == "none" else P()
        outs = P(), Metrics(rows, rows, P(), P(), ROWS, ROWS)
        specs = P("dp", "tp"), P(("dp", "tp"))
        f = jax.shard_map(local, in_specs=specs, out_specs=outs)
        found = jax.jit(jax.value_and_grad(f, has_aux=True))(logits, labels)

    def total(logits):
        value, metrics = loss(logits, labels)
        return jnp.sum(value), metrics

    wanted = jax.value_and_grad(total, has_aux=True)(logits)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_what_cannot_lie_so_is_refused():
    """An axis used twice; logits that are not split, or a target or tokens that are not."""
    a = draw()
    mapped = partial(jax.shard_map, out_specs=P())
    with jax.set_mesh(mesh_of(MESHES["2x4"])):
        with pytest.raises(ValueError, match="token_axes too"):
            fused_ce(a["logits"], a["labels"], vocab_axis="tp", token_axes=(("dp", "tp"),))
        split = partial(fused_ce, vocab_axis="tp")
        with pytest.raises(ValueError, match="logits is the same on all 4 devices of vocab_axis"):
            mapped(split, in_specs=P())(a["logits"], a["labels"])
        both = partial(fused_ce, vocab_axis="tp", token_axes="dp")
        with pytest.raises(ValueError, match=r"logits is the same on all devices of \['dp'\]"):
            mapped(both, in_specs=(P(None, None, "tp"), P()))(a["logits"], a["labels"])
        kl = partial(fused_reverse_kl, vocab_axis="tp")
        with pytest.raises(ValueError, match="target is the same on all 4 devices of vocab_axis"):
            of = a["target"][..., :12]
            mapped(kl, in_specs=(P(None, None, "tp"), P()))(a["logits"], of)
        for size, message in ((None, "tells a shard of logits"), (V, "hold all of vocab_size=48")):
            unchecked = mapped(partial(split, vocab_size=size), in_specs=P(), check_vma=False)
            with pytest.raises(ValueError, match=message):
                unchecked(a["logits"], a["labels"])
        with pytest.raises(
            ValueError, match=r"vocab_size must be in \[1, 48\], the columns of logi"
        ):
            split(a["logits"], a["labels"], vocab_size=49)
