"""What a warp issues for one tile of an epilogue, read off a kernel's disassembly.

The epilogue is found by what it does: it is the way round a loop, or to the end where a block has
one tile at most, on which the tile's columns are read from tensor memory, each once. Where there
are several (a slice of a tile has one branch for rows whose label is in it, and one for the usual
case), the one with fewest instructions counts.
"""

import collections
import heapq
import itertools
import re
from dataclasses import dataclass, field

_LINE = re.compile(
    r"/\*[0-9a-f]{4,}\*/\s+(?P<guard>@!?U?P\w+\s+)?(?P<op>[A-Z][A-Za-z0-9_.]*)(?P<rest>.*)"
)
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")


@dataclass
class Block:
    """Instructions without a jump among them, and the numbers of the blocks that may follow."""

    ops: list[str] = field(default_factory=list)
    next: list[int] = field(default_factory=list)

    @property
    def columns(self) -> int:
        """Columns of tensor memory that it reads."""
        loads = (re.fullmatch(r"LDTM\.x(\d+)", op) for op in self.ops)
        return sum(int(load[1]) for load in loads if load)


def blocks(sass: str) -> list[Block]:
    """The control flow of one kernel."""
    found, at, jumps = [Block()], {}, []
    falls = [True]  # whether a block runs on into the next one

    def begin():
        found.append(Block())
        falls.append(True)

    for line in sass.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            if found[-1].ops:
                begin()
            at[label[1]] = len(found) - 1
        elif instruction := _LINE.search(line):
            op, rest = instruction["op"], instruction["rest"]
            found[-1].ops.append(op)
            name = op.split(".")[0]
            if name in ("BRA", "EXIT", "RET", "BRX"):
                # BRA.U UP0, `(.L_x_4): the condition is an operand.
                conditional = instruction["guard"] or "P" in rest.split("`")[0]
                if target := _TARGET.search(rest):
                    jumps.append((len(found) - 1, target[1]))
                falls[-1] = bool(conditional)
                begin()
    for number, falls_through in enumerate(falls[:-1]):
        if falls_through:
            found[number].next.append(number + 1)
    for number, label in jumps:
        found[number].next.append(at[label])
    return found


def tile_path(sass: str, columns: int) -> collections.Counter[str]:
    """How often each instruction is issued by one warp for a tile of this many columns.

    >>> loop = '''.L_x_0:
    ... /*0000*/ LDTM.x32 R4, tmem[UR4] ;
    ... /*0010*/ @P0 BRA `(.L_x_1) ;
    ... /*0020*/ FADD R4, R4, R5 ;
    ... .L_x_1:
    ... /*0030*/ MUFU.EX2 R4, R4 ;
    ... /*0040*/ BRA `(.L_x_0) ;'''
    >>> dict(tile_path(loop, 32))
    {'LDTM.x32': 1, 'BRA': 2, 'MUFU.EX2': 1}
    """
    graph = blocks(sass)
    best: tuple[int, list[int]] | None = None
    starts = [i for i, block in enumerate(graph) if block.columns]
    for to_the_end in (False, True):
        for start in starts:
            ends = {i for i, b in enumerate(graph) if "EXIT" in b.ops} if to_the_end else {start}
            found = _shortest(graph, start, ends, columns)
            if found is not None and (best is None or found[0] < best[0]):
                best = found
        if best is not None:
            break
    if best is None:
        raise ValueError(f"nothing reads {columns} columns of tensor memory")
    return collections.Counter(itertools.chain.from_iterable(graph[i].ops for i in best[1]))


def _shortest(
    graph: list[Block], start: int, ends: set[int], columns: int
) -> tuple[int, list[int]] | None:
    """The cheapest way from ``start`` to one of ``ends`` that reads ``columns``, none twice."""
    first = (start, graph[start].columns)
    queue, done = [(len(graph[start].ops), first, [start])], set()
    while queue:
        cost, (number, read), path = heapq.heappop(queue)
        if (number, read) in done:
            continue
        done.add((number, read))
        for after in graph[number].next:
            if after in ends:
                if read == columns:
                    return cost, path
                continue
            total = read + graph[after].columns
            if total <= columns and not (graph[after].columns and after in path):
                step = cost + len(graph[after].ops)
                heapq.heappush(queue, (step, (after, total), [*path, after]))
    return None
