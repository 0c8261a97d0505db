"""The configs for Blackwell. They follow from ``benchmarks/BLACKWELL.md``; none was timed yet."""

from pallas_loss.tuning.configs import BlackwellConfig


def row_sums(extras: int) -> BlackwellConfig:
    """The forward sweep; ``extras`` counts what it does to a logit beside plain cross-entropy."""
    return BlackwellConfig(group=2, epilogue_n=_slice(extras))


def dlogits(extras: int) -> BlackwellConfig:
    """The kernels that write a number a logit: d-logits, and the forward that keeps e^(z-m)."""
    return BlackwellConfig(epilogue_n=_slice(extras))


def exponentials(extras: int) -> BlackwellConfig:
    """The forward that keeps ``e^(z - z_y)``."""
    return BlackwellConfig(group=2, epilogue_n=_slice(extras))


def product(rows: int, cols: int, multiprocessors: int) -> BlackwellConfig:
    """dx and dw."""
    return BlackwellConfig()


def product_time(rows: int, cols: int, multiprocessors: int) -> float:
    """The time of a product a unit of its depth, in units of one column of a tile."""
    config = product(rows, cols, multiprocessors)
    m, n = config.tiles(rows, cols)
    return -(-m * n // multiprocessors) * config.block_n


def _slice(extras: int) -> int:
    # A thread holds a whole row of the slice; what 64 columns leave of its registers is soon spent.
    return 64 if extras == 0 else 32
