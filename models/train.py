"""Trains a small language model on real text: ``python -m models.train --help``.

``--loss fused`` is pallas_loss; ``--loss naive`` makes the logits and hands them to optax;
``--compare`` trains both from one seed and prints them side by side. The same command, run again
after a kill, continues from the last checkpoint on exactly the same curve. The default sizes train
in minutes on two CPU cores.
"""

import argparse
import json
import math
import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import grain
import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int
from tqdm import tqdm

from models.data import Corpus, Windows, load_corpus, pack, training_batches, write_whole
from models.decoder import Decoder, DecoderConfig
from models.report import Run, plot, table
from pallas_loss.nnx import LMHead, next_token_labels

IGNORE = -100
# Arguments that may differ between the two halves of a resumed run: they do not bend its curve.
# The loss names the folder, the text is known by its fingerprint.
NOT_SHAPING = {"loss", "compare", "out", "fresh", "checkpoint_every", "evaluate_every"}
NOT_SHAPING |= {"text", "cache", "mesh"}

Scalar = Float[Array, ""]
Hidden = Float[Array, "B S H"]
Labels = Int[Array, "B S"]
TokenLoss = Callable[[LMHead, Hidden, Labels, Scalar], Scalar]
ModelLoss = Callable[[nnx.State, Windows, Scalar], Scalar]


class State(NamedTuple):
    """Everything that a step changes."""

    params: nnx.State
    moments: optax.OptState


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m models.train",
        description="Train a small language model with pallas_loss.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    run = parser.add_argument_group("run").add_argument
    run("--loss", choices=LOSSES, default="fused", help="what the head computes")
    run("--compare", action="store_true", help="train every --loss from one seed")
    run("--out", type=Path, default=Path("runs/train"), help="folder for all that is written")
    run("--fresh", action="store_true", help="delete an earlier run in --out")
    run("--checkpoint-every", type=int, default=50, metavar="STEPS", help="save this often")
    run("--evaluate-every", type=int, default=50, metavar="STEPS", help="measure held-out loss")
    run("--mesh", type=mesh_sizes, default={}, metavar="dp=2,tp=4",
        help="devices that split the batch (dp) and the vocabulary (tp)")  # fmt: skip
    run("--seed", type=int, default=0, help="of the parameters and of the order of the text")

    text = parser.add_argument_group("text").add_argument
    text("--text", type=Path, help="folder of text files; None is Python's own sources")
    text("--hold-out-every", type=int, default=40, metavar="FILES", help="one in so many")
    text("--vocab", type=int, default=16384, help="tokens of the tokenizer")
    text("--cache", type=Path, default=Path.home() / ".cache/pallas_loss", help="of tokenizers")

    model = parser.add_argument_group("model").add_argument
    model("--hidden", type=int, default=64, help="width")
    model("--layers", type=int, default=2, help="blocks")
    model("--heads", type=int, default=2, help="attention heads")
    model("--mlp", type=int, default=192, help="width inside the MLP")
    model("--untied", action="store_true", help="give the head its own weight")
    model("--soft-cap", type=float, help="cap of the logits")
    model("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the products")

    step = parser.add_argument_group("step").add_argument
    step("--steps", type=int, default=200, help="updates")
    step("--window", type=int, default=64, help="tokens in a sequence")
    step("--batch", type=int, default=32, help="sequences in a micro-batch")
    step("--accumulate", type=int, default=1, help="micro-batches in a step")
    step("--lr", type=float, default=2e-2, help="peak learning rate")
    step("--warmup", type=int, default=20, metavar="STEPS", help="from near 0 to the peak")
    step("--weight-decay", type=float, default=0.1, help="of matrices")
    args = parser.parse_args(argv)
    if args.batch % args.mesh.get("dp", 1):
        parser.error(f"--batch {args.batch} must divide over dp={args.mesh['dp']}")
    if not 0 <= args.warmup < args.steps:
        parser.error(f"--warmup {args.warmup} must be less than --steps {args.steps}")
    return args


def mesh_sizes(text: str) -> dict[str, int]:
    """``dp=2,tp=4`` as sizes by axis."""
    sizes = {}
    for word in text.split(","):
        name, _, size = word.partition("=")
        if name not in ("dp", "tp") or name in sizes or not size.isdecimal() or int(size) < 1:
            raise argparse.ArgumentTypeError(f"must be like dp=2,tp=4, got {text!r}")
        sizes[name] = int(size)
    return sizes


def make_mesh(sizes: dict[str, int]) -> Mesh:
    """The mesh of these sizes, of one device without any; the CPU is split into fake devices."""
    count = math.prod(sizes.values())
    if count > 1:
        jax.config.update("jax_num_cpu_devices", count)
    if count > len(jax.devices()):
        raise SystemExit(f"--mesh {sizes} needs {count} devices; there are {len(jax.devices())}")
    axes = sizes or {"dp": 1}
    kinds = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(
        tuple(axes.values()), tuple(axes), axis_types=kinds, devices=jax.devices()[:count]
    )


def fused_loss(head: LMHead, hidden: Hidden, labels: Labels, normalizer: Scalar) -> Scalar:
    return head.loss(hidden, labels, ignore_index=IGNORE, normalizer=normalizer)


def naive_loss(head: LMHead, hidden: Hidden, labels: Labels, normalizer: Scalar) -> Scalar:
    counted = labels != IGNORE
    nll = optax.losses.softmax_cross_entropy_with_integer_labels(
        head(hidden), jnp.where(counted, labels, 0)
    )
    return jnp.sum(nll, where=counted) / normalizer


LOSSES: dict[str, TokenLoss] = {"fused": fused_loss, "naive": naive_loss}


def model_loss(
    graph: nnx.GraphDef[Decoder],
    token_loss: TokenLoss,
    params: nnx.State,
    windows: Windows,
    normalizer: Scalar,
) -> Scalar:
    """Summed loss of the windows ``[B, S]``, divided by ``normalizer``."""
    model = nnx.merge(graph, params)
    tokens, segment_ids = jnp.asarray(windows["tokens"]), jnp.asarray(windows["segment_ids"])
    labels = next_token_labels(tokens, segment_ids, IGNORE)
    return token_loss(model.head, model(tokens, segment_ids), labels, normalizer)


def label_count(windows: Windows) -> Scalar:
    """How many tokens have a token to predict; 1 where none has, to divide by."""
    labels = next_token_labels(windows["tokens"], windows["segment_ids"], IGNORE)
    return jnp.maximum(jnp.sum(labels != IGNORE), 1).astype(jnp.float32)


def mean_loss(loss: ModelLoss, params: nnx.State, windows: Windows) -> Scalar:
    """Mean loss over the counted tokens of windows ``[A, B, S]``, in A parts."""
    count = label_count(windows)
    return jax.lax.map(lambda part: loss(params, part, count), windows).sum()


def mean_loss_and_gradient(
    loss: ModelLoss, params: nnx.State, windows: Windows
) -> tuple[Scalar, nnx.State]:
    """:func:`mean_loss` and its gradient, with one micro-batch in memory at a time.

    Micro-batches count different numbers of tokens, so each part is divided by the count of the
    whole batch and the parts are added. A mean of their means would favour tokens in short parts.
    """
    count = label_count(windows)

    def add(total: tuple[Scalar, nnx.State], part: Windows) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(params, part, count)), None

    zero = jnp.zeros((), jnp.float32), jax.tree.map(jnp.zeros_like, params)
    total, _ = jax.lax.scan(add, zero, windows)
    return total


def make_optimizer(args: argparse.Namespace) -> tuple[optax.GradientTransformation, optax.Schedule]:
    schedule = optax.warmup_cosine_decay_schedule(
        args.lr / (args.warmup + 1),
        args.lr,
        args.warmup,
        args.steps,
        0.1 * args.lr,
    )

    def is_matrix(params: nnx.State) -> nnx.State:
        return jax.tree.map(lambda p: p.ndim > 1, params)

    adamw = optax.adamw(schedule, b2=0.95, weight_decay=args.weight_decay, mask=is_matrix)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw), schedule


def train_step(
    loss: ModelLoss, optimizer: optax.GradientTransformation, state: State, windows: Windows
) -> tuple[State, dict[str, Scalar]]:
    """One update from ``accumulate`` micro-batches, windows ``[A, B, S]``."""
    value, gradient = mean_loss_and_gradient(loss, state.params, windows)
    updates, moments = optimizer.update(gradient, state.moments, state.params)
    metrics = {"loss": value, "gradient_norm": optax.tree.norm(gradient)}
    return State(optax.apply_updates(state.params, updates), moments), metrics


def open_run(folder: Path, fresh: bool, wanted: dict[str, Any]) -> None:
    """Makes the folder of a run, or checks that the run in it is the wanted one."""
    if fresh and folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "settings.json"
    if path.exists():
        found = json.loads(path.read_text())
        if differing := [k for k in wanted if found.get(k) != wanted[k]]:
            changes = ", ".join(f"{k}: {found.get(k)} -> {wanted[k]}" for k in differing)
            raise SystemExit(
                f"{folder} holds a run with other settings ({changes}); "
                "pass --fresh to delete it or choose another --out"
            )
    write_whole(path, json.dumps(wanted, indent=2))


def open_metrics(path: Path, step: int) -> TextIO:
    """The metrics file, for appending, without what was recorded after the checkpoint."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    whole = [line for line in lines if line.endswith("\n")]
    write_whole(path, "".join(line for line in whole if json.loads(line)["step"] <= step))
    return path.open("a", buffering=1)


def train(args: argparse.Namespace, kind: str, corpus: Corpus) -> Run:
    """One run with ``--loss kind``, from its last checkpoint or the start to its last step."""
    folder = args.out.absolute() / kind
    shaping = {k: v for k, v in vars(args).items() if k not in NOT_SHAPING}
    open_run(folder, args.fresh, shaping | {"corpus": corpus.fingerprint})

    config = DecoderConfig(
        vocab=args.vocab,
        hidden=args.hidden,
        layers=args.layers,
        heads=args.heads,
        mlp=args.mlp,
        tied=not args.untied,
        logit_soft_cap=args.soft_cap,
        dtype=jnp.dtype(args.dtype),
        vocab_axis="tp" if "tp" in args.mesh else None,
        token_axes=("dp",) if "dp" in args.mesh else (),
    )
    graph, params = nnx.split(Decoder(config, rngs=nnx.Rngs(args.seed)))
    optimizer, learning_rate = make_optimizer(args)
    mesh = jax.sharding.get_mesh()
    replicated = NamedSharding(mesh, P())
    by_sequence = NamedSharding(mesh, P(None, "dp" if "dp" in args.mesh else None))
    # The moments of a parameter are where it is; what Flax has not sharded is on every device.
    state = State(params, optimizer.init(params))
    state = jax.tree.map(
        lambda v: v if isinstance(v.sharding, NamedSharding) else jax.device_put(v, replicated),
        state,
    )
    loss = partial(model_loss, graph, LOSSES[kind])

    windows = pack(corpus.train, args.window)
    batches = training_batches(windows, args.batch, args.accumulate, args.seed)
    held_out = jax.tree.map(
        lambda rows: rows.reshape(-1, args.batch, args.window),
        pack(corpus.held_out, args.window, multiple_of=args.batch),
    )
    held_out = jax.device_put(held_out, by_sequence)
    evaluate = jax.jit(partial(mean_loss, loss))

    shape = (args.accumulate, args.batch, args.window)
    batch = jax.tree.map(
        lambda rows: jax.ShapeDtypeStruct(shape, rows.dtype, sharding=by_sequence), windows
    )
    update = jax.jit(
        partial(train_step, loss, optimizer),
        donate_argnums=0,
        out_shardings=(jax.tree.map(lambda v: v.sharding, state), None),
    )
    compiled = update.lower(state, batch).compile()

    progress = tqdm(total=args.steps * math.prod(shape), unit="tok", unit_scale=True, desc=kind)
    keep_last = ocp.CheckpointManagerOptions(max_to_keep=1)
    with ocp.CheckpointManager(folder / "checkpoints", options=keep_last) as checkpoints:
        done = checkpoints.latest_step() or 0
        if done:
            state = checkpoints.restore(
                done,
                args=ocp.args.Composite(
                    state=ocp.args.StandardRestore(state),
                    batches=grain.checkpoint.CheckpointRestore(batches),
                ),
            )["state"]
        progress.update(done * math.prod(shape))
        with open_metrics(folder / "metrics.jsonl", done) as metrics, progress:
            for step in range(done + 1, args.steps + 1):
                last = step == args.steps
                start = time.perf_counter()
                state, values = compiled(state, jax.device_put(next(batches), by_sequence))
                record = {"step": step} | {k: float(v) for k, v in values.items()}
                record["learning_rate"] = float(learning_rate(step - 1))
                record["tokens_per_second"] = math.prod(shape) / (time.perf_counter() - start)
                if last or step % args.evaluate_every == 0:
                    record["held_out_loss"] = float(evaluate(state.params, held_out))
                print(json.dumps(record), file=metrics)
                progress.update(math.prod(shape))
                progress.set_postfix(loss=f"{record['loss']:.3f}")
                if last or step % args.checkpoint_every == 0:
                    checkpoints.save(
                        step,
                        args=ocp.args.Composite(
                            state=ocp.args.StandardSave(state),
                            batches=grain.checkpoint.CheckpointSave(batches),
                        ),
                    )
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return Run(kind, records, compiled.memory_analysis().temp_size_in_bytes)


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    corpus = load_corpus(args.text, args.vocab, args.hold_out_every, args.cache)
    train_tokens, held_out_tokens = (sum(map(len, d)) for d in (corpus.train, corpus.held_out))
    print(f"{train_tokens:,} tokens to train on, {held_out_tokens:,} held out", flush=True)
    kinds = list(LOSSES) if args.compare else [args.loss]
    with jax.set_mesh(make_mesh(args.mesh)):
        runs = [train(args, kind, corpus) for kind in kinds]
    entropy = corpus.unigram_entropy()
    print(table(runs, entropy))
    plot(runs, entropy, args.out / "loss.png")
    print(f"metrics: {args.out}/*/metrics.jsonl, plot: {args.out}/loss.png")


if __name__ == "__main__":
    main()
