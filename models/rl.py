"""Teaches the small language model to finish lines of Python: ``python -m models.rl --help``.

GRPO (arXiv:2402.03300) from end to end, in minutes on two CPU cores. A prompt is the beginning of a
line of the text, cut where it does not parse; the policy writes the rest; the reward is 1 if the
line then parses. No term asks for sense, but two hold the policy back from the shortest answer: its
divergence from where it began and an entropy bonus. It begins with a short run of ``models.train``.
"""

import argparse
import ast
import json
import time
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int
from matplotlib.figure import Figure
from tokenizers import Tokenizer
from tqdm import tqdm

from models import train
from models.data import read_texts
from models.decoder import Decoder, DecoderConfig
from pallas_loss import LogProbs
from pallas_loss.nnx import LMHead

WARMUP = "--vocab 2048 --hidden 128 --heads 4 --mlp 384 --steps 300 --lr 1e-2"

Hidden = Float[Array, "B S H"]
PerToken = Float[Array, "B S-1"]
Metrics = dict[str, Array]


class Rollout(NamedTuple):
    """B sequences of S tokens: padding, prompt, completion; position i predicts token i + 1."""

    tokens: Int[Array, "B S"]
    segment_ids: Int[Array, "B S"]  # 0 for the padding, then 1
    sampled: Bool[Array, "B S-1"]  # predictions whose token the policy chose
    logprob: PerToken  # of that token, by the sampler; elsewhere 0


class Batch(NamedTuple):
    """What an update learns from."""

    rollout: Rollout
    advantage: Float[Array, " B"]
    reference: PerToken  # log-probabilities under the policy as it was before any update


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m models.rl",
        description="Teach a small language model to finish lines of Python, by GRPO.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    run = parser.add_argument_group("run").add_argument
    run("--out", type=Path, default=Path("runs/rl"), help="folder for all that is written")
    run("--fresh", action="store_true", help="do not reuse an earlier warm-up in --out")
    run("--checkpoint", type=Path, help="a run of models.train to start from: runs/train/fused")
    run("--warmup", default=WARMUP, help="arguments of models.train, if there is no checkpoint")
    run("--text", type=Path, help="folder of Python files; None is Python's own sources")
    run("--cache", type=Path, default=Path.home() / ".cache/pallas_loss", help="of tokenizers")
    run("--seed", type=int, default=0, help="of the prompts and the samples")
    rollout = parser.add_argument_group("rollout").add_argument
    rollout("--groups", type=int, default=24, help="prompts")
    rollout("--group-size", type=int, default=8, help="completions of a prompt")
    rollout("--prompt", type=int, default=12, metavar="TOKENS", help="longest prompt")
    rollout("--completion", type=int, default=16, metavar="TOKENS", help="longest completion")
    rollout("--temperature", type=float, default=0.9, help="of the policy, sampled and trained")
    step = parser.add_argument_group("step").add_argument
    step("--steps", type=int, default=80, help="rollouts")
    step("--epochs", type=int, default=2, help="updates from a rollout")
    step("--lr", type=float, default=5e-4, help="learning rate")
    step("--clip", type=float, default=0.2, help="how far from 1 a ratio is still rewarded")
    step("--kl", type=float, default=0.05, help="weight of the divergence from the reference")
    step("--entropy", type=float, default=0.01, help="weight of the entropy bonus")
    return parser.parse_args(argv)


def parses(text: str) -> bool:
    """Whether the text is Python."""
    try:
        with warnings.catch_warnings(action="ignore"):
            ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True


def make_prompts(
    texts: Sequence[str], tokenizer: Tokenizer, length: int, seed: int
) -> Iterator[tuple[Int[np.ndarray, " P"], Int[np.ndarray, " P"]]]:
    """Beginnings of lines that parse, cut where they do not; tokens and segment ids, endless."""
    lines = [line.strip() for text in texts for line in text.splitlines()]
    rng = np.random.default_rng(seed)
    while True:
        line = lines[rng.integers(len(lines))]
        tokens = tokenizer.encode("\n" + line).ids
        if len(tokens) < 4 or not parses(line):
            continue
        size = int(rng.integers(2, min(length, len(tokens) - 1) + 1))
        text = tokenizer.decode(tokens[:size])
        if "\ufffd" not in text and not parses(text):  # that would be half a character
            padded = np.pad(tokens[:size], (length - size, 0)).astype(np.int32)
            yield padded, (np.arange(length) >= length - size).astype(np.int32)


def completed_lines(tokenizer: Tokenizer, rollout: Rollout) -> list[tuple[str, str]]:
    """Prompt and completion of each sequence, as text."""
    lines = []
    for tokens, ids, sampled in zip(*map(np.asarray, rollout[:3]), strict=True):
        first = np.argmax(sampled) + 1
        prompt = tokens[:first][ids[:first] == 1].tolist()
        text, completion = tokenizer.decode(prompt), tokens[first : first + sampled.sum()].tolist()
        lines.append((text.strip("\n"), tokenizer.decode(prompt + completion)[len(text) :]))
    return lines


def reward(prompt: str, completion: str) -> float:
    """1 for a line that ends and parses, else 0."""
    rest, newline, _ = completion.partition("\n")
    return float(bool(newline) and parses(prompt + rest))


def load_policy(folder: Path) -> tuple[nnx.GraphDef[Decoder], nnx.State, str]:
    """The last checkpoint of a run of ``models.train``, and the fingerprint of its tokenizer."""
    settings = argparse.Namespace(**json.loads((folder / "settings.json").read_text()))
    config = DecoderConfig(
        **{n: getattr(settings, n) for n in ("vocab", "hidden", "layers", "heads", "mlp")},
        tied=not settings.untied,
        logit_soft_cap=settings.soft_cap,
        dtype=jnp.dtype(settings.dtype),
    )
    graph, params = nnx.split(Decoder(config, rngs=nnx.Rngs(0)))
    state = train.State(params, train.make_optimizer(settings)[0].init(params))
    with ocp.CheckpointManager(folder.absolute() / "checkpoints") as checkpoints:
        wanted = ocp.args.Composite(state=ocp.args.StandardRestore(state))
        state = checkpoints.restore(checkpoints.latest_step(), args=wanted)["state"]
    return graph, state.params, settings.corpus


def sample(
    args: argparse.Namespace, ends: Array, model: Decoder, prompt: Array, ids: Array, key: Array
) -> Rollout:
    """Continues the prompts ``[B, P]``, segment ids ``ids``, up to the first of ``ends [V]``."""
    before, after = ((0, 0), (prompt.shape[1] - 1, 0)), ((0, 0), (0, args.completion))
    segment_ids = jnp.pad(ids, after, constant_values=1)

    def one_token(carry: tuple[Array, Array], i: Array) -> tuple[Any, Any]:
        tokens, going = carry
        # Position i does not see what follows it, so that need not have been sampled yet.
        logits = model.head(model(tokens, segment_ids)[:, i])
        log_p = jax.nn.log_softmax(logits / args.temperature)
        token = jax.random.categorical(jax.random.fold_in(key, i), log_p)
        logprob = jnp.take_along_axis(log_p, token[:, None], axis=1)[:, 0]
        carry = tokens.at[:, i + 1].set(token), going & ~ends[token]
        return carry, (going, jnp.where(going, logprob, 0.0))

    start = jnp.pad(prompt, after), jnp.ones(len(prompt), bool)
    positions = prompt.shape[1] - 1 + jnp.arange(args.completion)
    (tokens, _), (sampled, logprob) = jax.lax.scan(one_token, start, positions)
    return Rollout(tokens, segment_ids, jnp.pad(sampled.T, before), jnp.pad(logprob.T, before))


def logprobs(head: LMHead, hidden: Hidden, rollout: Rollout, **options: Any) -> LogProbs:
    """Of the tokens that the policy chose; 0, without a gradient, for prompts and padding."""
    return head.logprob(hidden[:, :-1], rollout.tokens[:, 1:], where=rollout.sampled, **options)


def advantages(rewards: Float[np.ndarray, "P G"]) -> Float[np.ndarray, "P G"]:
    """How much better than its group each completion did, in the group's standard deviations."""
    return (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, keepdims=True) + 1e-6)


def objective(out: LogProbs, batch: Batch, args: argparse.Namespace) -> tuple[Array, Metrics]:
    """What an update lowers, a mean over the sampled tokens, and what there is to report.

    With the ratio ``r = exp(logprob - logprob at sampling)`` and ``d = reference - logprob``::

        -min(r A, clip(r, 1 - c, 1 + c) A) + kl (exp(d) - d - 1) - entropy H

    The second term estimates KL(policy || reference), at the first update without bias.
    """
    mean = partial(jnp.mean, where=batch.rollout.sampled)
    ratio = jnp.exp(out.logprob - batch.rollout.logprob)
    clipped = jnp.clip(ratio, 1 - args.clip, 1 + args.clip)
    advantage = batch.advantage[:, None]
    d = batch.reference - out.logprob
    divergence = jnp.expm1(d) - d
    loss = mean(-jnp.minimum(ratio * advantage, clipped * advantage))
    loss += args.kl * mean(divergence) - args.entropy * mean(out.entropy)
    return loss, {
        "loss": loss,
        "entropy": mean(out.entropy),
        "kl": mean(divergence),
        "clipped": mean(ratio != clipped),
        "ratio_error": jnp.max(jnp.abs(ratio - 1)),  # the ratio of all other tokens is 1
    }


def learn(args: argparse.Namespace, folder: Path) -> list[dict[str, float]]:
    """All steps, from the policy in ``folder`` and held near it; one record a step."""
    graph, reference, corpus = load_policy(folder)
    tokenizer = Tokenizer.from_file(str(args.cache / f"bpe-{corpus}.json"))
    ends = jnp.array(["\n" in tokenizer.decode([i]) for i in range(tokenizer.get_vocab_size())])
    prompts = make_prompts(read_texts(args.text), tokenizer, args.prompt, args.seed)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(args.lr))
    state = train.State(reference, optimizer.init(reference))

    def policy_logprobs(params: nnx.State, rollout: Rollout, **options: Any) -> LogProbs:
        model = nnx.merge(graph, params)
        hidden = model(rollout.tokens, rollout.segment_ids)
        return logprobs(model.head, hidden, rollout, temperature=args.temperature, **options)

    @jax.jit
    def roll_out(params: Any, reference: Any, *inputs: Any) -> tuple[Rollout, PerToken]:
        rollout = sample(args, ends, nnx.merge(graph, params), *inputs)
        return rollout, policy_logprobs(reference, rollout).logprob

    def loss(params: nnx.State, batch: Batch) -> tuple[Array, Metrics]:
        return objective(policy_logprobs(params, batch.rollout, entropy=True), batch, args)

    @jax.jit
    def update(state: train.State, batch: Batch) -> tuple[train.State, Metrics]:
        gradient, metrics = jax.grad(loss, has_aux=True)(state.params, batch)
        updates, moments = optimizer.update(gradient, state.moments, state.params)
        return train.State(optax.apply_updates(state.params, updates), moments), metrics

    records = []
    with (args.out / "metrics.jsonl").open("w", buffering=1) as file:
        for step in (progress := tqdm(range(1, args.steps + 1), desc="rl")):
            start = time.perf_counter()
            group = zip(*(next(prompts) for _ in range(args.groups)), strict=True)
            prompt, ids = (np.repeat(np.stack(rows), args.group_size, axis=0) for rows in group)
            key = jax.random.fold_in(jax.random.key(args.seed), step)
            rollout, reference_logprob = roll_out(state.params, reference, prompt, ids, key)
            lines = completed_lines(tokenizer, rollout)
            rewards = np.array([reward(*line) for line in lines], np.float32)
            advantage = jnp.asarray(advantages(rewards.reshape(args.groups, -1)).reshape(-1))
            updates = []
            for _ in range(args.epochs):
                state, metrics = update(state, Batch(rollout, advantage, reference_logprob))
                updates.append(metrics)
            values = {"reward": rewards.mean(), "tokens": rollout.sampled.sum() / len(lines)}
            # The first update sees the policy that sampled; only the later ones can clip.
            values |= updates[0] | {"clipped": updates[-1]["clipped"]}
            values["seconds"] = time.perf_counter() - start
            records.append({"step": step} | {name: float(v) for name, v in values.items()})
            print(json.dumps(records[-1]), file=file)
            progress.set_postfix(reward=f"{rewards.mean():.2f}")
    for line in lines[:: args.group_size]:
        print(f"{reward(*line):.0f}  {line[0]} -> {line[1]!r}")
    return records


def plot(records: Sequence[dict[str, float]], path: Path) -> None:
    """Reward, entropy and divergence by step, as an image."""
    figure = Figure(figsize=(8, 7), layout="constrained")
    labels = {"reward": "lines that parse", "entropy": "entropy, nats", "kl": "KL to reference"}
    steps = [r["step"] for r in records]
    for axes, (name, label) in zip(figure.subplots(3, sharex=True), labels.items(), strict=True):
        values = [r[name] for r in records]
        axes.plot(steps, values, color="C0", alpha=0.3)
        axes.plot(steps, [fmean(values[max(0, i - 9) : i + 1]) for i in range(len(values))], "C0")
        axes.set(ylabel=label)
    axes.set(xlabel="step; the full line is the mean of ten")
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    if (folder := args.checkpoint) is None:
        folder = args.out / "warmup" / "fused"
        paths = ["--out", str(folder.parent), "--cache", str(args.cache)]
        paths += ["--text", str(args.text)] if args.text else []
        train.main([*args.warmup.split(), *paths, *["--fresh"] * args.fresh])
    records = learn(args, folder)
    plot(records, args.out / "rl.png")
    for name in ("reward", "entropy", "kl"):
        first, last = (fmean(r[name] for r in part) for part in (records[:10], records[-10:]))
        print(f"{name}: {first:.3f} in the first ten steps, {last:.3f} in the last")
    print(f"metrics: {args.out}/metrics.jsonl, plot: {args.out}/rl.png")


if __name__ == "__main__":
    main()
