"""Each device puts its own active rows first; `test_sharding.py` runs this file.

On the backend whose skipped rows are full of NaN.
"""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from sharded import WAYS, Problem, assert_equal, on_mesh, one_device

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import skipping

from pallas_loss import select

MESH = {"dp": 2, "tp": 4}
CE = Problem(
    arrays=("bias", "where", "weights"),
    options={"z_loss": 0.01, "return_metrics": True},
    implementation=skipping.BACKEND.name,
)
LOGPROB = Problem(
    "logprob",
    arrays=("bias", "where", "temperatures"),
    candidates=3,
    options={"entropy": True},
    implementation=skipping.BACKEND.name,
)


@pytest.fixture(autouse=True)
def _skipping(monkeypatch):
    """The backend that spoils what it skips is one to choose from."""
    monkeypatch.setattr(select, "LINEAR_BACKENDS", (*select.LINEAR_BACKENDS, skipping.BACKEND))


def _assert_that_of_one_device(problem, mesh, way, tokens):
    assert_equal(
        on_mesh(problem, mesh, way, tokens), one_device(replace(problem, implementation="xla"))
    )


@pytest.mark.parametrize("way", WAYS)
def test_cross_entropy(way):
    _assert_that_of_one_device(CE, MESH, way, ("dp",))


@pytest.mark.parametrize("way", WAYS)
def test_gradients_in_the_forward(way):
    options = {"backward": "in_forward", "return_metrics": True}
    _assert_that_of_one_device(replace(CE, options=options), MESH, way, ("dp",))


@pytest.mark.parametrize("way", ["auto", "inside"])
def test_candidates(way):
    _assert_that_of_one_device(LOGPROB, MESH, way, ("dp",))


@pytest.mark.parametrize("way", ["auto", "outside", "inside"])
def test_sequence_parallelism(way):
    """The tokens of all shards are gathered, and so is which of them count."""
    _assert_that_of_one_device(CE, {"dp": 2, "tp": 2}, way, ("dp", "tp"))
