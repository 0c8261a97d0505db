"""In the caller's shard_map, where the axes are manual: arrays are this device's shards."""

from collections.abc import Iterable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from pallas_loss._types import RowLabels, Rows
from pallas_loss._varying import vary, varying
from pallas_loss.autodiff import of_all_copies, one_of_copies
from pallas_loss.backends.base import LinearBackend, LinearOperands, LinearProblem
from pallas_loss.backends.rows import RowBackend, RowOperands
from pallas_loss.sharding.placement import Local, checked_vocab, look_up
from pallas_loss.sharding.rows import ShardRows
from pallas_loss.sharding.shard import ShardLinear
from pallas_loss.sharding.widths import Axes


@dataclass(frozen=True)
class Manual(Local):
    """``typed`` says that values have types of varying axes (``check_vma=True``).

    A gradient has the type of its argument. So what every shard of the vocabulary has alike is
    given a type that says so, and is cast to vary over the axes of the tokens: the transpose of
    that cast adds up the tokens' parts of a gradient. Without types ``autodiff.copies`` says what
    takes their place.
    """

    axis: Axes = ()
    num_shards: int = 1
    token_axes: Axes = ()
    typed: bool = True

    def share(self, t: int, v: int) -> tuple[int, int]:
        return (t * self.num_shards if self.sequence else t), v

    @property
    def one_chunk(self) -> bool:
        return self.sequence and self.num_shards > 1

    @property
    def axis_of_partial_sums(self) -> Axes:
        return () if self.sequence else self.axis

    @property
    def sequence(self) -> bool:
        return bool(self.axis) and self.axis[0] in self.token_axes

    def vocab(self, columns: int, vocab_size: int | None, of: str = "w") -> int:
        if vocab_size is not None:
            vocab_size = checked_vocab(vocab_size, columns * self.num_shards, of)
            if self.num_shards > 1 and vocab_size <= columns:
                raise ValueError(
                    f"{of} of {columns} columns on each device hold all of vocab_size="
                    f"{vocab_size}, but vocab_axis={self.axis} splits it over {self.num_shards}: "
                    "pass each device its shard"
                )
            return vocab_size
        if self.num_shards > 1 and not self.typed:
            raise ValueError(
                f"in shard_map(check_vma=False) nothing tells a shard of {of} from the whole of "
                f"it: pass vocab_size=, the size of the whole vocabulary ({columns} columns are "
                f"here, and vocab_axis={self.axis} has {self.num_shards} devices)"
            )
        return columns * self.num_shards

    def fit(self, by_class: jax.Array, vocab: int, along: int = -1) -> jax.Array:
        return by_class

    def alike[T](self, tree: T) -> T:
        if not self.typed or self.sequence:
            return tree
        return jax.tree.map(self._alike, tree)

    def of_all_tokens(self, name: str, number: jax.Array | None) -> jax.Array | None:
        if own := varying(number) & frozenset(self.token_axes):
            raise ValueError(
                f"{name} is each device's own over {sorted(own)}, named in token_axes: pass the "
                "number for all tokens, such as a lax.psum"
            )
        return self.alike(number)

    def over_devices(self, total: jax.Array) -> jax.Array:
        return lax.psum(total, self.token_axes) if self.token_axes else total

    def enter(self, problem: LinearProblem, operands: LinearOperands, vocab: int) -> LinearOperands:
        self._check(operands, "w", "x")
        rows = ["labels", "temperature", "scale", "candidates", "counted"]
        if not self.typed:
            rows.append("x")
        else:
            # The gradient of an x that varies over the vocabulary's axis is that of this device.
            operands = operands._replace(x=vary(operands.x, self._tokens(operands)))
        return self._entered(operands, rows, ("w", "bias", "class_weights"))

    def enter_rows(self, operands: RowOperands) -> RowOperands:
        self._check(operands, "logits", "logits")
        self._check(operands, "target", "target")
        rows = ("labels", "label_weight", "temperature", "target_temperature")
        return self._entered(operands, rows, ("logits", "target", "class_weights"))

    def into[T](self, tree: T, *beside) -> T:
        if self.typed:
            return vary(self.alike(tree), self._tokens(tree, beside))
        if self.sequence or self.num_shards == 1:
            return tree
        # Each leaf by itself, that one which is not differentiated stays so.
        return jax.tree.map(lambda v: one_of_copies(self.num_shards, v), tree)

    def out_of[T](self, tree: T) -> T:
        if self.typed or self.sequence or self.num_shards == 1:
            return tree
        return of_all_copies(self.axis, tree)

    def all_agree(self, flag: jax.Array) -> jax.Array:
        named = dict.fromkeys(self.axis + self.token_axes)
        axes = tuple(a for a in named if not self.typed or a in varying(flag))
        return lax.pmin(flag.astype(jnp.int32), axes) > 0 if axes else flag

    def backend(self, inner: LinearBackend, vocab: int) -> LinearBackend:
        shape = (self.axis, self.num_shards, self.token_axes, (), self.sequence)
        return ShardLinear(inner, vocab, *shape, rule_outside=False)

    def row_backend(self, inner: RowBackend, vocab: int) -> RowBackend:
        return ShardRows(inner, vocab, self.axis, self.num_shards)

    def look_up(self, per_class: jax.Array, labels: RowLabels) -> Rows:
        return look_up(per_class, labels, self.axis, self.sequence)

    def _check(self, operands, columns: str, rows: str) -> None:
        """That the one is split over the vocabulary's axis, and the other over the tokens'."""
        if not self.typed:
            return
        by_class, by_token = getattr(operands, columns), getattr(operands, rows)
        if by_class is None:
            return
        if self.num_shards > 1 and not frozenset(self.axis) <= varying(by_class):
            raise ValueError(
                f"{columns} is the same on all {self.num_shards} devices of vocab_axis="
                f"{self.axis}: pass each its shard (in_specs), or leave vocab_axis out"
            )
        if missing := frozenset(self.token_axes) - varying(by_token):
            raise ValueError(
                f"{rows} is the same on all devices of {sorted(missing)}, named in token_axes: its "
                "tokens would be counted once for each"
            )

    def _tokens(self, *trees) -> frozenset[str]:
        """The axes over which rows vary."""
        return varying(trees) - (frozenset() if self.sequence else frozenset(self.axis))

    def _entered[T: (LinearOperands, RowOperands)](
        self, operands: T, rows: Iterable[str], columns: Iterable[str]
    ) -> T:
        take = lambda names: {k: getattr(operands, k) for k in names}  # noqa: E731
        entered = operands._replace(**self.into(take(rows), operands))
        if not self.typed:
            return entered
        over = self._tokens(operands) | frozenset(self.axis)
        return entered._replace(**vary(take(columns), over))

    def _alike(self, v: jax.Array) -> jax.Array:
        """What every shard has, typed so; the values were equal before."""
        over = tuple(sorted(varying(v) & frozenset(self.axis)))
        if not over:
            return v
        if v.dtype == bool:
            return lax.pmax(v.astype(jnp.int32), over) > 0
        return lax.pmean(v, over) if jnp.issubdtype(v.dtype, jnp.floating) else lax.pmax(v, over)
