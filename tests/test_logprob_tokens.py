"""`fused_linear_logprob`: masks, labels, degenerate shapes, bad input."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from logprob_truth import (
    NAN,
    OUTPUTS,
    close,
    eye,
    f32,
    i32,
    solve,
    solve_and_compare,
)

from pallas_loss import fused_linear_logprob

# --- masks and labels -----------------------------------------------------------------------------


@pytest.mark.parametrize("mask", ["ignored", "where"])
@pytest.mark.parametrize("several", [False, True], ids=["one", "candidates"])
def test_masked_rows_are_zeros_whatever_they_hold(backend, several, mask):
    """NVIDIA-NeMo/Megatron-Bridge#3117: 0 * NaN reached the sum or the gradient of the weight."""
    rng = np.random.default_rng(1)
    x, w = f32(*rng.normal(size=(40, 3))), f32(*rng.normal(size=(70, 3)))
    labels = rng.integers(0, 70, (40, 2) if several else 40).astype(np.int32)
    keep = np.arange(40) % 20 == 19  # whole blocks have no token
    x[~keep] = NAN
    temperature = np.where(keep, 0.7, NAN).astype(np.float32)
    options = {
        "temperature": temperature,
        "where": np.ones(40, bool),
        "bias": np.zeros(70, np.float32),
    }
    if mask == "where":
        options["where"] = keep
    else:
        labels[~keep] = -100
    g = {n: np.where(keep, 1.0, NAN).astype(np.float32) for n in OUTPUTS}
    g["logprob"] = g["logprob"][:, None] if several else g["logprob"]
    out, grads = solve_and_compare(backend, x, w, labels, g, **options)
    for name in OUTPUTS:
        np.testing.assert_array_equal(np.asarray(getattr(out, name))[~keep], 0)
    for name in ("x", "temperature"):
        np.testing.assert_array_equal(np.asarray(grads[name])[~keep], 0)


def test_no_counted_token_is_zero_everywhere(backend):
    """linkedin/Liger-Kernel#177: every token masked."""
    x = np.full((4, 3), NAN, np.float32)
    options = {"bias": np.zeros(5, np.float32), "temperature": np.ones(4, np.float32)}
    out, grads = solve(backend.name, x, np.ones((3, 5), np.float32), i32(*[-100] * 4), **options)
    for array in (*out, *grads.values()):
        np.testing.assert_array_equal(array, np.zeros_like(array))


def test_a_masked_token_adds_to_no_gradient(backend):
    """alibaba/ROLL#444: masked tokens in one of two sums; ignored and masked is out once."""
    x, mask = f32([0, 0], [9, 0], [0, 0], [-9, 0]), np.array([True, False, True, False])
    for where in (mask, mask.astype(np.int32)):
        out, grads = solve_and_compare(backend, x, eye(2), i32(0, -100, 0, 0), where=where)
        close(out.logprob, np.where(mask, -0.693147, 0), 1e-6)
        np.testing.assert_array_equal(grads["x"][1::2], np.zeros((2, 2)))


@pytest.mark.parametrize(
    ("label", "ignore"),
    [(128, -100), (-1, -100), (-100, -1), (2**31 - 1, -100)],
)
def test_label_outside_the_vocabulary_is_loud(backend, label, ignore):
    """google-deepmind/optax#1185: a wrapped or clipped class. Entropy and lse need no label."""
    x = np.broadcast_to(np.arange(128) / 16, (3, 128)).astype(np.float32)
    for labels in (i32(7, label, 100), i32([7, 1], [3, label], [100, 2])):
        several = labels.ndim == 2
        g = np.ones(labels.shape, np.float32)
        given = {"logprob": g, "entropy": 1.0}
        out, grads = solve_and_compare(backend, x, eye(128), labels, given, ignore_index=ignore)
        assert np.isnan(out.logprob).tolist() == (
            [[False, False], [False, True], [False, False]] if several else [False, True, False]
        )
        assert np.isnan(grads["x"]).any(axis=1).tolist() == [False, True, False]
        g[1] = 0
        _, grads = solve_and_compare(
            backend, x, eye(128), labels, given | {"logprob": g}, ignore_index=ignore
        )
        assert all(np.all(np.isfinite(a)) for a in grads.values())


def test_candidates_are_ignored_one_by_one(backend):
    """A token counts if any of its candidates does; a class that is the mark never counts."""
    rng = np.random.default_rng(2)
    x, w = f32(*rng.normal(size=(3, 4))), f32(*rng.normal(size=(6, 4)))
    labels = i32([1, -100, 5], [-100, -100, -100], [3, 3, -100])
    out, grads = solve_and_compare(backend, x, w, labels)
    assert (np.asarray(out.logprob) == 0).tolist() == (labels == -100).tolist()
    assert (np.asarray(out.entropy) == 0).tolist() == [False, True, False]
    np.testing.assert_array_equal(grads["x"][1], np.zeros(4))
    one, _ = solve_and_compare(backend, x, w, labels[:, :1])
    close(one.logprob[:, 0], np.asarray(out.logprob)[:, 0], 1e-6)


# --- degenerate shapes ----------------------------------------------------------------------------


@pytest.mark.parametrize("backward", ["recompute", "stored"])
@pytest.mark.parametrize("several", [False, True], ids=["one", "candidates"])
def test_no_tokens(backend, several, backward):
    """linkedin/Liger-Kernel#1289: a division by zero in the block arithmetic."""
    for batch in ((0,), (2, 0)):
        x, w = np.zeros((*batch, 8), np.float32), np.ones((8, 5), np.float32)
        labels = np.zeros((*batch, 3) if several else batch, np.int32)
        out, grads = solve(backend.name, x, w, labels, backward=backward)
        assert out.logprob.shape == labels.shape
        assert out.entropy.shape == out.lse.shape == batch
        np.testing.assert_array_equal(grads["w"], np.zeros_like(w))
        assert grads["x"].shape == x.shape


@pytest.mark.parametrize("backward", ["recompute", "stored"])
def test_one_token_or_one_class(backend, backward):
    """triton-lang/triton#3709: dimensions below the smallest tile; a single certain class."""
    x, w = f32([1, -1]), f32([1, 0], [0, 1], [1, 1])
    out, grads = solve(
        backend.name, x, w, i32(2), {"logprob": -1.0}, bias=np.zeros(3, np.float32),
        w_layout="vh", backward=backward,
    )  # fmt: skip
    close(out.logprob, [-1.407606], 1e-6)
    close(grads["bias"], [0.665241, 0.090031, -0.755272], 1e-6 if backward == "recompute" else 3e-3)
    out, grads = solve(backend.name, x, w[:1], i32(0), w_layout="vh", backward=backward)
    assert out.logprob == out.entropy == 0
    close(grads["w"], [[1, -1]])  # of lse alone
    out, _ = solve(backend.name, x[0], w, np.int32(2), w_layout="vh", backward=backward)
    assert out.logprob.shape == out.entropy.shape == ()


# --- bad input ------------------------------------------------------------------------------------

# name: (arguments replaced, error, what the message must hold)
BAD = {
    "temperature of another shape": ({"temperature": np.ones(5, np.float32)}, ValueError, ["[5]"]),
    "temperature column": ({"temperature": jnp.ones((6, 1))}, ValueError, ["[6, 1]", "[6]"]),
    "temperature integers": ({"temperature": np.ones(6, np.int32)}, TypeError, ["int32[6]"]),
    "temperature zero": ({"temperature": 0}, ValueError, ["0"]),
    "temperature negative": ({"temperature": -1.0}, ValueError, ["-1.0"]),
    "temperature nan": ({"temperature": np.nan}, ValueError, ["nan"]),
    "labels floats": ({"labels": np.zeros(6, np.float32)}, TypeError, ["float32[6]"]),
    "labels of another shape": ({"labels": np.zeros(5, np.int32)}, ValueError, ["int32[5]"]),
    "labels of other tokens": ({"labels": np.zeros((5, 3), np.int32)}, ValueError, ["labels", "5"]),
    "labels with no candidate": ({"labels": np.zeros((6, 0), np.int32)}, ValueError, ["[6, 0]"]),
    "labels with too many axes": ({"labels": np.zeros((6, 2, 2), np.int32)}, ValueError, ["2, 2]"]),
    "x of another width": ({"x": np.ones((6, 5), np.float32)}, ValueError, ["[6, 5]", "w"]),
    "w vector": ({"w": np.ones(4, np.float32)}, ValueError, ["[4]"]),
    "w empty": ({"w": np.ones((4, 0), np.float32)}, ValueError, ["[4, 0]"]),
    "bias per token": ({"bias": np.zeros(6, np.float32)}, ValueError, ["float32[6]"]),
    "where per candidate": ({"where": np.ones((6, 1), bool)}, ValueError, ["bool[6, 1]"]),
    "where floats": ({"where": np.ones(6, np.float32)}, TypeError, ["float32[6]"]),
    "ignore_index fraction": ({"ignore_index": 1.5}, TypeError, ["1.5"]),
    "logit_soft_cap zero": ({"logit_soft_cap": 0.0}, ValueError, ["0.0"]),
    "logit_scale zero": ({"logit_scale": 0}, ValueError, ["0"]),
    "logit_scale per token": ({"logit_scale": jnp.ones(6)}, TypeError, ["float32[6]"]),
    "backward": ({"backward": "fused"}, ValueError, ["'fused'", "'stored'"]),
    "w_layout": ({"w_layout": "vv"}, ValueError, ["'vv'"]),
    "compute_dtype": ({"compute_dtype": "bf17"}, TypeError, ["bf17"]),
    "implementation": ({"implementation": "cuda"}, ValueError, ["cuda", "xla"]),
    "label_smoothing": ({"label_smoothing": 0.1}, TypeError, []),
    "reduction": ({"reduction": "none"}, TypeError, []),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_raises_and_names_the_argument(name):
    """The message names the argument and prints its value, or its dtype and shape; so under jit."""
    changes, error, words = BAD[name]
    arrays = {
        "x": np.ones((6, 4), np.float32),
        "w": np.ones((4, 7), np.float32),
        "labels": np.zeros(6, np.int32),
    }
    options = {n: a for n, a in changes.items() if n not in arrays}
    arrays |= {n: a for n, a in changes.items() if n in arrays}

    def call(arrays):
        return fused_linear_logprob(**arrays, **options)

    for run in (call, functools.partial(jax.eval_shape, call)):
        with pytest.raises(error) as caught:
            run(arrays)
        for word in (name.split()[0], *words):
            assert word in str(caught.value), str(caught.value)


def test_traced_temperatures_are_not_checked(backend):
    """They cannot raise; a value <= 0 gives what the formula gives."""
    out, _ = solve(backend.name, f32([1, 2, 4]), eye(3), i32(0), temperature=np.float32(-1))
    close(out.logprob, [-1 - np.log(np.exp([-1.0, -2.0, -4.0]).sum())], 1e-6)
