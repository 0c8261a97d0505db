"""The example model: its data, its decoder, and a training run from end to end at tiny size."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import train as script
from models.data import Corpus, load_corpus, pack, read_texts, training_batches
from models.decoder import Decoder, DecoderConfig, rotary

pytestmark = pytest.mark.standard_promotion

ROOT = Path(__file__).resolve().parent.parent
TINY = DecoderConfig(vocab=50, hidden=16, layers=1, heads=2, mlp=32)


# --- data ---


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder of real text, small enough to train on in seconds."""
    folder = tmp_path_factory.mktemp("text")
    for i, source in enumerate(read_texts(None)[:12]):
        (folder / f"{i:02}.txt").write_text(source[:20_000])
    return folder


def test_the_default_text_is_large_and_without_tests():
    texts = read_texts(None)
    assert sum(map(len, texts)) > 5_000_000
    assert not any("class TestCase(unittest" in text for text in texts[:50])


def test_folder_is_read_in_order_and_skips_what_is_no_text(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "2.md").write_text("two")
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "c.bin").write_bytes(b"\xff\xfe\x00")
    assert read_texts(tmp_path) == ["one", "two"]
    (tmp_path / "a.txt").unlink()
    with pytest.raises(ValueError, match="two text files"):
        read_texts(tmp_path)


def test_corpus_holds_out_whole_files_and_caches_the_tokenizer(text, tmp_path, monkeypatch):
    corpus = load_corpus(text, 300, 4, tmp_path)
    assert (len(corpus.train), len(corpus.held_out)) == (9, 3)
    assert max(d.max() for d in corpus.train + corpus.held_out) < 300

    monkeypatch.setattr("models.data.train_tokenizer", None)
    again = load_corpus(text, 300, 4, tmp_path)
    assert again.fingerprint == corpus.fingerprint
    jax.tree.map(np.testing.assert_array_equal, again.train, corpus.train)


@pytest.mark.parametrize(("vocab", "every", "name"), [(255, 4, "vocab"), (300, 1, "hold_out")])
def test_impossible_corpus_raises(text, tmp_path, vocab, every, name):
    with pytest.raises(ValueError, match=name):
        load_corpus(text, vocab, every, tmp_path)


def test_unigram_entropy_is_that_of_the_held_out_counts():
    documents = [np.array([0, 0]), np.array([3, 5])]
    expected = 0.5 * np.log(2) + 0.5 * np.log(4)
    assert Corpus([], documents, "").unigram_entropy() == pytest.approx(expected)


def test_padding_and_borders_ask_for_nothing():
    windows = pack([np.array([1, 2, 3]), np.array([4, 5, 6, 7])], window=4, multiple_of=3)
    assert windows["tokens"].tolist() == [[1, 2, 3, 4], [5, 6, 7, 0], [0, 0, 0, 0]]
    labels = script.next_token_labels(windows["tokens"], windows["segment_ids"])
    assert labels.tolist() == [[2, 3, -100, -100], [6, 7, -100, -100], [-100] * 4]


def test_batches_resume_where_they_were_saved():
    windows = pack([np.arange(64)], window=4)
    batches = training_batches(windows, batch=2, accumulate=3, seed=0)
    first = next(batches)
    assert first["tokens"].shape == (3, 2, 4)
    state = batches.get_state()
    # Past the end of the text, so a second epoch is among them.
    expected = [next(batches)["tokens"] for _ in range(4)]

    resumed = training_batches(windows, batch=2, accumulate=3, seed=0)
    resumed.set_state(state)
    np.testing.assert_array_equal([next(resumed)["tokens"] for _ in range(4)], expected)


# --- decoder ---


def test_a_token_sees_its_past_within_its_document():
    model = nnx.jit(Decoder(TINY, rngs=nnx.Rngs(0)))
    tokens = jnp.arange(8)[None]
    segment_ids = jnp.array([[0, 0, 0, 0, 1, 1, 1, 1]])
    hidden = model(tokens, segment_ids)[0]

    changed = model(tokens.at[0, 2].set(40), segment_ids)[0]
    moved = jnp.any(hidden != changed, axis=-1)
    assert moved.tolist() == [False, False, True, True, False, False, False, False]
    np.testing.assert_allclose(model(tokens[:, 4:])[0], hidden[4:], atol=1e-5)


def test_rotary_scores_depend_on_distance_alone():
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 8))
    q, k = (rotary(jnp.broadcast_to(a, (1, 6, 1, 8)), 10_000.0)[0, :, 0] for a in (q, k))
    scores = q @ k.T
    for distance in range(5):
        diagonal = jnp.diagonal(scores, -distance)
        np.testing.assert_allclose(diagonal, jnp.full_like(diagonal, diagonal[0]), atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_tying_saves_one_table(tied):
    config = replace(TINY, tied=tied)
    params = nnx.state(Decoder(config, rngs=nnx.Rngs(0)))
    assert sum(p.size == 50 * 16 for p in jax.tree.leaves(params)) == (1 if tied else 2)


def test_bfloat16_computes_from_float32_parameters():
    model = Decoder(replace(TINY, dtype=jnp.bfloat16), rngs=nnx.Rngs(0))
    tokens = jnp.arange(8)[None]

    def loss(model):
        hidden = model(tokens)
        assert hidden.dtype == jnp.bfloat16
        return model.head.loss(hidden, tokens)

    gradient = nnx.jit(nnx.grad(loss))(model)
    assert {g.dtype for g in jax.tree.leaves(gradient)} == {jnp.dtype(jnp.float32)}


def test_heads_that_do_not_divide_raise():
    with pytest.raises(ValueError, match="hidden=16"):
        replace(TINY, heads=3)


# --- accumulation ---


@pytest.mark.parametrize("kind", script.LOSSES)
def test_micro_batches_of_unequal_counts_equal_one_batch(kind):
    """Micro-batches with 14, 3 and 0 counted tokens; a mean of means is far from their mean."""
    graph, params = nnx.split(Decoder(TINY, rngs=nnx.Rngs(0)))
    loss = partial(script.model_loss, graph, script.LOSSES[kind])
    tokens = jax.random.randint(jax.random.key(1), (3, 2, 8), 0, 50)
    alone = jnp.arange(8)
    mostly_alone = alone.at[:4].set(0)
    segment_ids = jnp.array([[alone * 0, alone * 0], [mostly_alone, alone], [alone, alone]])
    parts = {"tokens": tokens, "segment_ids": segment_ids}
    whole = jax.tree.map(lambda rows: rows.reshape(1, 6, 8), parts)

    value, gradient = script.mean_loss_and_gradient(loss, params, parts)
    expected, expected_gradient = script.mean_loss_and_gradient(loss, params, whole)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(script.mean_loss(loss, params, parts), expected, rtol=1e-6)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6), gradient, expected_gradient)

    one_by_one = [jax.tree.map(lambda rows, i=i: rows[i : i + 1], parts) for i in range(2)]
    mean_of_means = np.mean([script.mean_loss(loss, params, part) for part in one_by_one])
    assert abs(mean_of_means - expected) > 1e-3


# --- the script ---


def arguments(text, out, *extra):
    sizes = "--vocab 300 --hidden 32 --layers 1 --heads 2 --mlp 64 --window 32 --batch 4"
    run = "--accumulate 2 --steps 120 --warmup 5 --checkpoint-every 30 --evaluate-every 60"
    paths = ["--text", str(text), "--cache", str(out.parent / "cache"), "--out", str(out)]
    return [*sizes.split(), *run.split(), "--hold-out-every", "4", *paths, *extra]


def curve(folder):
    """All that a run recorded but its speed."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in r.items() if k != "tokens_per_second"} for r in records]


@pytest.fixture(scope="module")
def compared(text, tmp_path_factory):
    """A finished ``--compare``."""
    out = tmp_path_factory.mktemp("compared") / "run"
    script.main(arguments(text, out, "--compare"))
    return out


@pytest.mark.slow
def test_training_learns_more_than_unigrams(compared, text):
    records = curve(compared / "fused")
    assert [r["step"] for r in records] == list(range(1, 121))
    corpus = load_corpus(text, 300, 4, compared.parent / "cache")
    assert records[-1]["loss"] < records[0]["loss"] - 2
    assert records[-1]["held_out_loss"] < corpus.unigram_entropy() - 0.3
    assert (compared / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_fused_and_naive_follow_one_curve(compared):
    fused, naive = curve(compared / "fused"), curve(compared / "naive")
    for a, b in zip(fused, naive, strict=True):
        assert a.keys() == b.keys()
        np.testing.assert_allclose(list(a.values()), list(b.values()), rtol=1e-4)


@pytest.mark.slow
def test_a_killed_run_continues_on_the_same_curve(compared, text, tmp_path):
    command = [sys.executable, "-m", "models.train", *arguments(text, tmp_path / "run")]
    env = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir)}
    folder = tmp_path / "run" / "fused"

    process = subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.DEVNULL)
    while not (folder / "checkpoints" / "30").exists():
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    killed = curve(folder)
    assert 30 <= len(killed) < 120

    output = subprocess.run(command, cwd=ROOT, env=env, check=True, capture_output=True, text=True)
    assert curve(folder) == curve(compared / "fused")
    assert curve(folder)[: len(killed)] == killed
    assert "held-out loss" in output.stdout


@pytest.mark.slow
def test_a_finished_run_is_reported_again_but_not_under_other_settings(
    compared, text, capsys, monkeypatch
):
    before = (compared / "fused" / "metrics.jsonl").read_bytes()
    script.main(arguments(text, compared, "--loss", "naive"))
    script.main(arguments(text, compared, "--compare"))
    assert (compared / "fused" / "metrics.jsonl").read_bytes() == before
    table = capsys.readouterr().out
    for row in ("fused         naive", "held-out loss", "unigram entropy", "temporary memory"):
        assert row in table

    with pytest.raises(SystemExit, match="lr: 0.02 -> 0.5"):
        script.main(arguments(text, compared, "--lr", "0.5"))


@pytest.mark.slow
def test_bfloat16_and_an_untied_capped_head_train(text, tmp_path):
    extra = ["--dtype", "bfloat16", "--untied", "--soft-cap", "30"]
    script.main(arguments(text, tmp_path / "run", *extra))
    records = curve(tmp_path / "run" / "fused")
    assert records[-1]["loss"] < records[0]["loss"] - 1.5


@pytest.mark.slow
def test_eight_devices_follow_the_curve_of_one(text, tmp_path):
    """Batch over two, vocabulary over four; the CPU becomes eight devices before JAX starts."""
    short = ["--steps", "16", "--untied", "--soft-cap", "20"]
    command = [sys.executable, "-m", "models.train", "--mesh", "dp=2,tp=4"]
    command += arguments(text, tmp_path / "eight", *short)
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=300)
    script.main(arguments(text, tmp_path / "one", *short))
    eight, one = curve(tmp_path / "eight" / "fused"), curve(tmp_path / "one" / "fused")
    for a, b in zip(eight, one, strict=True):
        assert a.keys() == b.keys()
        np.testing.assert_allclose(list(a.values()), list(b.values()), rtol=1e-5)


@pytest.mark.parametrize("mesh", ["dp=2,pp=2", "dp", "tp=0", "tp=2,tp=2", "dp=3"])
def test_bad_meshes_are_refused(mesh, capsys):
    with pytest.raises(SystemExit):
        script.main(["--mesh", mesh, "--batch", "4"])
    assert "must be like dp=2,tp=4" in (err := capsys.readouterr().err) or "must divide" in err


def test_half_a_line_and_what_follows_the_checkpoint_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4')
    with script.open_metrics(path, 2) as metrics:
        print('{"step": 3, "again": 1}', file=metrics)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3, "again": 1}\n'


def test_fresh_deletes_the_earlier_run(tmp_path):
    (tmp_path / "old").write_text("")
    script.open_run(tmp_path, fresh=True, wanted={"lr": 1})
    assert [p.name for p in tmp_path.iterdir()] == ["settings.json"]


def test_warmup_longer_than_the_run_is_refused(capsys):
    with pytest.raises(SystemExit):
        script.arguments(["--steps", "5", "--warmup", "5"])
    assert "--warmup 5" in capsys.readouterr().err
