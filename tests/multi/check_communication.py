"""What is moved between devices; `test_sharding.py` runs this file on 8 devices."""

import math
import re
from functools import partial

import check_rows
import jax
import pytest
import sharded
from check_contract import ce, draw
from jax.sharding import PartitionSpec as P
from sharded import assert_equal, mesh_of

from benchmarks.collectives import KINDS, collectives


def _collectives(compiled) -> dict[str, int]:
    """How many elements each kind of collective moves."""
    kinds = rf"= (.*?) ({'|'.join(KINDS)})\("
    moved: dict[str, int] = {}
    for shapes, kind in re.findall(kinds, compiled.as_text()):
        for dims in re.findall(r"\w+\[([\d,]*)\]", shapes):
            size = math.prod(int(n) for n in dims.split(",") if n)
            moved[kind] = moved.get(kind, 0) + size
    return moved


# Of 8 tokens, H = 4 and V = 16 over dp=2 and tp=4. Gathered: the row sums m, s, z_label and argmax
# of 4 tokens from 4 shards. Reduced: dx [4, 4] over tp; dw [4, 4] and 5 scalars over dp (two terms,
# the denominator, two counts).
EXPECTED = {"all-gather": 4 * 4 * 4, "all-reduce": 16 + 16 + 5}


@pytest.mark.parametrize("named", [{}, {"vocab_axis": "tp"}, {"token_axes": "dp"}], ids=str)
def test_explicit_axes_need_no_names(named):
    """Where types say what lies where, the call reads it off them."""
    x, w, labels = draw()
    loss = partial(ce, return_metrics=True)
    wanted = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(x, w, labels)
    f = jax.value_and_grad(partial(loss, **named), argnums=(0, 1), has_aux=True)
    with jax.set_mesh(mesh_of({"dp": 2, "tp": 4}, "explicit")):
        args = [
            jax.device_put(a, s)
            for a, s in zip((x, w, labels), (P("dp"), P(None, "tp"), P("dp")), strict=True)
        ]
        compiled = jax.jit(f).lower(*args).compile()
        found = compiled(*args)
        assert found[1][1].sharding.spec == P(None, "tp")
    assert_equal(found, wanted)
    assert _collectives(compiled) == EXPECTED


def test_nothing_is_moved_but_sums():
    x, w, labels = draw()
    options = {"vocab_axis": "tp", "token_axes": "dp", "return_metrics": True}
    f = jax.value_and_grad(partial(ce, **options), argnums=(0, 1), has_aux=True)
    with jax.set_mesh(mesh_of({"dp": 2, "tp": 4})):
        specs = P("dp"), P(None, "tp"), P("dp")
        args = [jax.device_put(a, s) for a, s in zip((x, w, labels), specs, strict=True)]
        assert _collectives(jax.jit(f).lower(*args).compile()) == EXPECTED


@pytest.mark.parametrize("way", sharded.WAYS)
@pytest.mark.parametrize("name,fields", [("ce", 6), ("reverse_kl", 5)])
def test_only_row_sums_of_logits_travel(name, fields, way):
    """Of 12 tokens a device: gathered from 4 shards once. The class weight of each label is added
    up; without types the cotangents of all devices' losses too. No gradient moves."""
    placed = {"vocab_axis": "tp", "token_axes": ("dp",)}
    if way == "outside unchecked":
        placed["vocab_size"] = check_rows.V
    with jax.set_mesh(mesh_of({"dp": 2, "tp": 4}, way)):
        run = jax.jit(check_rows.step(name, "mean", way, **placed))
        program = run.lower(check_rows.put(check_rows.draw(name))).compile().as_text()
    vectors = (name == "ce") + (way == "outside unchecked")
    expected = [("all-gather", 4 * fields * 4 * 12)] + vectors * [("all-reduce", 4 * 12)]
    assert collectives(program) == expected
