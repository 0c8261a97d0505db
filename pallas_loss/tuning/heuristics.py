"""The configs that measurements lead to; ``benchmarks/LOG.md`` has the alternatives."""

from collections.abc import Callable
from dataclasses import replace

from pallas_loss.tuning.configs import SMEM_BYTES, HopperConfig, RowConfig, TritonRowConfig

# Tiles of 128 x 256, a warpgroup's 64 rows against all columns, read least shared memory per
# product. 192 columns cost 4% of throughput and pay where they leave fewer blocks idle.
_WIDTHS = {256: 1.0, 192: 1.04}


def row_sums(extras: int) -> HopperConfig:
    """The forward sweep; ``extras`` counts what it does to a logit beside plain cross-entropy.

    The widest epilogue that does not spill: 256 columns at once, else slices of 64 or 32, and for
    the heaviest mixtures an accumulator of half the registers.
    """
    epilogue_n = 256 if extras <= 2 else 64 if extras <= 3 else 32
    return _tile(256 if extras <= 8 else 128, group=2, epilogue_n=epilogue_n)


def dlogits(extras: int) -> HopperConfig:
    """The kernels that write a number a logit: d-logits, and the forward that keeps e^(z-m)."""
    return _tile(256, epilogue_n=64 if extras <= 2 else 32)


def exponentials(extras: int) -> HopperConfig:
    """The forward that keeps ``e^(z - z_y)``."""
    return _tile(256, group=2, epilogue_n=64 if extras <= 2 else 32)


def product(rows: int, cols: int, multiprocessors: int) -> HopperConfig:
    """dx and dw."""
    configs = [_tile(n) for n in _WIDTHS]
    return min(configs, key=lambda config: _cost(config, rows, cols, multiprocessors))


def rows(total: int, line_bytes: int, step: int) -> RowConfig:
    """For rows of ``total`` lines, in steps of at most ``step`` lines.

    Slots of 8 KiB a warpgroup: 32 KiB that the block waits for, sums or stores at a time, and seven
    of them fill shared memory. Where little of a row is loaded again, a long ring waits less (1 to
    3%, H200, two stretches of eight); where much is, a shorter one leaves it more of L2 (3 to 4%,
    ten of sixteen). Of ten, L2 is to keep eight, 33 MiB for all blocks: with all ten they drive
    each other out (2%), with four it has room left (4%).
    """
    warps = RowConfig(2).warps
    most = max(min(2048 // line_bytes, -(-total // warps)), 2)
    lines = most if most <= step else most // step * step
    steps = -(-lines // step)
    for slots in (8, 7, 6):
        config = RowConfig(lines, steps, slots=slots)
        if config.smem_bytes(line_bytes) <= SMEM_BYTES:
            again = -(-total // (warps * lines)) - (slots - config.ahead)
            return replace(config, ring=slots - (2 if again <= 4 else 3))
    raise ValueError(f"lines of {line_bytes} bytes are too wide")


def paired_rows(total: int, line_bytes: int, step: int, sums_only: bool) -> RowConfig:
    """For rows beside a target, whose sums take as long as their loads.

    Four lines of 1 KiB at once instead of two spare a fifth of the instructions, but three slots of
    them fill shared memory. So they are for rows of at most two stretches, which leave a slot for
    the next row. Sums alone wait for memory: they take stretches as long (0 to 2%), two lines at a
    time, for with four reverse KL spills at V = 32768 (half as long again).
    """
    wide = RowConfig(4, slots=3, ring=2)
    stays = total <= (wide.slots - wide.ahead) * wide.warps * wide.lines
    if (sums_only or stays) and total > wide.warps * step and line_bytes == 1024:
        return replace(wide, steps=2) if sums_only else wide
    return rows(total, line_bytes, step)


def triton_rows(t: int, v: int) -> TritonRowConfig:
    """Blocks of at most 8192 columns, 32 a thread; a launch for each sweep where rows are few."""
    block = min(1 << max(v - 1, 1).bit_length(), 8192)
    return TritonRowConfig(block, num_warps=max(block // 1024, 1), fused=t >= 256)


def product_time(rows: int, cols: int, multiprocessors: int) -> float:
    """The time of a product a unit of its depth, in units of one column of a tile."""
    return _cost(product(rows, cols, multiprocessors), rows, cols, multiprocessors)


def vocab_split(
    t: int, h: int, v: int, time_of: Callable[[int, int], float], lean: bool = False
) -> int:
    """Columns of d-logits that are live at once, a multiple of 256.

    The float32 accumulator of dx is read and written once a split, which costs 700/split of that
    product's time, so 8448 columns are the least that is wanted, and 132 MiB of d-logits, or what
    dx takes, may be used; half as much where memory counts for more (``lean``). Among the sizes
    near that bound, the one that leaves fewest blocks idle; ``time_of`` is the chip's
    ``product_time`` of rows and columns.
    """
    bound = max((132 << 20) // (2 * t), 8448, 2 * h) // (512 if lean else 256) * 256
    if v <= bound:
        return v

    def time(split: int) -> float:
        def of(columns: int) -> float:
            sizes = ((t, columns, h), (t, h, columns), (columns, h, t))
            return sum(k * time_of(m, n) for m, n, k in sizes)

        splits, rest = divmod(v, split)
        return splits * of(split) + (of(rest) if rest else 0.0)

    return min(range(bound, bound * 3 // 4, -256), key=time)


def _tile(tile_n: int, group: int = 1, epilogue_n: int = 64) -> HopperConfig:
    return HopperConfig(
        tile_m=64,
        tile_n=tile_n,
        stages=3,
        cluster=2,
        snake_width=8,
        group=group,
        epilogue_n=epilogue_n,
    )


def _cost(config: HopperConfig, rows: int, cols: int, multiprocessors: int) -> float:
    """The time of a product in units of one column of a tile: rounds of tiles times their width."""
    m, n = config.tiles(rows, cols)
    rounds = -(-m * n // multiprocessors)
    return rounds * config.block_n * _WIDTHS[config.block_n]
