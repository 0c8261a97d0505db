"""The configs for Blackwell. They follow from ``benchmarks/BLACKWELL.md``; none was timed yet."""

from pallas_loss.tuning.configs import BlackwellConfig

# Pairs of blocks on tiles of 256 x 256 are expected to wait for their products. Narrower they would
# wait for L2, so much longer a column, which pays where they leave fewer blocks idle.
_WIDTHS = {256: 1.0, 192: 1.08, 128: 1.39}


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
    configs = [BlackwellConfig(block_n=n, epilogue_n=32) for n in _WIDTHS]
    return min(configs, key=lambda config: _cost(config, rows, cols, multiprocessors))


def product_time(rows: int, cols: int, multiprocessors: int) -> float:
    """The time of a product a unit of its depth, in units of one column of a tile."""
    return _cost(product(rows, cols, multiprocessors), rows, cols, multiprocessors)


def _cost(config: BlackwellConfig, rows: int, cols: int, multiprocessors: int) -> float:
    m, n = config.tiles(rows, cols)
    return -(-m * n // multiprocessors) * config.block_n * _WIDTHS[config.block_n]


def _slice(extras: int) -> int:
    # A thread holds a whole row of the slice; what 64 columns leave of its registers is soon spent.
    return 64 if extras == 0 else 32
