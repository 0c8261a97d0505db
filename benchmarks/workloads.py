"""The shapes that benchmarks, tests and the tuner share, each with one name."""

from collections.abc import Sequence
from dataclasses import dataclass

# The data of a workload, whatever library makes it: logits of a trained head are neither flat nor
# all alike. `w` is scaled so that logits have this standard deviation, and the label's own logit is
# raised by a margin drawn uniformly from 0 to `2 * margin`, around the log-sum-exp: half of the
# tokens are predicted with confidence, half are not.
LOGIT_STD = 2.5


@dataclass(frozen=True)
class Workload:
    """A linear head: ``T`` tokens, ``H`` hidden, ``V`` vocabulary."""

    name: str
    T: int
    H: int
    V: int
    tags: frozenset[str] = frozenset()

    @property
    def shape(self) -> str:
        """``TxHxV``."""
        return f"{self.T}x{self.H}x{self.V}"

    @property
    def gemm_flops(self) -> int:
        """Of one product, be it logits, dx or dw."""
        return 2 * self.T * self.H * self.V


def _linear(name: str, t: int, h: int, v: int, *tags: str) -> Workload:
    return Workload(name, t, h, v, frozenset({"linear", *tags}))


# In the order in which they are run, so that a run cut short has the telling ones. `tokens` is the
# sweep over T at one head, `vocab` the sweep over heads at one T.
LINEAR: tuple[Workload, ...] = (
    _linear("llama3-8192", 8192, 4096, 128256, "tokens", "vocab", "tune"),
    _linear("gemma3-8192", 8192, 1152, 262144, "vocab", "tune"),
    _linear("llama3-4096", 4096, 4096, 128256, "tokens", "tune"),
    _linear("qwen2-8192", 8192, 3584, 152064, "vocab", "tune"),
    _linear("gptoss-8192", 8192, 2880, 201088, "vocab", "tune"),
    _linear("wide-8192", 8192, 8192, 131072, "vocab", "tune"),
    _linear("llama2-4096", 4096, 2048, 32000, "tune"),
    _linear("llama3-1024", 1024, 4096, 128256, "tokens", "tune"),
    _linear("llama3-16384", 16384, 4096, 128256, "tokens"),
    _linear("llama3-32768", 32768, 4096, 128256, "tokens"),
)
# What one GPU has of a head of 262144 words over 1, 2, 4 and 8: by how much the kernels lose when
# their part of the vocabulary is small is the half of scaling that one GPU can tell.
SHARDS: tuple[Workload, ...] = tuple(
    Workload(f"tp{n}-262144", 8192, 4096, 262144 // n, frozenset({"shards"})) for n in (1, 2, 4, 8)
)


@dataclass(frozen=True)
class RowWorkload:
    """Logits in memory: ``T`` rows of ``V``."""

    T: int
    V: int

    @property
    def name(self) -> str:
        """``TxV``."""
        return f"{self.T}x{self.V}"


# The first three are the shapes of the published comparison of these kernels.
ROWS: tuple[RowWorkload, ...] = tuple(
    RowWorkload(t, v)
    for t, v in (
        (4096, 32768),
        (4096, 65536),
        (4096, 131072),
        (8192, 128256),
        (16384, 32000),
        (512, 262144),
    )
)


def select_rows(selection: str) -> tuple[RowWorkload, ...]:
    """``all``, or ``TxV`` shapes with commas between.

    >>> select_rows("8x100")
    (RowWorkload(T=8, V=100),)
    """
    if selection == "all":
        return ROWS
    sizes = [word.split("x") for word in selection.split(",")]
    if any(len(size) != 2 or not all(n.isdecimal() and int(n) for n in size) for size in sizes):
        raise ValueError(f"row workloads are TxV shapes, got {selection!r}")
    return tuple(RowWorkload(int(t), int(v)) for t, v in sizes)


TINY = Workload("tiny", 32, 16, 64, frozenset({"cpu"}))
ALL = (*LINEAR, *SHARDS, TINY)


def select(selection: str | Sequence[str]) -> tuple[Workload, ...]:
    """Workloads by name, by tag, by ``TxHxV``, or ``all``; commas between several.

    >>> [w.shape for w in select("tiny,128x64x1000")]
    ['32x16x64', '128x64x1000']
    """
    if isinstance(selection, str):
        selection = selection.split(",")
    chosen: dict[str, Workload] = {}
    for word in selection:
        found = [w for w in ALL if word == w.name or word in w.tags or word == w.shape] or _parse(
            word
        )
        if word == "all":
            found = [*LINEAR]
        if not found:
            names = ", ".join(w.name for w in ALL)
            raise ValueError(f"no workload, tag or TxHxV shape {word!r}; there are {names}")
        chosen |= {w.name: w for w in found}
    return tuple(chosen.values())


def _parse(word: str) -> list[Workload]:
    sizes = word.split("x")
    if len(sizes) != 3 or not all(size.isdecimal() and int(size) > 0 for size in sizes):
        return []
    return [Workload(word, *map(int, sizes))]
