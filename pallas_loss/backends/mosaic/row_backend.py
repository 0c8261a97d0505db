"""Losses from logits on Mosaic GPU: lays the arrays out and launches the row kernel."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_loss import _device, tuning
from pallas_loss._types import Array, Float, Rows, Scalar
from pallas_loss.backends import row_sweep
from pallas_loss.backends.mosaic import compat
from pallas_loss.backends.mosaic.exchange import EXACT_COLUMNS, Exchange
from pallas_loss.backends.mosaic.row_schedule import Mode
from pallas_loss.backends.mosaic.rows import LANES, WARPS, Lines, Sweeps, every_thread, every_warp
from pallas_loss.backends.rows import RowOperands, RowProblem, Sums, factors_of, slope_of
from pallas_loss.losses import LabelLoss, LogitFactors
from pallas_loss.tuning import RowConfig, heuristics


class RowMosaicGpu:
    """One pass on Hopper and Blackwell, by blocks that each own a row until it is done.

    Rows of at most 98304 bfloat16 columns, or 49152 beside a target, stay in shared memory between
    their sums and their gradient. Of longer ones a part is read again, from L2 as far as that keeps
    it: the further V is past twice these, the less it does.

    Any V is taken. One that is no multiple of 64 costs padded copies of the inputs and a slice of
    the gradient.
    """

    name = "mosaic_gpu"

    def unsupported(self, problem: RowProblem, operands: RowOperands) -> str | None:
        chip = _device.current_chip()
        if chip.capability is None or chip.capability[0] not in (9, 10):
            if not compat.interpreting():
                return f"needs a Hopper or Blackwell GPU (sm_90, sm_100), not {chip.kind}"
        if problem.argmax and operands.logits.shape[1] > EXACT_COLUMNS:
            return f"predictions are exact among {EXACT_COLUMNS} columns at most"
        return None

    def sums(self, problem: RowProblem, operands: RowOperands) -> Sums:
        if operands.logits.shape[0] == 0:
            return problem.loss.start(0, problem.moments)
        return _launch("sums", problem, operands, None, None)[0]

    def sums_and_gradient(
        self, problem: RowProblem, operands: RowOperands, g: Rows, inplace: bool
    ) -> tuple[Sums, Float[Array, "T V"]]:
        if operands.logits.shape[0] == 0:
            return problem.loss.start(0, problem.moments), operands.logits
        return _launch("both", problem, operands, None, g, inplace)

    def dot_z(self, problem: RowProblem, operands: RowOperands, sums: Sums, g: Rows) -> Scalar:
        return row_sweep.dot_z(problem, operands, sums, g)

    def gradient(
        self, problem: RowProblem, operands: RowOperands, sums: Sums, g: Rows, inplace: bool
    ) -> Float[Array, "T V"]:
        if operands.logits.shape[0] == 0:
            return operands.logits
        return _launch("gradient", problem, operands, sums, g, inplace)[1]


class _View(NamedTuple):
    """Rows as lines: ``width`` columns each, ``padding`` columns appended to fill the last."""

    width: int
    padding: int
    lines: int
    line_bytes: int  # of all inputs

    def of(self, v: jax.Array) -> jax.Array:
        """``[T, V]`` as ``[T, lines, width]``."""
        v = jnp.pad(v, ((0, 0), (0, self.padding))) if self.padding else v
        return v.reshape(v.shape[0], self.lines, self.width)


def _view(operands: RowOperands) -> _View:
    """The widest lines, 64 columns or more, that V divides into and a lane reads in 16 bytes."""
    inputs = [v for v in (operands.logits, operands.target) if v is not None]
    vocab, largest = operands.logits.shape[1], max(v.dtype.itemsize for v in inputs)
    widest = 512 // largest
    width = next((w for w in (256, 128, 64) if w <= widest and vocab % w == 0), widest)
    count = -(-vocab // width)
    line_bytes = width * sum(v.dtype.itemsize for v in inputs)
    return _View(width, count * width - vocab, count, line_bytes)


# Stretches of 32 KiB that L2 keeps for each multiprocessor, by major compute capability: two thirds
# of 50 MiB on an H200 (measured), of 120 on a B200 (not).
_IN_L2 = {9: 8, 10: 17}


def _config(mode: Mode, problem: RowProblem, operands: RowOperands) -> RowConfig:
    view = _view(operands)
    # Lines of 256: 32 logits a lane at once, or 16 where each brings something along (the weight of
    # its column, its tanh); more spill.
    heavy = "u" in problem.moments or problem.transform.soft_cap is not None
    target = problem.loss.has_target

    def choose() -> RowConfig:
        if target and not heavy:
            return heuristics.paired_rows(view.lines, view.line_bytes, 2, mode == "sums")
        return heuristics.rows(view.lines, view.line_bytes, 2 if target or heavy else 4)

    chip = _device.current_chip().capability or (9, 0)
    choose_for_chip = lambda: replace(choose(), in_l2=_IN_L2[chip[0]])  # noqa: E731
    config = tuning.lookup(RowConfig, choose_for_chip, mode)
    if (needed := config.smem_bytes(view.line_bytes)) > tuning.SMEM_BYTES:
        raise ValueError(
            f"{config} needs {needed} bytes of shared memory for lines of {view.line_bytes} bytes"
        )
    return config


def _log1p(s):
    """``log(1 + s)`` without ``log1p``; the second factor undoes the rounding of ``1 + s``."""
    u = 1.0 + s
    return jnp.where(u == 1.0, s, jnp.log(u) * (s / jnp.where(u == 1.0, 1.0, u - 1.0)))


@dataclass(frozen=True)
class _Arrays:
    """What a launch reads beside the logits, by name, and how the kernel finds it again."""

    per_row: dict[str, jax.Array]
    factors: dict[str, jax.Array]
    class_weights: jax.Array | None
    kept: list[jax.Array]

    def __iter__(self):
        yield from (*self.per_row.values(), *self.factors.values(), *self.kept)
        if self.class_weights is not None:
            yield self.class_weights


@compat.in_32_bits
def _launch(
    mode: Mode,
    problem: RowProblem,
    operands: RowOperands,
    sums: Sums | None,
    g: Rows | None,
    inplace: bool = False,
) -> tuple[Sums | None, jax.Array | None]:
    """The sums, unless kept ones are given, and the gradient, if ``g`` is."""
    # Its copies need names of JAX's own, which nobody should import who launches no such kernel.
    from pallas_loss.backends.mosaic.row_kernel import RowKernel

    loss = problem.loss
    if isinstance(loss, LabelLoss):
        problem = replace(problem, loss=replace(loss, log1p=_log1p))
    view, config = _view(operands), _config(mode, problem, operands)
    t, vocab = operands.logits.shape
    lines = Lines(t, view.lines, view.width, vocab, config)
    inputs = [view.of(v) for v in (operands.logits, operands.target) if v is not None]
    slope = slope_of(problem, operands)
    coefficients = None if sums is None else loss.dlogits(sums, operands.facts, g * slope)
    kept, kept_tree = jax.tree.flatten(coefficients)
    factors = factors_of(problem, operands)
    traced = {
        f"{n}.{k}": jnp.reshape(f, (1,))
        for n, both in enumerate(factors)
        for k, f in both._asdict().items()
        if f is not None and not isinstance(f, float)
    }
    given = {"labels": operands.labels, "label_weight": operands.label_weight}
    facts = {k: v for k, v in given.items() if v is not None}
    cw = operands.class_weights
    if cw is not None:
        cw = jnp.pad(cw, (0, lines.dealt * view.width - vocab))
        cw = cw.reshape(-1, WARPS, LANES, lines.vector).transpose(2, 1, 0, 3)
    arrays = _Arrays(facts | ({} if g is None else {"g": g * slope}), traced, cw, kept)

    fields, treedef = jax.tree.flatten(loss.start(1, problem.moments))
    of = jax.ShapeDtypeStruct
    parts = of((t, len(fields), config.warps), jnp.float32)
    out_type = {
        **({} if mode == "gradient" else {"parts": parts}),
        **({} if mode == "sums" else {"gradient": of(inputs[0].shape, inputs[0].dtype)}),
    }
    blocks = _device.num_multiprocessors()

    def row_kernel(*refs):
        rest = list(refs)
        take = lambda n: [rest.pop(0) for _ in range(n)]  # noqa: E731
        ins = take(len(inputs))
        per_row = dict(zip(arrays.per_row, take(len(arrays.per_row)), strict=True))
        read = dict(zip(arrays.factors, take(len(arrays.factors)), strict=True))
        kept_refs = take(len(kept))
        cw_ref = take(1)[0] if cw is not None else None
        out = dict(zip(out_type, rest, strict=True))
        in_kernel = tuple(
            LogitFactors(*(
                every_thread(every_warp(read[f"{n}.{k}"][0])) if f"{n}.{k}" in read else f
                for k, f in both._asdict().items()
            ))
            for n, both in enumerate(factors)
        )  # fmt: skip
        RowKernel(
            mode=mode,
            sweeps=Sweeps(problem, lines, in_kernel, per_row, cw_ref),
            inputs=ins,
            gradient_gmem=out.get("gradient"),
            exchange=Exchange(config, len(fields), out["parts"]) if "parts" in out else None,
            treedef=treedef,
            coefficients=problem.loss.dlogits,
            kept=lambda row: every_thread(
                jax.tree.unflatten(kept_tree, [every_warp(ref[row]) for ref in kept_refs])
            ),
            blocks=blocks,
        ).run()

    options: dict[str, Any] = dict(
        grid=(blocks,),
        grid_names=("block",),
        num_threads=config.warpgroups,
        thread_name="wg",
    )
    params = plgpu.CompilerParams(
        approx_math=True,
        unsafe_no_auto_barriers=True,
        reduction_scratch_bytes=0,  # no reduction leaves its warp, and shared memory is full
    )
    name = f"rows_{mode}"
    inputs, others = compat.untyped((inputs, list(arrays)))
    if inplace:
        made = _in_place(row_kernel, inputs, others, out_type, options, params, name)
    else:
        outs = plgpu.kernel(
            row_kernel,
            out_type=tuple(out_type.values()),
            kernel_name=name,
            compiler_params=params,
            **options,
        )(*inputs, *others)
        made = dict(zip(out_type, outs, strict=True))
    d = made.get("gradient")
    d = None if d is None else d.reshape(t, -1)[:, :vocab]
    if "parts" in made:
        # [T, fields, warps] -> fields of [warps, T].
        stacked = [made["parts"][:, f].T.astype(v.dtype) for f, v in enumerate(fields)]
        sums = loss.merge_parts(jax.tree.unflatten(treedef, stacked))
    return sums, d


def _in_place(row_kernel, inputs, arrays, out_type, options, params, name) -> dict[str, jax.Array]:
    """The launch with the gradient written over the logits."""
    launch = pl.kernel(
        lambda *refs: row_kernel(refs[-1], *refs[:-1], refs[-1]),
        mesh=plgpu.Mesh(**options),
        compiler_params=params,
        name=name,
    )
    first = {k: jnp.zeros(v.shape, v.dtype) for k, v in out_type.items() if k != "gradient"}

    def run(refs):
        launch(*inputs[1:], *arrays, *[refs[k] for k in first], refs["gradient"])

    return pl.run_state(run)(first | {"gradient": inputs[0]})
