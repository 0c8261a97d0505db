"""The reinforcement-learning example: its task, sampler and objective, and a run at tiny size."""

import json
from functools import partial
from itertools import islice

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import rl
from models.data import read_texts, train_tokenizer
from models.decoder import Decoder, DecoderConfig
from pallas_loss import LogProbs

pytestmark = pytest.mark.standard_promotion

PROMPT, COMPLETION, VOCAB = 5, 6, 50
# Two prompts, one of them padded, twice each.
TOKENS = jnp.array([[7, 8, 9, 10, 11]] * 2 + [[0, 0, 3, 4, 5]] * 2)
SEGMENT_IDS = jnp.array([[1, 1, 1, 1, 1]] * 2 + [[0, 0, 1, 1, 1]] * 2)


def settings(*extra):
    sizes = f"--prompt {PROMPT} --completion {COMPLETION} --temperature 0.7"
    return rl.arguments([*sizes.split(), *extra])


# --- the task ---


@pytest.fixture(scope="module")
def texts():
    return [source[:20_000] for source in read_texts(None)[:12]]


def test_a_line_is_rewarded_if_it_ends_and_parses():
    for prompt, completion, right in [
        ("f(", "x)\n", 1),
        ("f(", "x)\n\n    ", 1),
        ("f(", "x)", 0),
        ("f(", "x\n)", 0),
        ("x = '", "\\d'\n", 1),
        ("x = ", "\0\n", 0),
        ("if x", ":\n", 0),
    ]:
        assert rl.reward(prompt, completion) == right, (prompt, completion)


@pytest.mark.filterwarnings("error")
def test_prompts_begin_lines_that_parse_and_do_not_parse_themselves(texts):
    tokenizer = train_tokenizer(texts, 400)
    prompts = list(islice(rl.make_prompts(texts, tokenizer, PROMPT, seed=0), 40))
    lines = {line.strip() for text in texts for line in text.splitlines()}
    for tokens, segment_ids in prompts:
        size = segment_ids.sum()
        assert 2 <= size <= PROMPT
        np.testing.assert_array_equal(segment_ids, np.arange(PROMPT) >= PROMPT - size)
        text = tokenizer.decode(tokens[PROMPT - size :].tolist())
        assert text.startswith("\n")
        assert not rl.parses(text)
        assert any(line.startswith(text[1:]) and rl.parses(line) for line in lines)
    again = list(islice(rl.make_prompts(texts, tokenizer, PROMPT, seed=0), 40))
    jax.tree.map(np.testing.assert_array_equal, prompts, again)


def test_a_rollout_reads_as_prompt_and_completion(texts):
    tokenizer = train_tokenizer(texts, 400)
    prompt, rest = tokenizer.encode("\nself.x = (").ids, tokenizer.encode("é)\n").ids
    tokens = np.array([0, 0, *prompt, *rest, 1, 2])
    sampled = np.zeros(len(tokens) - 1, bool)
    sampled[len(prompt) + 1 : len(prompt) + 1 + len(rest)] = True
    segment_ids = (np.arange(len(tokens)) > 1).astype(np.int32)
    rollout = rl.Rollout(*(a[None] for a in (tokens, segment_ids, sampled, sampled * 1.0)))
    assert rl.completed_lines(tokenizer, rollout) == [("self.x = (", "é)\n")]


# --- the sampler ---


@pytest.fixture(scope="module")
def sampled():
    """An untrained policy, its settings and a rollout; every fourth token ends a line."""
    model = Decoder(DecoderConfig(VOCAB, 16, 1, 2, 32, logit_soft_cap=5.0), rngs=nnx.Rngs(0))
    args, ends = settings(), jnp.arange(VOCAB) % 4 == 0
    rollout = jax.jit(partial(rl.sample, args, ends, model))(TOKENS, SEGMENT_IDS, jax.random.key(1))
    return model, args, rollout


def test_the_policy_chooses_up_to_the_end_of_the_line(sampled):
    _, _, rollout = sampled
    assert rollout.tokens.shape == (4, PROMPT + COMPLETION)
    np.testing.assert_array_equal(rollout.tokens[:, :PROMPT], TOKENS)
    np.testing.assert_array_equal(rollout.segment_ids[:, :PROMPT], SEGMENT_IDS)
    assert jnp.all(rollout.segment_ids[:, PROMPT:] == 1)
    assert not jnp.any(rollout.sampled[:, : PROMPT - 1])
    chosen = np.asarray(rollout.tokens[:, PROMPT:])
    for tokens, mask in zip(chosen, np.asarray(rollout.sampled[:, PROMPT - 1 :]), strict=True):
        end = np.flatnonzero(tokens % 4 == 0)
        length = end[0] + 1 if end.size else COMPLETION
        np.testing.assert_array_equal(mask, np.arange(COMPLETION) < length)
    assert len({tuple(row) for row in chosen.tolist()}) == 4, "one sample for all"


def evaluate(model, args, rollout, **options):
    hidden = model(rollout.tokens, rollout.segment_ids)
    return rl.logprobs(model.head, hidden, rollout, temperature=args.temperature, **options)


def test_the_ratio_is_one_before_the_first_update(sampled):
    """The sampler's log-probabilities are those that the update computes again, at temperature."""
    model, args, rollout = sampled
    out = evaluate(model, args, rollout, entropy=True)
    np.testing.assert_allclose(out.logprob, rollout.logprob, atol=5e-6)
    assert jnp.all((rollout.logprob < 0) == rollout.sampled)
    assert not np.allclose(evaluate(model, settings("--temperature", "1"), rollout)[0], out[0])

    logits = model.head(model(rollout.tokens, rollout.segment_ids)[:, :-1])
    log_p = jax.nn.log_softmax(logits / args.temperature)
    entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
    np.testing.assert_allclose(out.entropy, jnp.where(rollout.sampled, entropy, 0), atol=5e-6)

    batch = rl.Batch(rollout, jnp.ones(4), out.logprob)
    _, metrics = rl.objective(out, batch, args)
    assert metrics["ratio_error"] < 1e-5
    assert metrics["clipped"] == 0
    assert metrics["kl"] == 0


def test_prompts_and_padding_have_no_gradient(sampled):
    model, args, rollout = sampled
    batch = rl.Batch(rollout, jnp.array([1.0, -1.0, 2.0, -2.0]), rollout.logprob - 0.1)

    def loss(hidden):
        options = {"temperature": args.temperature, "entropy": True}
        return rl.objective(rl.logprobs(model.head, hidden, rollout, **options), batch, args)[0]

    gradient = jax.grad(loss)(model(rollout.tokens, rollout.segment_ids))
    touched = jnp.any(gradient != 0, axis=-1)
    np.testing.assert_array_equal(touched[:, :-1], rollout.sampled)
    assert not jnp.any(touched[:, -1])


# --- the objective ---


def test_advantages_sum_to_zero_in_every_group():
    rewards = np.random.default_rng(0).integers(0, 2, (6, 8)).astype(np.float32)
    rewards[0], rewards[1] = 0, 1
    advantage = rl.advantages(rewards)
    np.testing.assert_allclose(advantage.sum(1), np.zeros(6), atol=1e-5)
    np.testing.assert_array_equal(advantage[:2], np.zeros((2, 8)))
    np.testing.assert_allclose(advantage[2:].std(1), np.ones(4), rtol=1e-5)
    assert np.all((advantage[2:] > 0) == (rewards[2:] == 1))


def test_the_objective_is_its_formula():
    """Two sequences of two sampled tokens and one that is not; a clipped ratio has no gradient."""
    sampled = jnp.array([[True, True, False]] * 2)
    old = jnp.array([[-1.0, -2.0, 0.0], [-1.5, -0.5, 0.0]])
    new = old + jnp.array([[0.1, 0.3, 0.0], [-0.1, -0.3, 0.0]])
    reference = old - jnp.array([[0.0, 0.2, 0.0], [0.4, 0.0, 0.0]])
    entropy = jnp.array([[1.0, 2.0, 0.0], [0.5, 1.5, 0.0]])
    advantage = jnp.array([2.0, -1.0])
    args = settings("--kl", "0.5", "--entropy", "0.25", "--clip", "0.2")
    batch = rl.Batch(rl.Rollout(None, None, sampled, old), advantage, reference)

    def loss(logprob, entropy, args=args):
        return rl.objective(LogProbs(logprob, entropy, None), batch, args)

    gains = [2 * np.exp(0.1), 2 * 1.2, -np.exp(-0.1), -0.8]
    d = np.array([-0.1, -0.5, -0.3, 0.3])
    divergence = np.mean(np.exp(d) - d - 1)
    value, metrics = loss(new, entropy)
    np.testing.assert_allclose(value, -np.mean(gains) + 0.5 * divergence - 0.25 * 1.25, rtol=1e-5)
    np.testing.assert_allclose(metrics["kl"], divergence, rtol=1e-5)
    assert metrics["entropy"] == 1.25
    assert metrics["clipped"] == 0.5
    np.testing.assert_allclose(metrics["ratio_error"], np.exp(0.3) - 1, rtol=1e-5)

    no_kl = settings("--kl", "0", "--entropy", "0.25")
    gradient = jax.grad(lambda *a: loss(*a, no_kl)[0], (0, 1))(new, entropy)
    expected = [[-2 * np.exp(0.1) / 4, 0, 0], [np.exp(-0.1) / 4, 0, 0]]
    np.testing.assert_allclose(gradient[0], expected, atol=1e-6)
    np.testing.assert_allclose(gradient[1], jnp.where(sampled, -0.25 / 4, 0), atol=1e-7)


# --- the script ---

WARMUP = "--vocab 300 --hidden 32 --layers 1 --heads 2 --mlp 64 --window 32 --batch 16 --steps 100"
WARMUP += " --warmup 5 --hold-out-every 4"
RUN = "--groups 8 --group-size 8 --prompt 6 --completion 6 --steps 30 --lr 3e-3"


def run(folder, out, *extra):
    paths = ["--text", folder / "text", "--cache", folder / "cache", "--out", out]
    rl.main([*RUN.split(), *map(str, paths), "--warmup", WARMUP, *extra])
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(texts, tmp_path_factory):
    """The folder and the records of a finished run."""
    folder = tmp_path_factory.mktemp("rl")
    (folder / "text").mkdir()
    for i, text in enumerate(texts):
        (folder / "text" / f"{i:02}.py").write_text(text)
    return folder, run(folder, folder / "run")


@pytest.mark.slow
def test_reward_rises(finished):
    folder, records = finished
    assert [r["step"] for r in records] == list(range(1, 31))
    first, last = (np.mean([r["reward"] for r in part]) for part in (records[:5], records[-5:]))
    assert last > first + 0.1
    assert (folder / "run" / "rl.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_every_step_starts_from_the_policy_that_sampled(finished):
    _, records = finished
    assert max(r["ratio_error"] for r in records) < 1e-4
    assert records[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert records[-1]["kl"] > 1e-3
    assert any(r["clipped"] > 0 for r in records)
    assert all(0 <= r["entropy"] <= np.log(300) for r in records)
    assert all(1 <= r["tokens"] <= 6 for r in records)


@pytest.mark.slow
def test_a_run_of_the_training_script_is_a_start(finished, capsys):
    folder, records = finished
    checkpoint = folder / "run" / "warmup" / "fused"
    again = run(folder, folder / "again", "--checkpoint", str(checkpoint), "--steps", "2")
    assert "in the last" in capsys.readouterr().out
    assert not (folder / "again" / "warmup").exists()
    for a, b in zip(again, records, strict=False):
        assert [v for k, v in a.items() if k != "seconds"] == pytest.approx(
            [v for k, v in b.items() if k != "seconds"], rel=1e-5, abs=1e-6
        )
