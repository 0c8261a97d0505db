"""The questions that a placement answers."""

from typing import Protocol

import jax

from pallas_loss._types import RowLabels, Rows
from pallas_loss.backends.base import LinearBackend, LinearOperands, LinearProblem
from pallas_loss.backends.rows import RowBackend
from pallas_loss.sharding.shard import Axes


class Placement(Protocol):
    """Answers of a placement."""

    @property
    def no_in_forward(self) -> str | None:
        """What stands against gradients made in the forward."""
        ...

    def share(self, t: int, v: int) -> tuple[int, int]:
        """The rows and columns that one device sweeps, of ``t`` and ``v`` at hand."""
        ...

    @property
    def axis_of_partial_sums(self) -> Axes:
        """The axes over which a sum over columns, formed by the rule itself, is partial."""
        ...

    def vocab(self, columns: int, vocab_size: int | None) -> int:
        """V, where the weight at hand has so many columns."""
        ...

    def flatten(self, a: jax.Array, rank: int, columns: bool = False) -> jax.Array:
        """``[*B, ...]`` as ``[T, ...]``, with ``rank`` axes in B; ``columns`` are logits'."""
        ...

    def unflatten(self, rows: jax.Array, batch: tuple[int, ...]) -> jax.Array:
        """The inverse."""
        ...

    def total(self, per_row: jax.Array) -> jax.Array:
        """The sum over the tokens of all devices."""
        ...

    def enter(self, problem: LinearProblem, operands: LinearOperands, vocab: int) -> LinearOperands:
        """The operands as the derivative rule and the backend want them; differentiable."""
        ...

    def backend(self, inner: LinearBackend, vocab: int) -> LinearBackend:
        """``inner``, made to answer for all devices."""
        ...

    def lay_gradients(self, problem: LinearProblem, grads: LinearOperands) -> LinearOperands:
        """The gradients, each where its argument lies."""
        ...

    def row_backend(self, inner: RowBackend) -> RowBackend:
        """The same of a backend of losses from logits."""
        ...

    def check_columns(self, columns: int) -> None:
        """Raises where logits of so many columns cannot lie so."""
        ...

    def look_up(self, per_class: jax.Array, labels: RowLabels) -> Rows:
        """``per_class[label]``; for a label of -1, anything."""
        ...
