"""Frozen tile configurations; each refuses bad values at birth."""

from dataclasses import dataclass
from typing import ClassVar, Literal


def _require_positive_int(config, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int) or value < 1:
            raise ValueError(
                f"{type(config).__name__}.{name} must be a positive integer, got {value!r}"
            )


@dataclass(frozen=True)
class XlaConfig:
    """Tiles of the XLA sweep. One float32 tile of logits, token_tile x vocab_tile, is live.

    1024 x 4096 keeps that tile at 16 MiB and the slice of ``w`` at 64 MiB for H = 4096 in float32,
    and is large enough to fill a matrix unit.
    """

    token_tile: int = 1024
    vocab_tile: int = 4096

    def __post_init__(self):
        _require_positive_int(self, "token_tile", "vocab_tile")


# What one block may use on Hopper and on Blackwell, less 1 KiB for barriers and alignment.
SMEM_BYTES = 232_448 - 1024


@dataclass(frozen=True)
class HopperConfig:
    """Persistent blocks, one a multiprocessor: two compute warpgroups and one that loads.

    A warpgroup multiplies a tile_m x tile_n tile in steps of tile_k; the two lie side by side
    along ``split``. Of its ``stages`` of shared memory one is handed back to the loader while the
    next is multiplied, so a single one would wait for itself. ``group`` is how many column tiles a
    block folds before it writes its sums.
    Tiles are walked in a snake of ``snake_width`` along ``snake_minor``, so that the blocks in
    flight share operands in L2. The epilogue works on ``epilogue_n`` columns at a time.

    A ``cluster`` of two blocks takes tiles one below the other and loads the columns' operand once
    for both, which takes a third off what passes from L2.
    """

    tile_m: int = 128
    tile_n: int = 128
    tile_k: int = 64
    stages: int = 4
    split: Literal["m", "n"] = "m"
    group: int = 1
    snake_minor: Literal["m", "n"] = "m"
    snake_width: int = 16
    epilogue_n: int = 64
    cluster: int = 1

    def __post_init__(self):
        _require_positive_int(self, "stages", "group", "snake_width")
        for name, multiple in (("tile_m", 64), ("tile_n", 64), ("tile_k", 64), ("epilogue_n", 32)):
            _require_positive_int(self, name)
            if getattr(self, name) % multiple:
                raise ValueError(f"HopperConfig.{name} must be a multiple of {multiple}: {self}")
        if self.stages < 2:
            raise ValueError(f"HopperConfig.stages must be at least 2: {self}")
        if self.tile_n % self.epilogue_n:
            raise ValueError(f"HopperConfig.epilogue_n must divide tile_n: {self}")
        if self.cluster not in (1, 2):
            raise ValueError(f"HopperConfig.cluster must be 1 or 2: {self}")
        if self.split not in ("m", "n") or self.snake_minor not in ("m", "n"):
            raise ValueError(f"HopperConfig.split and snake_minor must be 'm' or 'n': {self}")
        if self.smem_bytes() > SMEM_BYTES:
            raise ValueError(f"{self} needs {self.smem_bytes()} bytes of shared memory")

    @property
    def block_m(self) -> int:
        """Rows of one block's tile."""
        return self.tile_m * (2 if self.split == "m" else 1)

    @property
    def block_n(self) -> int:
        """Columns of one block's tile."""
        return self.tile_n * (2 if self.split == "n" else 1)

    def tiles(self, rows: int, cols: int) -> tuple[int, int]:
        """How many tiles cover an output; rows in whole clusters."""
        m = -(-rows // (self.block_m * self.cluster)) * self.cluster
        return m, -(-cols // self.block_n)

    def smem_bytes(self, store_bytes: int = 0) -> int:
        """Shared memory of one block for 16-bit operands, with ``store_bytes`` for its output."""
        return self.stages * (self.block_m + self.block_n) * self.tile_k * 2 + store_bytes


@dataclass(frozen=True)
class RowConfig:
    """Persistent blocks, one a multiprocessor, that own a row of logits at a time.

    A row is dealt to ``warpgroups`` in stretches, of which a warp takes ``lines`` lines, in
    ``steps`` equal ones that are in registers. A warpgroup has ``slots`` for a stretch in shared
    memory. A row that leaves less than ``ahead`` of them for the next row passes in part through
    ``ring`` slots. Of the stretches that are then loaded twice, L2 is asked to keep ``in_l2``.
    """

    lines: int
    steps: int = 1
    warpgroups: int = 4
    slots: int = 7
    ring: int = 4
    ahead: int = 1
    in_l2: int = 8

    def __post_init__(self):
        _require_positive_int(
            self, "lines", "steps", "warpgroups", "slots", "ring", "ahead", "in_l2"
        )
        if self.lines % self.steps or self.lines == self.steps:
            # Mosaic (JAX 0.11.2) finds no layout for a single line.
            raise ValueError(f"RowConfig.steps must divide lines into two or more: {self}")
        if self.warpgroups > 8:
            raise ValueError(f"RowConfig.warpgroups must be at most 8, 1024 threads: {self}")
        if self.lines > 64:  # none longer has been tried
            raise ValueError(f"RowConfig.lines must be at most 64: {self}")
        if self.ring < 2:
            raise ValueError(f"RowConfig.ring must be at least 2: one is stored, one read: {self}")
        if self.ring + self.ahead > self.slots:
            raise ValueError(f"RowConfig.slots must be at least ring + ahead: {self}")
        # One barrier for each slot of a warpgroup; a warp remembers the phases of 32.
        if self.warpgroups * self.slots > 32:
            raise ValueError(f"RowConfig has more than 32 slots: {self}")

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return 4 * self.warpgroups

    def smem_bytes(self, line_bytes: int) -> int:
        """Shared memory of one block; ``line_bytes`` counts a line of each input."""
        # 32 places at most tell of two rows at a time, at most 8 float32 sums of each.
        exchange = 2 * 8 * 4 * 32
        return self.slots * self.warps * self.lines * line_bytes + exchange


@dataclass(frozen=True)
class TritonRowConfig:
    """Triton programs on rows of logits, ``block`` columns at a time, a power of two.

    ``fused`` takes sums and gradient in one launch. ``interpret`` runs on any platform, slowly.
    """

    block: int
    num_warps: int = 8
    num_stages: int = 2
    fused: bool = True
    interpret: bool = False

    def __post_init__(self):
        _require_positive_int(self, "block", "num_warps", "num_stages")
        if self.block & (self.block - 1) or self.num_warps & (self.num_warps - 1):
            raise ValueError(f"TritonRowConfig.block and num_warps must be powers of two: {self}")
        if self.block > 16384:
            raise ValueError(f"TritonRowConfig.block must be at most 16384: {self}")


# Tensor memory of a multiprocessor, in columns of 128 lanes of 32 bits.
TMEM_COLUMNS = 512


@dataclass(frozen=True)
class BlackwellConfig:
    """Persistent blocks, one a multiprocessor: two epilogue warpgroups and one that multiplies.

    A block multiplies a tile of 128 rows by block_n columns in steps of tile_k into tensor memory,
    which holds two of them: the epilogue reads one while the next fills. Each epilogue warpgroup
    has half of the columns, ``epilogue_n`` at a time. ``group``, ``snake_minor`` and
    ``snake_width`` are those of ``HopperConfig``.

    With ``collective``, two blocks, one below the other, multiply a tile of 256 rows together: each
    loads its own rows and half of the columns' operand, which the tensor cores of both read: what a
    shared load would save, and half of that operand's shared memory too.
    """

    block_n: int = 256
    tile_k: int = 64
    stages: int = 5
    group: int = 1
    snake_minor: Literal["m", "n"] = "m"
    snake_width: int = 8
    epilogue_n: int = 64
    collective: bool = True

    # What a Hopper config may choose: the epilogues ask.
    block_m: ClassVar[int] = 128
    tile_m: ClassVar[int] = 128
    split: ClassVar[Literal["m", "n"]] = "n"

    def __post_init__(self):
        _require_positive_int(self, "stages", "group", "snake_width")
        for name, multiple in (("block_n", 64), ("tile_k", 64), ("epilogue_n", 32)):
            _require_positive_int(self, name)
            if getattr(self, name) % multiple:
                raise ValueError(f"BlackwellConfig.{name} must be a multiple of {multiple}: {self}")
        if self.stages < 2:
            raise ValueError(f"BlackwellConfig.stages must be at least 2: {self}")
        if self.tile_n % self.epilogue_n:
            raise ValueError(f"BlackwellConfig.epilogue_n must divide block_n / 2: {self}")
        if self.snake_minor not in ("m", "n"):
            raise ValueError(f"BlackwellConfig.snake_minor must be 'm' or 'n': {self}")
        if self.tmem_columns > TMEM_COLUMNS:
            raise ValueError(f"{self} needs {self.tmem_columns} columns of tensor memory")
        if self.smem_bytes() > SMEM_BYTES:
            raise ValueError(f"{self} needs {self.smem_bytes()} bytes of shared memory")

    @property
    def cluster(self) -> int:
        """Blocks that take tiles one below the other."""
        return 2 if self.collective else 1

    @property
    def tile_n(self) -> int:
        """Columns of one warpgroup's part of a tile."""
        return self.block_n // 2

    @property
    def load_n(self) -> int:
        """Columns' operand that one block holds."""
        return self.block_n // self.cluster

    @property
    def tmem_columns(self) -> int:
        """Tensor memory of two tiles."""
        return 2 * self.block_n

    def tiles(self, rows: int, cols: int) -> tuple[int, int]:
        """How many tiles cover an output; rows in whole clusters."""
        m = -(-rows // (self.block_m * self.cluster)) * self.cluster
        return m, -(-cols // self.block_n)

    def smem_bytes(self) -> int:
        """Shared memory of one block for 16-bit operands and the buffers of its stores.

        These are two of 128 rows by 128 bytes for each warpgroup.
        """
        operands = self.stages * (self.block_m + self.load_n) * self.tile_k * 2
        return operands + 2 * 2 * 128 * 128
