"""The configs that measurements and the memory predicate lead to."""

from pallas_loss.tuning.configs import HopperConfig


def row_sums() -> HopperConfig:
    """The forward sweep: the warpgroups split the rows, so each keeps whole rows of a tile."""
    return HopperConfig(group=4)


def dlogits() -> HopperConfig:
    """The d-logits kernel, whose 64-column store buffers take 32 KiB of shared memory."""
    return HopperConfig(stages=4, epilogue_n=64)


def gemm() -> HopperConfig:
    """dx and dw, with 32 KiB of store buffers beside four stages."""
    return HopperConfig()


def vocab_split(t: int, h: int, v: int) -> int:
    """Columns of d-logits that are live at once.

    The float32 accumulator of dx is read and written once a split, which costs 700/split of that
    product's time; from 8192 columns on that is under 9% of one product in four. Up to 2 H columns
    d-logits take no more memory than that accumulator.
    """
    split = max(8448, 2 * h)
    return v if v <= split else split - split % 128
