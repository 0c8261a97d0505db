"""Times the library's plans against plain XLA on this machine.

Medians by the host's clock, batches of calls that end in one wait, the programs in turn. Memory is
what the compiled program takes beyond its arguments and results. Ratios mean more than
milliseconds; the published figures come from benchmarks/ with the device's own clock.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp

from pallas_loss import _device, fused_linear_ce
from pallas_loss.cli.shapes import GIB, Call, table
from pallas_loss.plans import Backward

_SAMPLE_S = 0.05  # a batch of calls takes at least this long
_LOGIT_STD = 2.5
_MODES = ("value", "value and gradients")


@dataclass
class Program:
    """One candidate in one mode: compiled, or the reason why it was not run."""

    name: str
    mode: str
    compiled: Callable | None = None
    temp_bytes: int = 0
    error: str = ""
    calls: int = 1
    seconds: list[float] = field(default_factory=list)
    value: float = float("nan")

    def warm_up(self, inputs) -> None:
        """Runs it, keeps its value, and finds how many calls make a sample."""
        self.value = float(jax.block_until_ready(_value(self.compiled(*inputs))))
        once = self._seconds(inputs, 1)
        self.calls = max(1, round(_SAMPLE_S / max(once, 1e-6)))

    def sample(self, inputs) -> None:
        """One more sample."""
        self.seconds.append(self._seconds(inputs, self.calls))

    def _seconds(self, inputs, calls: int) -> float:
        begin = time.perf_counter()
        for _ in range(calls):
            out = self.compiled(*inputs)
        jax.block_until_ready(out)
        return (time.perf_counter() - begin) / calls


def report(args: argparse.Namespace) -> Iterator[str]:
    """The lines of ``python -m pallas_loss bench``."""
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise ImportError(
            'the progress bar needs tqdm: pip install "pallas_loss[bench]"'
        ) from error
    call = Call(args.shape, args.dtype, args.layout, args.implementation)
    backend = call.backend().name
    losses = candidates(call)
    programs = [Program(name, mode) for name in losses for mode in _MODES]
    with tqdm(total=len(programs) * (1 + args.rounds), unit="step", leave=False) as bar:
        for program in programs:
            bar.set_description(f"compiling {program.name}, {program.mode}")
            _guarded(program, _compile, losses[program.name], call)
            bar.update()
        inputs = make_inputs(call)
        for program in programs:
            if program.compiled is not None:
                _guarded(program, Program.warm_up, inputs)
        for _ in range(args.rounds):
            for program in programs:
                bar.set_description(f"timing {program.name}, {program.mode}")
                if program.compiled is not None:
                    _guarded(program, Program.sample, inputs)
                bar.update()
    yield f'{call.shape}, {call.dtype}, w_layout="{call.layout}", {_device.current_chip().kind}'
    yield f"fused: implementation={backend!r}; backward='auto' is {call.plan('auto')}"
    yield ""
    yield from table(_HEADS, [_row(name, programs, call) for name in losses])


def candidates(call: Call) -> dict[str, Callable]:
    """Each way to the loss by its name: the plans that can be had here, and plain XLA."""
    found: dict[str, Callable] = {}
    chosen = call.plan("auto").name
    for backward, plan in call.plans():
        if not isinstance(plan, str):
            auto = " (auto)" if backward == chosen else ""
            found[f"fused, {backward}{auto}"] = _fused(call, backward)
    found["XLA, float32 logits"] = _naive(call, jnp.float32)
    if call.dtype != "float32":
        found[f"XLA, {call.dtype} logits"] = _naive(call, jnp.dtype(call.dtype))
    return found


def _fused(call: Call, backward: Backward) -> Callable:
    return partial(
        fused_linear_ce,
        w_layout=call.layout,
        implementation=call.implementation,
        backward=backward,
    )


def _naive(call: Call, dtype) -> Callable:
    """All logits in ``dtype``; the softmax in float32."""
    axis = 0 if call.layout == "hv" else 1

    def loss(x, w, labels):
        over = (((1,), (axis,)), ((), ()))
        z = jax.lax.dot_general(x, w, over, preferred_element_type=dtype).astype(jnp.float32)
        z_label = jnp.take_along_axis(z, labels[:, None], axis=1)[:, 0]
        return jnp.mean(jax.nn.logsumexp(z, axis=1) - z_label)

    return loss


def make_inputs(call: Call) -> tuple[jax.Array, ...]:
    """Normal ``x``, ``w`` such that logits have standard deviation 2.5, uniform labels."""
    x, w, labels = call.arguments
    keys = jax.random.split(jax.random.key(0), 3)
    return (
        jax.random.normal(keys[0], x.shape, x.dtype),
        jax.random.normal(keys[1], w.shape, w.dtype) * (_LOGIT_STD / call.shape.H**0.5),
        jax.random.randint(keys[2], labels.shape, 0, call.shape.V),
    )


def _compile(program: Program, loss: Callable, call: Call) -> None:
    gradients = program.mode == _MODES[1]
    function = jax.value_and_grad(loss, (0, 1)) if gradients else loss
    compiled = jax.jit(function).lower(*call.arguments).compile()
    memory = compiled.memory_analysis()
    program.temp_bytes = memory.temp_size_in_bytes
    needed = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    if needed > _device.memory_bytes():
        # A CPU would swap, or lose the process.
        program.error = "does not fit"
    else:
        program.compiled = compiled


def _guarded(program: Program, step: Callable, *args) -> None:
    try:
        step(program, *args)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        program.compiled, program.error = None, "out of memory"


_HEADS = ["", "value, ms", "with gradients, ms", "TFLOP/s", "temporaries, GiB", "loss"]


def _row(name: str, programs: list[Program], call: Call) -> list[str]:
    forward, gradients = (p for p in programs if p.name == name)
    flops = 6 * call.shape.T * call.shape.H * call.shape.V
    rate = "" if gradients.error else f"{flops / _median(gradients) / 1e12:.3g}"
    return [
        name,
        forward.error or f"{_median(forward) * 1e3:.2f}",
        gradients.error or f"{_median(gradients) * 1e3:.2f}",
        rate,
        f"{gradients.temp_bytes / GIB:.3f}",
        "" if forward.error else f"{forward.value:.6f}",
    ]


def _median(program: Program) -> float:
    return statistics.median(program.seconds)


def _value(out) -> jax.Array:
    return out[0] if isinstance(out, tuple) else out
