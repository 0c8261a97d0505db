"""The same loss in every way that a mesh allows, beside one device. Works on whatever is here.

A *way* turns ``f(x, w, bias, ...)`` and its arguments into one that computes values and gradients
on a mesh with axes "dp", "cp" and "tp" (those of its sizes):

    auto, explicit                jit on whole arrays under jax.set_mesh
    outside, outside unchecked    the gradient of a shard_map, with check_vma on and off
    inside                        the gradient within a shard_map
"""

import math
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_loss import fused_linear_ce, fused_linear_logprob

WAYS = ("auto", "explicit", "outside", "outside unchecked", "inside")
AXES = ("dp", "cp", "tp")


def mesh_of(sizes: dict[str, int], way: str = "auto"):
    """A mesh of the first devices."""
    kind = AxisType.Explicit if way == "explicit" else AxisType.Auto
    devices = jax.devices()[: math.prod(sizes.values())]
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes), devices=devices
    )


@dataclass(frozen=True)
class Problem:
    """Arrays of a loss, drawn anew from the same numbers each time."""

    loss: str = "ce"
    batch: tuple[int, ...] = (8, 8)
    hidden: int = 12
    vocab: int = 64
    padded: int = 0  # columns that the caller added to w
    layout: str = "hv"
    dtype: str = "float32"
    std: float = 1.0  # of the logits
    arrays: tuple[str, ...] = ()
    candidates: int = 0
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    implementation: str = "xla"

    def draw(self) -> dict[str, jax.Array]:
        rng = np.random.default_rng(7)
        columns = self.vocab + self.padded
        w = rng.normal(size=(self.hidden, columns)) * self.std / self.hidden**0.5
        labels = rng.integers(0, self.vocab, size=(*self.batch, max(self.candidates, 1)))
        labels[rng.random(labels.shape) < 0.2] = -100
        counted = rng.random(self.batch) < 0.8
        drawn = {
            "x": rng.normal(size=(*self.batch, self.hidden)),
            "w": w if self.layout == "hv" else w.T,
            "labels": labels if self.candidates else labels[..., 0],
            "bias": rng.normal(size=columns),
            "weights": rng.random(self.batch) + 0.5,
            "class_weights": rng.random(columns) + 0.5,
            "where": counted,
            "temperature": np.float32(1.3),
            "temperatures": rng.random(self.batch) + 0.7,
            "logit_scale": np.float32(0.8),
        }
        kinds = {"labels": jnp.int32, "where": bool, "x": self.dtype, "w": self.dtype}
        used = ("x", "w", "labels", *self.arrays)
        return {k: jnp.asarray(v, kinds.get(k, "float32")) for k, v in drawn.items() if k in used}

    def specs(self, tokens, columns) -> dict[str, P]:
        """How the arrays lie, given the axes of each axis of B and those of V."""
        w = (None, columns) if self.layout == "hv" else (columns, None)
        rows, by_class = P(*tokens), P(columns)
        specs = {"x": rows, "w": P(*w), "labels": rows, "bias": by_class, "weights": rows}
        specs |= {"class_weights": by_class, "where": rows, "temperatures": rows}
        specs |= {"temperature": P(), "logit_scale": P()}
        return {k: s for k, s in specs.items() if k in ("x", "w", "labels", *self.arrays)}

    @property
    def differentiated(self) -> tuple[str, ...]:
        fixed = ("labels", "class_weights", "where")
        return tuple(k for k in ("x", "w", *self.arrays) if k not in fixed)

    def __call__(self, arrays, **placed):
        """``(scalar, everything else)``."""
        arrays = dict(arrays)
        if "temperatures" in arrays:
            arrays["temperature"] = arrays.pop("temperatures")
        options = dict(self.options) | placed
        call = fused_linear_ce if self.loss == "ce" else fused_linear_logprob
        out = call(**arrays, w_layout=self.layout, implementation=self.implementation, **options)
        if self.loss == "ce":
            return out if options.get("return_metrics") else (out, ())
        # A cotangent of its own for every token and output.
        g = jnp.cos(jnp.arange(64.0))
        total = sum(
            jnp.sum(v * jnp.sin(v + k)) * g[k]
            for k, v in enumerate(jax.tree.leaves(out._replace(lse=0.1 * out.lse)))
        )
        return total, out


def one_device(problem: Problem):
    """``((value, extra), gradients by name)``."""
    arrays = problem.draw()
    placed = {"vocab_size": problem.vocab} if problem.padded else {}
    return _value_and_grad(problem, placed)(arrays)


def on_mesh(
    problem: Problem, sizes, way: str, tokens=(), vocab="tp", jit: bool = True, calls: int = 1
):
    """The same on a mesh; ``tokens`` has one entry for each axis of B, or fewer.

    With ``calls`` a list of the results of one program.
    """
    names = tuple(n for entry in tokens for n in ((entry,) if isinstance(entry, str) else entry))
    arrays = problem.draw()
    columns = vocab if (problem.vocab + problem.padded) % _size(sizes, vocab) == 0 else None
    specs = problem.specs(tokens, columns)
    placed = {"vocab_axis": vocab, "token_axes": tokens}
    if problem.padded or way == "outside unchecked":
        placed["vocab_size"] = problem.vocab
    with jax.set_mesh(mesh_of(sizes, way)):
        arrays = {k: jax.device_put(v, specs[k]) for k, v in arrays.items()}
        if way in ("auto", "explicit"):
            run = _value_and_grad(problem, placed)
        else:
            run = _shard_mapped(problem, way, placed, names, specs, tokens)
        run = jax.jit(run) if jit else run
        results = [run(arrays) for _ in range(calls)]
    return results[0] if calls == 1 else results


def _size(sizes, axes) -> int:
    return math.prod(sizes[a] for a in ((axes,) if isinstance(axes, str) else axes or ()))


def _value_and_grad(problem: Problem, placed):
    def run(arrays):
        def f(chosen):
            return problem(arrays | chosen, **placed)

        chosen = {k: arrays[k] for k in problem.differentiated}
        return jax.value_and_grad(f, has_aux=True)(chosen)

    return run


def _shard_mapped(problem: Problem, way: str, placed, names, specs, tokens):
    def local(chosen, arrays):
        value, extra = problem(arrays | chosen, **placed)
        if problem.loss != "ce" and names:
            value = jax.lax.psum(value, names)
        return value, extra

    rows = P(*tokens)
    if problem.loss != "ce":
        shapes = jax.eval_shape(lambda: one_device(problem))[0][1]
        extra = jax.tree.map(lambda _: rows, shapes)
    elif problem.options.get("return_metrics"):
        _, extra = jax.eval_shape(lambda: one_device(problem))[0]
        extra = extra._replace(**{k: P() for k in extra._fields})
        extra = extra._replace(predictions=rows, lse=rows)
    else:
        extra = ()
    wrt = {k: specs[k] for k in problem.differentiated}

    def run(arrays):
        chosen = {k: arrays[k] for k in wrt}
        if way == "inside":
            f = jax.value_and_grad(local, has_aux=True)
            out_specs = (P(), extra), wrt
        else:
            f, out_specs = local, (P(), extra)
        f = jax.shard_map(
            f,
            in_specs=(wrt, specs),
            out_specs=out_specs,
            check_vma="unchecked" not in way,
        )
        return (
            f(chosen, arrays)
            if way == "inside"
            else jax.value_and_grad(f, has_aux=True)(chosen, arrays)
        )

    return run


def assert_equal(found, wanted, units: float = 64) -> None:
    """Within so many units in the last place of the largest element of each array."""
    found, wanted = jax.device_get((found, wanted))
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for (path, b), a in zip(jax.tree.leaves_with_path(wanted), jax.tree.leaves(found), strict=True):
        name = jax.tree_util.keystr(path)
        assert a.dtype == b.dtype and a.shape == b.shape, name
        if not jnp.issubdtype(b.dtype, jnp.floating):
            np.testing.assert_array_equal(a, b, err_msg=name)
            continue
        unit = float(jnp.finfo(b.dtype).eps)
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert (np.isnan(a) == np.isnan(b)).all(), name
        error = np.nanmax(np.abs(a - b), initial=0) / np.nanmax(np.abs(b), initial=1e-30)
        assert error <= units * unit, f"{name}: off by {error:.3g} of the largest element"
