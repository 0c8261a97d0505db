"""What a compiled program communicates, read off its text, and what the design says it should."""

import math
import re

KINDS = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute")
_BYTES = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "pred": 1}


def collectives(hlo: str) -> list[tuple[str, int]]:
    """``(kind, bytes of the larger of operand and result)`` of each array, largest first.

    XLA may send several arrays in one operation. Few scalars are left out.

    >>> collectives("a = f32[8,4]{1,0} all-reduce(b), c = (f32[], f32[]) all-reduce(d, e)")
    [('all-reduce', 128)]
    >>> collectives("a = ((f32[2], f32[3]), f32[8], f32[12]) all-gather-start(b, c)")
    [('all-gather', 48), ('all-gather', 32)]
    """
    found = []
    hlo = re.sub(r"/\*.*?\*/", "", hlo)  # numbers of a long tuple's parts
    for shapes, kind in re.findall(rf"= ([^=]*?) ({'|'.join(KINDS)})(?:-start)?\(", hlo):
        sizes = [
            _BYTES[dtype] * math.prod(int(n) for n in dims.split(",") if n)
            for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", shapes)
        ]
        if shapes.startswith("(("):  # only begun here: the operands, then the results
            sizes = list(map(max, sizes[: len(sizes) // 2], sizes[len(sizes) // 2 :]))
        found += [(kind, size) for size in sizes if size > 16]
    return sorted(found, key=lambda item: -item[1])


def expected_bytes(
    t: int, h: int, v: int, dp: int, tp: int, fields: int, gradients: bool, itemsize: int = 2
) -> dict[str, int]:
    """Bytes by what they are, for T tokens over ``dp`` and V columns over ``tp`` devices.

    ``fields`` row sums are gathered; ``dx`` in float32 and ``dw`` in its dtype are all-reduced.

    >>> expected_bytes(8192, 4096, 131072, dp=2, tp=4, fields=3, gradients=True)
    {'row sums': 196608, 'dx': 67108864, 'dw': 268435456}
    """
    moved = {"row sums": 4 * fields * t // dp * tp if tp > 1 else 0}
    if gradients:
        moved["dx"] = 4 * t // dp * h if tp > 1 else 0
        moved["dw"] = itemsize * h * v // tp if dp > 1 else 0
    return moved
