"""A whole training step, fused against naive: ``python -m benchmarks.train_step --help``.

A small stack of decoder blocks with a head of a real vocabulary, AdamW, bfloat16 compute on float32
parameters. For each way to the loss: tokens a second at one size that all can take, and the largest
batch whose step the compiler fits into the device's memory, which is then run. The search for it
compiles some five times; ``--largest`` names what is known. Most of a compile goes into XLA's own
choice of Triton products: with ``XLA_FLAGS=--xla_gpu_enable_triton_gemm=false`` all use cuBLAS.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from benchmarks.run import environment
from models.decoder import Decoder, DecoderConfig


def _naive(model: Decoder, hidden: jax.Array, labels: jax.Array) -> jax.Array:
    """All logits in float32, and JAX's own derivative."""
    logits = model.head(hidden).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _fused(backward: str) -> Callable[..., jax.Array]:
    return lambda model, hidden, labels: model.head.loss(hidden, labels, backward=backward)


LOSSES: dict[str, Callable[..., jax.Array]] = {
    "auto": _fused("auto"),
    "recompute": _fused("recompute"),
    "naive": _naive,
}


@dataclass(frozen=True)
class Step:
    """A compiled step, the bytes it takes, and what it runs on."""

    compiled: Any
    num_bytes: int
    graphdef: Any
    state: Any

    def seconds(self, tokens: jax.Array, repeats: int) -> list[float]:
        """The time of each step after the first two."""
        state, times = self.state, []
        for _ in range(repeats + 2):
            begin = time.perf_counter()
            state, loss = self.compiled(state, tokens)
            jax.block_until_ready((state, loss))
            times.append(time.perf_counter() - begin)
        if not jnp.isfinite(loss):
            raise RuntimeError(f"the loss is {loss}")
        return times[2:]


def build(name: str, config: DecoderConfig, batch: int, length: int, *, run: bool) -> Step:
    """Compiles the step for one batch size; without ``run`` from shapes alone."""

    def create():
        model = Decoder(config, rngs=nnx.Rngs(0))
        return nnx.split((model, nnx.Optimizer(model, optax.adamw(1e-4), wrt=nnx.Param)))

    graphdef, shapes = nnx.eval_shape(create)

    def step(state, tokens):
        model, optimizer = nnx.merge(graphdef, state)
        labels = jnp.roll(tokens, -1, axis=1)

        def loss(model):
            return LOSSES[name](model, model(tokens), labels)

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), value

    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    compiled = jax.jit(step, donate_argnums=0).lower(shapes, tokens).compile()
    memory = compiled.memory_analysis()
    num_bytes = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )
    state = jax.jit(lambda: create()[1])() if run else None
    return Step(compiled, num_bytes, graphdef, state)


def largest_batch(name: str, config: DecoderConfig, length: int, limit: int, most: int) -> int:
    """The largest batch, a power of two or its midpoint, whose step takes ``limit`` bytes."""
    sizes = sorted({n for k in range(1, most.bit_length()) for n in (2**k, 3 * 2 ** (k - 1))})
    low, high = 0, len([n for n in sizes if n <= most])
    while low < high:
        middle = (low + high) // 2
        fits = build(name, config, sizes[middle], length, run=False).num_bytes <= limit
        low, high = (middle + 1, high) if fits else (low, middle)
    return sizes[low - 1] if low else 0


def measure(
    args: argparse.Namespace, config: DecoderConfig, found: dict[str, Any], save: Callable[[], None]
) -> None:
    """Throughput at ``args.batch`` and at the largest batch, for each way to the loss.

    Saves what it has found after each.
    """
    stats = jax.devices()[0].memory_stats() or {}
    limit = int(args.memory_gib * 2**30) or stats.get("bytes_limit", 0)

    def throughput(name: str, batch: int) -> dict[str, Any]:
        step = build(name, config, batch, args.length, run=True)
        key = jax.random.key(1)
        tokens = jax.random.randint(key, (batch, args.length), 0, config.vocab)
        seconds = statistics.median(step.seconds(tokens, args.repeats))
        entry = {
            "batch": batch,
            "ms": round(seconds * 1e3, 3),
            "tokens_per_s": round(batch * args.length / seconds),
            "gib": round(step.num_bytes / 2**30, 3),
        }
        print(f"{name}: {entry}", flush=True)
        return entry

    for name in args.losses:
        found[name] = {"same_batch": throughput(name, args.batch)}
        save()
        most = args.largest.get(name, 0)
        if limit and not most:
            most = largest_batch(name, config, args.length, limit, args.most)
        if limit or most:
            found[name]["largest_batch"] = throughput(name, most) if most else {"batch": 0}
            save()


def _sizes(text: str) -> dict[str, int]:
    sizes = dict(word.split("=") for word in text.split(","))
    if unknown := set(sizes) - set(LOSSES):
        raise argparse.ArgumentTypeError(f"there is no loss {sorted(unknown)}")
    return {name: int(size) for name, size in sizes.items()}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--losses", nargs="+", default=[*LOSSES], choices=[*LOSSES])
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--mlp", type=int, default=8192)
    parser.add_argument("--length", type=int, default=1024, help="positions a sequence")
    parser.add_argument("--batch", type=int, default=8, help="sequences that all losses take")
    parser.add_argument("--most", type=int, default=512, help="sequences to try at most")
    parser.add_argument(
        "--largest", type=_sizes, default={}, help="like naive=96,auto=384; default: search"
    )
    parser.add_argument("--memory-gib", type=float, default=0, help="0: what the device says")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--commit", help="what is measured; default: ask git")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/train_step.json"))
    args = parser.parse_args(argv)
    config = DecoderConfig(
        vocab=args.vocab, hidden=args.hidden, layers=args.layers, heads=args.heads, mlp=args.mlp,
        tied=False, dtype=jnp.bfloat16,
    )  # fmt: skip
    settings = {k: v for k, v in vars(args).items() if k not in ("out", "commit")}
    settings["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "")
    losses: dict[str, Any] = {}
    result = {
        "suite": "train_step",
        "environment": environment(args.commit),
        "settings": settings,
        "losses": losses,
    }
    save = lambda: args.out.write_text(json.dumps(result, indent=1) + "\n")  # noqa: E731
    measure(args, config, losses, save)


if __name__ == "__main__":
    main()
