"""What is timed, by name: each candidate turns a workload and its inputs into programs.

A suite adds a row to ``SUITES``; a candidate is a function there. Baselines are the code that a
JAX user would write; where one has a choice of precision, its name says which.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.inputs import make_dlogits, make_inputs
from benchmarks.results import PRODUCTS
from benchmarks.workloads import Workload
from pallas_loss import fused_linear_ce, fused_linear_logprob

Scalar = jax.Array
LinearLoss = Callable[[jax.Array, jax.Array, jax.Array], Scalar]
REMAT_CHUNKS = 8
GEMMS = "gemms"
PLANS = ("recompute", "in_forward")
FORWARD, GRADIENTS = "forward", "value_and_grad"


class Program(NamedTuple):
    """A function to jit and the arguments to time it with."""

    function: Callable[..., Any]
    args: tuple[Any, ...]


Programs = Mapping[str, Program]


@dataclass(frozen=True)
class Setting:
    """What all candidates of a run share."""

    workload: Workload
    inputs: Any
    layout: str
    seed: int = 0


@dataclass(frozen=True)
class Suite:
    """``build(name, setting)`` gives a candidate's programs by mode.

    ``modes`` maps a mode to the number of products it cannot do without, which is what its TFLOP/s
    count, and to the numbers of products in the bare GEMMs that it is compared with. The first
    mode is compiled first. ``references`` are the candidates whose result the others are compared
    with, best first.
    """

    make_inputs: Callable[..., Any]
    build: Callable[[str, Setting], Programs]
    candidates: tuple[str, ...]
    modes: Mapping[str, tuple[int, tuple[int, ...]]]
    references: tuple[str, ...]


def suite(name: str) -> Suite:
    """A suite by name."""
    if name not in SUITES:
        raise ValueError(f"no suite {name!r}; there are {', '.join(SUITES)}")
    return SUITES[name]


# --- linear cross-entropy ---------------------------------------------------------------------


def _linear_ce(name: str, setting: Setting) -> Programs:
    if name == GEMMS:
        return _linear_gemms(setting)
    loss = linear_ce_loss(name, setting.layout)
    return {
        GRADIENTS: Program(jax.value_and_grad(loss, argnums=(0, 1)), setting.inputs),
        FORWARD: Program(loss, setting.inputs),
    }


def linear_ce_loss(name: str, layout: str) -> LinearLoss:
    """The mean cross-entropy of ``(x, w, labels)`` as the candidate computes it.

    ``pallas_loss`` is the library's own choice of implementation and of plan; in
    ``pallas_loss:NAME`` one of them is named.
    """
    library, _, choice = name.partition(":")
    if library == "pallas_loss":
        named = {} if not choice else {"backward" if choice in PLANS else "implementation": choice}
        return partial(fused_linear_ce, w_layout=layout, **named)
    if name not in _LINEAR_CE:
        raise ValueError(f"no candidate {name!r}; there are {', '.join(_LINEAR_CE)}")
    return _LINEAR_CE[name](layout)


def _logits(x, w, layout: str, dtype) -> jax.Array:
    contracted = (1,), (1 if layout == "vh" else 0,)
    return jax.lax.dot_general(x, w, (contracted, ((), ())), preferred_element_type=dtype)


def _sum_nll(z, labels) -> Scalar:
    z = z.astype(jnp.float32)
    at_label = jnp.take_along_axis(z, labels[:, None], axis=1)[:, 0]
    return jnp.sum(jax.nn.logsumexp(z, axis=1) - at_label)


def _xla(layout: str, dtype) -> LinearLoss:
    """All logits at once, in ``dtype``; the softmax in float32."""
    return lambda x, w, labels: _sum_nll(_logits(x, w, layout, dtype), labels) / len(labels)


def _xla_remat(layout: str) -> LinearLoss:
    """Float32 logits of an eighth of the tokens at a time, made again in the backward."""

    def loss(x, w, labels):
        @jax.checkpoint
        def chunk(x, labels):
            return _sum_nll(_logits(x, w, layout, jnp.float32), labels)

        total, _ = jax.lax.scan(
            lambda total, xy: (total + chunk(*xy), None),
            jnp.zeros((), jnp.float32),
            jax.tree.map(lambda a: a.reshape(REMAT_CHUNKS, -1, *a.shape[1:]), (x, labels)),
        )
        return total / len(labels)

    return loss


def _tokamax(layout: str) -> LinearLoss:
    import tokamax

    def loss(x, w, labels):
        w_hv = w if layout == "hv" else w.T
        return tokamax.linear_softmax_cross_entropy_loss(
            x, labels, w_hv, reduction="mean", implementation="chunked_xla"
        )

    return loss


_LINEAR_CE: dict[str, Callable[[str], LinearLoss]] = {
    "xla_tiled": partial(linear_ce_loss, "pallas_loss:xla"),
    "xla_f32": partial(_xla, dtype=jnp.float32),
    "xla_bf16": partial(_xla, dtype=jnp.bfloat16),
    "xla_remat8": _xla_remat,
    "tokamax": _tokamax,
}


# --- log-probability and entropy --------------------------------------------------------------


def _linear_logprob(entropy: bool, name: str, setting: Setting) -> Programs:
    """``sum_t g_t logprob_t``, plus ``sum_t h_t entropy_t``, with g and h drawn per token."""
    if name == GEMMS:
        return _linear_gemms(setting)
    outputs = _logprob_outputs(name, setting.layout, entropy)
    tokens = setting.workload.T
    g = jax.random.normal(jax.random.key(setting.seed + 2), (2 if entropy else 1, tokens))

    def loss(x, w, labels):
        return sum(jnp.sum(c * out) for c, out in zip(g, outputs(x, w, labels), strict=True))

    return {
        GRADIENTS: Program(jax.value_and_grad(loss, argnums=(0, 1)), setting.inputs),
        FORWARD: Program(outputs, setting.inputs),
    }


def _logprob_outputs(name: str, layout: str, entropy: bool) -> Callable[..., tuple]:
    """``(logprob,)`` or ``(logprob, entropy)`` of each token as the candidate computes them."""
    if name == "xla_f32":
        return partial(_xla_logprob, layout=layout, entropy=entropy)
    implementation, backward = _LOGPROB[name]

    def outputs(x, w, labels):
        out = fused_linear_logprob(
            x, w, labels,
            entropy=entropy, w_layout=layout, implementation=implementation, backward=backward,
        )  # fmt: skip
        return (out.logprob, out.entropy) if entropy else (out.logprob,)

    return outputs


def _xla_logprob(x, w, labels, *, layout: str, entropy: bool) -> tuple:
    logp = jax.nn.log_softmax(_logits(x, w, layout, jnp.float32), axis=1)
    at_label = jnp.take_along_axis(logp, labels[:, None], axis=1)[:, 0]
    return (at_label, -jnp.sum(jnp.exp(logp) * logp, axis=1)) if entropy else (at_label,)


_LOGPROB: dict[str, tuple[str | None, Any]] = {
    "pallas_loss": (None, "recompute"),
    "pallas_loss:stored": (None, "stored"),
    "xla_tiled": ("xla", "recompute"),
}


def _linear_gemms(setting: Setting) -> Programs:
    """The bare products, in and out in the inputs' dtype: each alone, and several in a row."""
    x, w, _ = setting.inputs
    vh = setting.layout == "vh"
    d = make_dlogits(jax.random.key(setting.seed + 1), setting.workload, x.dtype)

    def product(a, b, over_a: int, over_b: int):
        contracted = ((over_a,), (over_b,)), ((), ())
        return jax.lax.dot_general(a, b, contracted, preferred_element_type=x.dtype)

    def z(x, w):
        return product(x, w, 1, 1 if vh else 0)

    def dx(d, w):
        return product(d, w, 1, 0 if vh else 1)

    def dw(d, x):
        return product(d, x, 0, 0) if vh else product(x, d, 0, 0)

    def in_a_row(xs, w, d):
        return [z(x, w) for x in xs], dx(d, w), dw(d, xs[0])

    return {
        PRODUCTS[3]: Program(in_a_row, ((x,), w, d)),
        # Of equal operands the compiler would make one product.
        PRODUCTS[4]: Program(in_a_row, ((x, jnp.flip(x, 0)), w, d)),
        PRODUCTS[1]: Program(z, (x, w)),
        "dx": Program(dx, (d, w)),
        "dw": Program(dw, (d, x)),
    }


SUITES: dict[str, Suite] = {
    "linear_ce": Suite(
        make_inputs=make_inputs,
        build=_linear_ce,
        candidates=("pallas_loss", "pallas_loss:recompute", *_LINEAR_CE),
        modes={GRADIENTS: (3, (3, 4)), FORWARD: (1, (1,))},
        references=("xla_f32", "xla_remat8", "xla_bf16"),
    ),
    **{
        name: Suite(
            make_inputs=make_inputs,
            build=partial(_linear_logprob, entropy),
            candidates=(*_LOGPROB, "xla_f32"),
            modes={GRADIENTS: (4, (3, 4)), FORWARD: (1, (1,))},
            references=("xla_f32",),
        )
        for name, entropy in (("linear_logprob", False), ("linear_entropy", True))
    },
}
