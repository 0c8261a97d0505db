"""A shape from the command line, and the call that it stands for."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

import jax
import jax.numpy as jnp

from pallas_loss import plans, select
from pallas_loss._errors import UnsupportedError
from pallas_loss._types import Layout
from pallas_loss.backends.base import LinearBackend, LinearOperands, LinearProblem
from pallas_loss.losses import LogitTransform
from pallas_loss.plans import Backward, GradientPlan

GIB = 2**30


@dataclass(frozen=True)
class Shape:
    """``T`` tokens, ``H`` hidden, ``V`` vocabulary."""

    T: int
    H: int
    V: int

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """From ``T,H,V`` or ``TxHxV``.

        >>> Shape.parse("8192,4096,128256")
        Shape(T=8192, H=4096, V=128256)
        """
        sizes = text.replace("x", ",").split(",")
        if len(sizes) != 3 or not all(n.isdecimal() and int(n) for n in sizes):
            raise argparse.ArgumentTypeError(
                f"must be three positive integers T,H,V such as 8192,4096,128256; got {text!r}"
            )
        return cls(*map(int, sizes))

    def __str__(self) -> str:
        return f"{self.T} x {self.H} x {self.V}"


@dataclass(frozen=True)
class Call:
    """``fused_linear_ce`` with its defaults, of one shape, dtype and layout."""

    shape: Shape
    dtype: str
    layout: Layout
    implementation: str | None = None

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The shapes of ``x``, ``w`` and ``labels``, in place of arrays."""
        t, h, v = self.shape.T, self.shape.H, self.shape.V
        of = jax.ShapeDtypeStruct
        w = (h, v) if self.layout == "hv" else (v, h)
        return of((t, h), self.dtype), of(w, self.dtype), of((t,), jnp.int32)

    @property
    def problem(self) -> LinearProblem:
        """The backends' view of it."""
        return LinearProblem(self.layout, jnp.dtype(self.dtype), LogitTransform())

    @property
    def operands(self) -> LinearOperands:
        """The backends' view of them."""
        return LinearOperands(*self.arguments)

    def backend(self) -> LinearBackend:
        """The backend that runs it here, or UnsupportedError."""
        if self.implementation not in (None, *select.implementations()):
            names = ", ".join(select.implementations())
            raise ValueError(
                f"--implementation must be one of {names}; got {self.implementation!r}"
            )
        return select.linear_backend(self.implementation, self.problem, self.operands)

    def plan(self, backward: Backward) -> GradientPlan:
        """Its plan for the gradients here; raises as ``plans.choose``."""
        return plans.choose(backward, None, self.backend(), self.problem, self.operands, None)

    def plans(self) -> Iterator[tuple[Backward, GradientPlan | str]]:
        """Each plan that can be asked for, or the reason why it cannot be had."""
        for backward in get_args(Backward)[1:]:
            try:
                yield backward, self.plan(backward)
            except (ValueError, UnsupportedError) as error:
                yield backward, str(error)


def table(heads: list[str], rows: list[list[str]]) -> Iterator[str]:
    """Lines with the columns set right, the first one left."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    for row in (heads, ["-" * width for width in widths], *rows):
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        yield "  ".join([row[0].ljust(widths[0]), *cells[1:]]).rstrip()
