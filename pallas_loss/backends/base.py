"""The few questions a backend answers."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from pallas_loss._types import Array, Candidates, Float, Int, Layout, RowLabels, RowMask, Rows
from pallas_loss.losses import DLogits, LogitTransform
from pallas_loss.row_sums import NEG_INF, RowSums


@dataclass(frozen=True)
class LinearProblem:
    """What is static about a loss from hidden states; hashable, so that equal calls share a trace.

    ``moments`` are the optional row sums wanted (``RowSums``). ``lean`` asks for gradients in less
    memory, if at less speed: something large is kept beside them.
    """

    layout: Layout
    compute_dtype: jnp.dtype
    transform: LogitTransform
    moments: frozenset[str] = frozenset()
    lean: bool = False

    @property
    def exponentials_dtype(self) -> jnp.dtype:
        """What ``e^(z - shift)`` is kept in: a dtype with the exponent range of float32."""
        wide = self.compute_dtype == jnp.float32
        return jnp.dtype(jnp.float32 if wide else jnp.bfloat16)


class LinearOperands(NamedTuple):
    """The arrays of a loss from hidden states.

    ``labels`` are int32 in [0, V), or -1 for a label that no column matches; so are the K
    ``candidates`` of each row, whose log-probabilities are wanted. ``class_weights`` weigh the
    columns in the sum ``u``. ``scale`` (scalar) and ``temperature`` (scalar or ``[T]``),
    float32, are given where they are traced; the static ones live in the transform.

    ``counted`` says which rows count; the others, whose ``x`` is 0, need not be computed. Where
    the rows that count have been put first (``active.Order``), ``num_active`` is their number.
    """

    x: Float[Array, "T H"]
    w: Float[Array, "H V"] | Float[Array, "V H"]
    labels: RowLabels
    bias: Float[Array, " V"] | None = None
    class_weights: Float[Array, " V"] | None = None
    scale: Float[Array, ""] | None = None
    temperature: Float[Array, ""] | Rows | None = None
    candidates: Int[Array, "T K"] | None = None
    counted: RowMask | None = None
    num_active: Int[Array, ""] | None = None

    def sizes(self, layout: Layout) -> tuple[int, int, int]:
        """``(T, H, V)``."""
        t, h = self.x.shape
        return t, h, self.w.shape[1 if layout == "hv" else 0]

    def label_shift(self, shift: Rows) -> Rows:
        """``z_label`` of rows that were shifted by it: no column holds a label of -1."""
        return jnp.where(self.labels < 0, NEG_INF, shift)


class Wanted(NamedTuple):
    """Which gradients are wanted; the work of the others is not done."""

    dx: bool
    dw: bool
    dbias: bool


class LinearGradients(NamedTuple):
    """``dx``, ``dbias`` in float32, ``dw`` in the dtype and layout of ``w``; None if unwanted."""

    dx: Float[Array, "T H"] | None
    dw: jax.Array | None
    dbias: Float[Array, " V"] | None


class Stored(NamedTuple):
    """``e^(z - m)`` of a whole sweep, from which the backward need not form the logits again.

    ``e [T, columns]`` is bfloat16, whose exponent range is float32's; ``m [slices, T]`` float32 is
    the maximum of each row in each of ``slices`` equal parts of the columns, so that no element
    overflows. Columns past the vocabulary hold 0 or are not read.
    """

    e: Float[Array, "T columns"]
    m: Float[Array, "slices T"]

    @property
    def width(self) -> int:
        """The columns of one slice."""
        return self.e.shape[1] // self.m.shape[0]


class Backward(NamedTuple):
    """What gradients are made from, beside the operands.

    Fields:
        coefficients: those of ``dL/d(x @ w + b)``, up to the soft cap's slope.
        unscale: where given, multiplies the float32 accumulators of all gradients.
        stored: what ``store`` left; without it the logits are formed again.
        at_candidates: is added to d-logits at the columns ``operands.candidates``.
    """

    coefficients: DLogits
    unscale: Float[Array, ""] | None = None
    stored: Stored | None = None
    at_candidates: Float[Array, "T K"] | None = None


class LinearBackend(Protocol):
    """``z = transform(x @ w + b)`` swept over the vocabulary without storing it.

    Of a row at or past ``num_active``, sums are finite and the rest means nothing; the coefficients
    that it is given are finite too.
    """

    @property
    def name(self) -> str: ...

    @property
    def prefers_in_forward(self) -> bool:
        """Whether that plan is its fastest, and keeping ``[T, V]`` no breach."""
        ...

    @property
    def skips_rows(self) -> bool:
        """Whether rows past ``num_active`` cost nothing."""
        ...

    def unsupported(self, problem: LinearProblem, operands: LinearOperands) -> str | None:
        """Why this call cannot run here, or None if it can."""
        ...

    def row_sums(self, problem: LinearProblem, operands: LinearOperands) -> RowSums:
        """The forward: the sums of every row over this device's columns."""
        ...

    def store(self, problem: LinearProblem, operands: LinearOperands) -> tuple[RowSums, Stored]:
        """``row_sums``, and what spares the backward a product: T V 2 bytes."""
        ...

    def exponentials(
        self, problem: LinearProblem, operands: LinearOperands, shift: Rows
    ) -> tuple[RowSums, Float[Array, "rows columns"]]:
        """``row_sums`` relative to ``shift``, and ``e^(z - shift)`` of every column.

        With a soft cap the exponentials are times its slope, ``1 - tanh^2``. They are bfloat16,
        whose exponent range is float32's, or float32 where that is the compute dtype. What lies
        past T and past V holds 0, or is finite. ``z_label`` is the shift: the rows whose label
        these columns hold were shifted by its logit.
        """
        ...

    def from_exponentials(
        self,
        problem: LinearProblem,
        operands: LinearOperands,
        e: Float[Array, "rows columns"],
        coefficients: DLogits,
        wanted: Wanted,
        dw_dtype: jnp.dtype,
    ) -> LinearGradients:
        """The gradients from what ``exponentials`` left; ``dw`` in ``dw_dtype``.

        ``coefficients`` have no ``beta``, and a soft cap's slope in ``at_label``.
        """
        ...

    def candidate_logits(self, problem: LinearProblem, operands: LinearOperands) -> Candidates:
        """``z`` at each row's candidates, float32; anything at one of -1."""
        ...

    def gradients(
        self, problem: LinearProblem, operands: LinearOperands, wanted: Wanted, backward: Backward
    ) -> LinearGradients:
        """The wanted gradients, from what ``backward`` says."""
        ...
