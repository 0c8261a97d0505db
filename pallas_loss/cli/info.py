"""What runs on this machine and why; with a shape, the plan for its gradients and its price."""

import argparse
import platform
import time
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import jax

from pallas_loss import __version__, _device, fused_linear_ce, select
from pallas_loss.backends.rows import RowOperands, RowProblem
from pallas_loss.cli.shapes import GIB, Call, Shape
from pallas_loss.losses import REVERSE_KL, CrossEntropy, LabelLoss, LogitTransform

_ANY = Shape(8192, 4096, 128256)  # where the question is only what can run


def report(args: argparse.Namespace) -> Iterator[str]:
    """The lines of ``python -m pallas_loss info``."""
    call = Call(args.shape or _ANY, args.dtype, args.layout, args.implementation)
    chosen = call.backend().name
    yield from _machine()
    yield ""
    yield from _backends(call, chosen)
    yield ""
    if args.shape is None:
        yield "The plan for a head and its price: python -m pallas_loss info T,H,V"
        return
    yield from _price(call, chosen)
    if not args.no_compile:
        yield from _compiled(call)


def _machine() -> Iterator[str]:
    chip = _device.current_chip()
    version = (
        f", compute capability {'.'.join(map(str, chip.capability))}" if chip.capability else ""
    )
    yield f"pallas_loss {__version__}, Python {platform.python_version()}"
    yield "  " + ", ".join(f"{name} {version}" for name, version in _versions())
    yield f"device {chip.kind} ({chip.platform}{version}), {_device.memory_bytes() / GIB:.1f} GiB"
    if chip.capability and chip.capability[0] == 10:
        yield "  the kernels for it were compiled and simulated, not yet run on such a device"
    yield f"  {jax.device_count()} in sight of JAX, {jax.process_count()} process(es)"


def _versions() -> Iterator[tuple[str, str]]:
    for name in ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "flax"):
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue


def _backends(call: Call, chosen: str) -> Iterator[str]:
    yield f"losses from hidden states in {call.dtype}, in the order of preference"
    for backend in select.LINEAR_BACKENDS:
        reason = backend.unsupported(call.problem, call.operands)
        yield _verdict(backend.name, reason, backend.name == chosen)
    t, v = call.shape.T, call.shape.V
    logits: Any = jax.ShapeDtypeStruct((t, v), call.dtype)
    hard = RowProblem(LabelLoss(CrossEntropy(0.0, 0.0, False), v), LogitTransform())
    soft = RowProblem(REVERSE_KL, LogitTransform(), target="logits")
    for title, problem, operands in (
        ("cross-entropy", hard, RowOperands(logits, labels=call.arguments[2])),
        ("distillation", soft, RowOperands(logits, target=logits)),
    ):
        yield f"{title} from logits [{t}, {v}] in {call.dtype}"
        reasons = {b.name: b.unsupported(problem, operands) for b in select.ROW_BACKENDS}
        runs = next(name for name, reason in reasons.items() if reason is None)
        yield from (_verdict(name, reason, name == runs) for name, reason in reasons.items())


def _verdict(name: str, reason: str | None, runs: bool) -> str:
    return f"  {name:12} " + (f"no: {reason}" if reason else "runs" if runs else "can run")


def _price(call: Call, chosen: str) -> Iterator[str]:
    t, v = call.shape.T, call.shape.V
    yield f'{call.shape}, {call.dtype}, w_layout="{call.layout}", on {chosen}'
    yield f"  backward='auto' is {call.plan('auto')}"
    for backward, plan in call.plans():
        yield f"  backward={backward!r}: {plan}"
    yield f"  the float32 logits that are not made: {t * v * 4 / GIB:.3g} GiB"


def _compiled(call: Call) -> Iterator[str]:
    def loss(x, w, labels):
        return fused_linear_ce(
            x, w, labels, w_layout=call.layout, implementation=call.implementation
        )

    begin = time.perf_counter()
    program = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*call.arguments).compile()
    seconds = time.perf_counter() - begin
    memory = program.memory_analysis()
    yield (
        f"  value and both gradients as compiled here, in {seconds:.1f} s: "
        f"{memory.temp_size_in_bytes / GIB:.3g} GiB of temporaries beside "
        f"{memory.argument_size_in_bytes / GIB:.3g} GiB of arguments and "
        f"{memory.output_size_in_bytes / GIB:.3g} GiB of results"
    )
