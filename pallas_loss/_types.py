"""Array aliases. Letters are the axes: T tokens, H hidden, V vocabulary; lower-case n is a tile."""

from typing import Literal

from jaxtyping import Array, Bool, Float, Int

Rows = Float[Array, " T"]
RowLabels = Int[Array, " T"]
RowMask = Bool[Array, " T"]
Candidates = Float[Array, "T K"]
Tile = Float[Array, "T n"]
Scalar = Float[Array, ""]

Layout = Literal["hv", "vh"]
Reduction = Literal["mean", "sum", "none"]
