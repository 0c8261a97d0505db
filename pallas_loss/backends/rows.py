"""The few questions that a backend answers about losses from logits, and what answers share."""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from pallas_loss._types import Array, Float, RowLabels, Rows, Scalar, Tile
from pallas_loss.losses import LogitTransform, RowFacts, RowLoss
from pallas_loss.row_sums import NEG_INF

Sums = Any  # RowSums or PairSums: the loss knows


@dataclass(frozen=True)
class RowProblem:
    """What is static about a loss from logits; hashable, so that equal calls share a trace.

    ``target`` says what the second array holds: nothing, probabilities or logits. ``transform``
    makes ``z`` of the logits, ``target_transform`` makes ``t`` of target logits. ``argmax`` asks
    for the column of the maximum.
    """

    loss: RowLoss
    transform: LogitTransform
    target_transform: LogitTransform = LogitTransform()
    target: str = "none"
    argmax: bool = False

    @property
    def moments(self) -> frozenset[str]:
        return self.loss.moments | (frozenset({"argmax"}) if self.argmax else frozenset())


class RowOperands(NamedTuple):
    """The arrays of a loss from logits.

    ``labels`` are int32 in [0, V), or -1 for a label that no column matches; ``label_weight`` is
    the class weight of each; ``class_weights`` weigh the columns in the sum ``u``. Traced
    temperatures are float32 scalars; the static ones live in the transforms. ``ids`` are the labels
    in the whole vocabulary, where the columns at hand are a part of it and ``labels`` count theirs.
    """

    logits: Float[Array, "T V"]
    target: Float[Array, "T V"] | None = None
    labels: RowLabels | None = None
    label_weight: Rows | None = None
    class_weights: Float[Array, " V"] | None = None
    temperature: Scalar | None = None
    target_temperature: Scalar | None = None
    ids: RowLabels | None = None

    @property
    def facts(self) -> RowFacts:
        return RowFacts(self.labels if self.ids is None else self.ids, self.label_weight)


class RowBackend(Protocol):
    """Losses of rows ``[T, V]`` that are in memory: the question is how often each byte moves.

    A gradient has the dtype of the logits. A row whose ``g`` is 0 gets exactly 0, whatever it
    holds. With ``inplace`` the gradient is written over the logits, if nobody else needs them.
    """

    @property
    def name(self) -> str: ...

    def unsupported(self, problem: RowProblem, operands: RowOperands) -> str | None:
        """Why this call cannot run here, or None if it can."""
        ...

    def sums(self, problem: RowProblem, operands: RowOperands) -> Sums:
        """The sums of every row: one read."""
        ...

    def sums_and_gradient(
        self, problem: RowProblem, operands: RowOperands, g: Rows, inplace: bool
    ) -> tuple[Sums, Float[Array, "T V"]]:
        """The sums, and ``sum_t g_t loss_t`` differentiated in the logits: one pass."""
        ...

    def gradient(
        self, problem: RowProblem, operands: RowOperands, sums: Sums, g: Rows, inplace: bool
    ) -> Float[Array, "T V"]:
        """The same gradient from sums that were kept: one read, one write."""
        ...

    def dot_z(self, problem: RowProblem, operands: RowOperands, sums: Sums, g: Rows) -> Scalar:
        """``sum_t g_t sum_v z dloss_t/dz``, of which a temperature's gradient is made: one read."""
        ...


class Tiles(NamedTuple):
    """``z`` and ``t`` of a tile in float32, and the ``tanh`` of the soft cap, if there is one."""

    z: Tile
    t: Tile | None
    tanh: Tile | None


def tiles_of(
    problem: RowProblem, logits: Tile, target: Tile | None, factors, tanh=jnp.tanh, live=None
) -> Tiles:
    """From a tile of the arrays to what the loss sees; ``live`` tells real columns from others.

    ``factors`` are those of the two transforms.
    """
    z, capped = problem.transform(logits.astype(jnp.float32), factors[0], tanh)
    t = None
    if target is not None:
        t = target.astype(jnp.float32)
        if problem.target == "logits":
            t, _ = problem.target_transform(t, factors[1], tanh)
    if live is not None:
        z = jnp.where(live, z, NEG_INF)
        if t is not None:
            t = jnp.where(live, t, NEG_INF if problem.target == "logits" else 0.0)
    return Tiles(z, t, capped)


def factors_of(problem: RowProblem, operands: RowOperands) -> tuple:
    """The factors of the two transforms."""
    return (
        problem.transform.factors(temperature=operands.temperature),
        problem.target_transform.factors(temperature=operands.target_temperature),
    )


def slope_of(problem: RowProblem, operands: RowOperands):
    """``1 / temperature``: the factor of ``g`` that turns ``dL/dz`` into ``dL/dlogits``."""
    return problem.transform.slope(temperature=operands.temperature)


def gradient_tile(problem: RowProblem, coefficients, tiles: Tiles, cols, labels, cw, g) -> Tile:
    """``g dL/dlogits`` of one tile; ``g`` only tells rows that have no part in the loss."""
    d = problem.loss.tile(coefficients, tiles.z, tiles.t, cols, labels, cw)
    d = problem.transform.chain(d, tiles.tanh)
    return jnp.where(jax.lax.broadcast_in_dim(g != 0, d.shape, (0,)), d, 0.0)
