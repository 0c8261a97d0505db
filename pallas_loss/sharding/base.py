"""The questions that a placement answers."""

from typing import Protocol

import jax

from pallas_loss._types import RowLabels, Rows
from pallas_loss.autodiff import in_forward
from pallas_loss.backends.base import LinearBackend, LinearOperands, LinearProblem
from pallas_loss.backends.rows import RowBackend, RowOperands
from pallas_loss.sharding.widths import Axes


class Placement(in_forward.Placement, Protocol):
    """What the entry points and the derivative rules have to know of where arrays lie."""

    def share(self, t: int, v: int) -> tuple[int, int]:
        """The rows and columns that one device sweeps, of ``t`` and ``v`` at hand."""
        ...

    @property
    def axis_of_partial_sums(self) -> Axes:
        """The axes over which a sum over columns, formed by the rule itself, is partial."""
        ...

    @property
    def sequence(self) -> bool:
        """Whether the axis of the vocabulary splits the tokens too."""
        ...

    def vocab(self, columns: int, vocab_size: int | None, of: str = "w") -> int:
        """V, where ``of`` has so many columns at hand."""
        ...

    def fit(self, by_class: jax.Array, vocab: int, along: int = -1) -> jax.Array:
        """An array of classes with columns that shards share evenly: cut or padded."""
        ...

    def flatten(self, a: jax.Array, rank: int, columns: bool = False) -> jax.Array:
        """``[*B, ...]`` as ``[T, ...]``, with ``rank`` axes in B; ``columns`` are logits'."""
        ...

    def unflatten(self, rows: jax.Array, batch: tuple[int, ...]) -> jax.Array:
        """The inverse."""
        ...

    def alike[T](self, tree: T) -> T:
        """What is the same on all devices of the vocabulary's axis, with a type that says so."""
        ...

    def of_all_tokens(self, name: str, number: jax.Array | None) -> jax.Array | None:
        """``number``, the argument ``name``, which has to be one for all tokens."""
        ...

    def total(self, per_row: jax.Array) -> jax.Array:
        """The sum over the tokens of all devices."""
        ...

    def over_devices(self, total: jax.Array) -> jax.Array:
        """The same of what is the sum over the tokens at hand."""
        ...

    def enter(self, problem: LinearProblem, operands: LinearOperands, vocab: int) -> LinearOperands:
        """The operands as the derivative rule and the backend want them; differentiable."""
        ...

    def enter_rows(self, operands: RowOperands) -> RowOperands:
        """The same of logits, which ``fit``."""
        ...

    def into[T](self, tree: T, *beside) -> T:
        """Values per row or for all rows as the rule wants them that is given ``beside`` too."""
        ...

    def out_of[T](self, tree: T) -> T:
        """What that rule returns, as the caller's differentiation wants it."""
        ...

    def backend(self, inner: LinearBackend, vocab: int) -> LinearBackend:
        """``inner``, made to answer for all devices."""
        ...

    @property
    def one_chunk(self) -> bool:
        """Whether all tokens at hand have to go by together."""
        ...

    def row_backend(self, inner: RowBackend, vocab: int) -> RowBackend:
        """The same of a backend of losses from logits."""
        ...

    def look_up(self, per_class: jax.Array, labels: RowLabels) -> Rows:
        """``per_class[label]``; for a label of -1, anything."""
        ...
