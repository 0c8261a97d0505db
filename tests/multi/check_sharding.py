"""Every loss from hidden states in every way over 8 devices; `test_sharding.py` runs this file."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from sharded import WAYS, Problem, assert_equal, on_mesh, one_device

from pallas_loss import tuning

EVERYTHING = Problem(
    arrays=("bias", "where", "weights", "class_weights", "temperature", "logit_scale"),
    options={
        "label_smoothing": 0.1,
        "z_loss": 0.01,
        "logit_soft_cap": 4.0,
        "return_metrics": True,
        "token_scaling": True,
    },
)
LOGPROB = Problem(
    "logprob", arrays=("bias", "temperatures", "logit_scale"), options={"entropy": True}
)
STORED = replace(LOGPROB, options={"entropy": True, "backward": "stored"}, layout="vh")
CANDIDATES = replace(LOGPROB, candidates=3)
MESHES = {
    "2x4": {"dp": 2, "tp": 4},
    "4x2": {"dp": 4, "tp": 2},
    "1x8": {"dp": 1, "tp": 8},
    "8x1": {"dp": 8, "tp": 1},
    "2x2x2": {"dp": 2, "cp": 2, "tp": 2},
}
SOME = ("auto", "outside unchecked", "inside")


@pytest.fixture(autouse=True)
def _small_tiles():
    """Several ragged tiles in every shard."""
    with tuning.override(tuning.XlaConfig(token_tile=64, vocab_tile=6)):
        yield


@pytest.mark.parametrize(
    "mesh,way",
    [(m, w) for m in ("2x4", "2x2x2") for w in WAYS]
    + [(m, w) for m in ("4x2", "1x8", "8x1") for w in SOME],
)
def test_cross_entropy(mesh, way):
    """All options, metrics and gradients; a sequence axis beside the batch's."""
    tokens = ("dp", "cp") if "cp" in MESHES[mesh] else ("dp",)
    assert_equal(on_mesh(EVERYTHING, MESHES[mesh], way, tokens), one_device(EVERYTHING))


@pytest.mark.parametrize("way", WAYS)
def test_logprob_and_entropy(way):
    """A cotangent and a temperature for every token."""
    assert_equal(on_mesh(LOGPROB, MESHES["2x4"], way, ("dp",)), one_device(LOGPROB))


@pytest.mark.parametrize("way", SOME)
def test_candidates(way):
    assert_equal(on_mesh(CANDIDATES, MESHES["2x4"], way, ("dp",)), one_device(CANDIDATES))


@pytest.mark.parametrize("way", SOME)
def test_stored(way):
    """Each of the two rounds e^(z-m) to bfloat16, with a shift of its own."""
    units = 2 * float(jnp.finfo(jnp.bfloat16).eps / jnp.finfo(jnp.float32).eps)
    assert_equal(on_mesh(STORED, MESHES["2x4"], way, ("dp",)), one_device(STORED), units)


@pytest.mark.parametrize("way", WAYS)
def test_tokens_split_over_the_vocabulary_axis_too(way):
    """Sequence parallelism: x is gathered, dx scattered."""
    found = on_mesh(EVERYTHING, MESHES["2x4"], way, ("dp", "tp"))
    assert_equal(found, one_device(EVERYTHING))


@pytest.mark.parametrize("way", SOME)
def test_candidates_in_sequence_parallelism(way):
    assert_equal(on_mesh(CANDIDATES, MESHES["4x2"], way, ("dp", "tp")), one_device(CANDIDATES))


@pytest.mark.parametrize("way", WAYS)
def test_uneven_vocabulary(way):
    """50 columns over 4 shards, under a soft cap: the 2 that pad the last are no class."""
    problem = replace(EVERYTHING, vocab=50, padded=0 if way in ("auto", "explicit") else 2)
    assert_equal(on_mesh(problem, MESHES["2x4"], way, ("dp",)), one_device(problem))


@pytest.mark.parametrize("way", SOME)
def test_shards_without_a_class(way):
    """9 columns over 8 shards of 2: one has 1, three have none."""
    problem = replace(LOGPROB, vocab=9, padded=0 if way == "auto" else 7)
    assert_equal(on_mesh(problem, MESHES["1x8"], way), one_device(problem))


def test_stored_with_an_uneven_vocabulary():
    problem = replace(STORED, vocab=50)
    units = 2 * float(jnp.finfo(jnp.bfloat16).eps / jnp.finfo(jnp.float32).eps)
    assert_equal(on_mesh(problem, MESHES["2x4"], "auto", ("dp",)), one_device(problem), units)


@pytest.mark.parametrize("tokens", [("dp",), ("dp", "tp")], ids=str)
@pytest.mark.parametrize("way", ["outside", "outside unchecked"])
def test_float16_is_scaled_alike_on_every_shard(way, tokens):
    """d-logits are lifted by a power of two that each device chooses from its own tokens."""
    problem = replace(EVERYTHING, dtype="float16")
    found, wanted = on_mesh(problem, MESHES["2x4"], way, tokens), one_device(problem)
    assert_equal(found[1]["x"], wanted[1]["x"], 4)
    assert_equal(found[1]["w"], wanted[1]["w"], 4)
    assert_equal(found[0], wanted[0])


@pytest.mark.parametrize("way", ["auto", "outside unchecked"])
def test_dx_is_summed_in_float32(way):
    """As close to one device as one rounding to bfloat16, however many shards add to it."""
    problem = replace(EVERYTHING, dtype="bfloat16", hidden=64, options={"reduction": "sum"})
    found, wanted = on_mesh(problem, MESHES["1x8"], way), one_device(problem)
    # Unchecked, JAX adds eight equal eighths in bfloat16 after the sum.
    assert_equal(found[1]["x"], wanted[1]["x"], 1 if way == "auto" else 3)


IN_FORWARD = replace(
    EVERYTHING,
    arrays=("bias", "where", "weights", "class_weights", "temperature"),
    options=EVERYTHING.options | {"label_smoothing": 0.0, "backward": "in_forward"},
)


@pytest.mark.parametrize(
    "mesh,tokens,way",
    [("2x4", ("dp",), w) for w in WAYS]
    + [("4x2", ("dp", "tp"), w) for w in WAYS]
    + [("1x8", (), w) for w in ("auto", "outside unchecked")]
    + [("8x1", ("dp",), w) for w in ("auto", "inside")],
)
def test_gradients_made_in_the_forward(mesh, tokens, way):
    assert_equal(on_mesh(IN_FORWARD, MESHES[mesh], way, tokens), one_device(IN_FORWARD))


@pytest.mark.parametrize("way", SOME)
def test_gradients_made_in_the_forward_with_smoothing_and_an_uneven_vocabulary(way):
    options = {"label_smoothing": 0.1, "backward": "in_forward"}
    problem = replace(IN_FORWARD, vocab=50, layout="vh", options=options)
    problem = replace(problem, padded=0 if way == "auto" else 2)
    assert_equal(on_mesh(problem, MESHES["2x4"], way, ("dp",)), one_device(problem))


@pytest.mark.parametrize("way", SOME)
def test_gradients_made_in_the_forward_of_shards_without_a_class(way):
    problem = replace(IN_FORWARD, vocab=9, padded=0 if way == "auto" else 7)
    assert_equal(on_mesh(problem, MESHES["1x8"], way), one_device(problem))


def test_the_reference_backend():
    problem = replace(EVERYTHING, implementation="reference", layout="vh")
    assert_equal(on_mesh(problem, MESHES["4x2"], "explicit", ("dp",)), one_device(problem))


@pytest.mark.parametrize("way", ["auto", "outside"])
def test_without_jit(way):
    problem = Problem(batch=(8,), vocab=8)
    found = on_mesh(problem, MESHES["2x4"], way, ("dp",), jit=False)
    assert_equal(found, one_device(problem))


@pytest.mark.parametrize("way", ["auto", "inside"])
def test_runs_are_bitwise_equal(way):
    first, second = jax.device_get(on_mesh(EVERYTHING, MESHES["2x4"], way, ("dp",), calls=2))
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert a.tobytes() == b.tobytes()
