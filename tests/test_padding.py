"""Padding to buckets: sizes, equality with what was given, and one program for a bucket."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import pallas_loss.nnx
from pallas_loss import fused_linear_ce, pad_to_bucket
from pallas_loss.nnx import LMHead
from pallas_loss.padding import bucket_size

H, V = 8, 13


def make(*batch, k=None, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(*batch, H)).astype(np.float32)
    return x, rng.integers(0, V, (*batch, k) if k else batch).astype(np.int32)


def counting(monkeypatch, name):
    """Counts the traces of an entry point under the head."""
    traces, function = [], getattr(pallas_loss.nnx, name)

    @functools.wraps(function)
    def counted(*args, **options):
        traces.append(None)
        return function(*args, **options)

    monkeypatch.setattr(pallas_loss.nnx, name, counted)
    return traces


def test_buckets_are_powers_of_two_and_midpoints():
    """The smallest that holds the tokens, at most half again as many."""
    buckets = sorted({bucket_size(n) for n in range(1, 1025)})
    assert buckets == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768,
                       1024]  # fmt: skip
    for n in range(1, 1025):
        assert bucket_size(n) == min(b for b in buckets if b >= n)
    assert bucket_size(0) == 0


@pytest.mark.parametrize("xp", [np, jnp])
@pytest.mark.parametrize(("batch", "k"), [((5,), None), ((2, 5), None), ((2, 5), 3), ((6,), None)])
def test_padded_rows_are_zeros_that_are_ignored(xp, batch, k):
    x, labels = make(*batch, k=k)
    padded_x, padded_labels = pad_to_bucket(xp.asarray(x), xp.asarray(labels), ignore_index=-1)
    assert isinstance(padded_x, np.ndarray) == (xp is np)
    assert padded_x.shape == (*batch[:-1], 6, H)
    assert padded_labels.shape == (*batch[:-1], 6, *labels.shape[len(batch) :])
    assert padded_x.dtype == x.dtype and padded_labels.dtype == labels.dtype
    n = batch[-1]
    np.testing.assert_array_equal(padded_x[..., :n, :], x)
    np.testing.assert_array_equal(padded_x[..., n:, :], 0)
    here = (..., slice(0, n), *[slice(None)] * (k is not None))
    there = (..., slice(n, None), *[slice(None)] * (k is not None))
    np.testing.assert_array_equal(padded_labels[here], labels)
    np.testing.assert_array_equal(padded_labels[there], -1)


@pytest.mark.parametrize(
    ("x", "labels", "error", "words"),
    [
        (np.ones(H), np.array(1), ValueError, "token axis"),
        (np.ones((5, H)), np.ones(4, np.int32), ValueError, r"int32\[4\]"),
        (np.ones((5, H)), np.ones((5, 2, 2), np.int32), ValueError, "one more axis"),
        (np.ones((5, H)), np.ones(5), TypeError, "integers"),
    ],
)
def test_bad_arguments_are_named(x, labels, error, words):
    with pytest.raises(error, match=words):
        pad_to_bucket(x, labels)


def test_lengths_of_a_bucket_share_a_program():
    """200 and 201 tokens are both 256; 257 are the next bucket, and every loss is its own."""
    w = np.random.default_rng(1).normal(size=(H, V)).astype(np.float32)
    traces = []

    @jax.jit
    def step(x, w, labels):
        traces.append(None)
        return jax.value_and_grad(fused_linear_ce, (0, 1))(x, w, labels)

    for n, programs in ((200, 1), (201, 1), (256, 1), (257, 2), (384, 2)):
        x, labels = make(n, seed=n)
        value, (dx, dw) = step(*_with_w(pad_to_bucket(x, labels), w))
        one_off = jax.jit(jax.value_and_grad(fused_linear_ce, (0, 1)))
        want, (want_dx, want_dw) = one_off(x, w, labels)
        np.testing.assert_allclose(value, want, rtol=1e-6)
        np.testing.assert_allclose(dx[:n], want_dx, atol=1e-7)
        np.testing.assert_array_equal(dx[n:], 0)
        np.testing.assert_allclose(dw, want_dw, atol=1e-6)
        assert len(traces) == programs


def _with_w(padded, w):
    x, labels = padded
    return x, w, labels


def _heads():
    embed = nnx.Embed(V, H, rngs=nnx.Rngs(1))
    return [LMHead(H, V, tie_to=embed, bucket=bucket, rngs=nnx.Rngs(2)) for bucket in (False, True)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "none", "per_token": ("where", "weights")},
        {"return_metrics": True, "ignore_index": 3, "label_smoothing": 0.1},
    ],
)
def test_head_in_buckets_is_the_head(monkeypatch, options):
    """Loss, metrics and gradients of `[B, S]` tokens, options given token by token included."""
    traces = counting(monkeypatch, "fused_linear_ce")
    plain, bucketed = _heads()
    options = dict(options)
    per_token = options.pop("per_token", ())
    for s in (9, 10, 12):
        x, labels = make(2, s, seed=s)
        rng = np.random.default_rng(s)
        given = {
            "where": rng.uniform(size=(2, s)) < 0.6,
            "weights": rng.uniform(0.5, 2, (2, s)).astype(np.float32),
        }
        given = {name: jnp.asarray(given[name]) for name in per_token}

        def run(head, x=x, labels=labels, given=given):
            def loss(x):
                out = head.loss(x, labels, **options, **given)
                value = out[0] if options.get("return_metrics") else out
                return jnp.sum(value), out

            return jax.value_and_grad(loss, has_aux=True)(jnp.asarray(x))

        before = len(traces)
        got = run(bucketed)
        assert len(traces) == before + (s == 9)
        want = run(plain)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert a.shape == b.shape
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("k", [None, 3])
def test_logprob_in_buckets(monkeypatch, k):
    """A temperature per token, candidates, and every output cut to the tokens given."""
    traces = counting(monkeypatch, "fused_linear_logprob")
    plain, bucketed = _heads()
    for n in (5, 6):
        x, labels = make(n, k=k, seed=n)
        tau = jnp.linspace(0.5, 2.0, n)
        before = len(traces)
        got = bucketed.logprob(x, labels, temperature=tau, entropy=True)
        assert len(traces) == before + (n == 5)
        want = plain.logprob(x, labels, temperature=tau, entropy=True)
        for a, b in zip(got, want, strict=True):
            assert a.shape == b.shape
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
