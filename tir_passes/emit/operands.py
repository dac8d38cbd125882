"""Where the stages find their inputs: [N]-vectors and scalars, [M, 1] columns, [M, N] tiles.

What a pass needs of a few pairs of chunks is loaded before they are computed: loads in flight together, instead of one
latency for each chunk.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from tvm_comfuse.tir_passes.emit.dsl import bound, do, f32, loop, registers, store, u32, when
from tvm_comfuse.tir_passes.emit.fragment import BOX_PAIRS, ElementPlace
from tvm_comfuse.tir_passes.emit.staging import NO_TILE

Expr = Any
#: columns of a pair of chunks
PAIR_COLUMNS = 16
#: registers that loads in flight may take, beside 128 accumulators
IN_FLIGHT = 48


def fill_vectors(kernel: Any, threads: int, thread: Expr) -> None:
    """This CTA's columns of each [N]-vector, as float32, zeros behind N; by `threads` threads, of which this is number
    `thread`.

    A lane needs four columns of each pair of chunks.  They are put next to each other, so that it gets them with one load.
    """
    count = kernel.plan.cta_columns
    with loop(-(-count // threads), "j") as j:
        at = j * threads + thread
        with when(at < count):
            column = kernel.place.first_column + at
            slot = _vector_slot(at, kernel.plan.w_order == "quads")
            # all loads first, so that they are in flight together
            values = registers([max(len(kernel.vectors), 1)], "float32", "elements")
            inside = column < kernel.spec.n if kernel.geometry.ragged_n else None
            for index, buffer in enumerate(kernel.vectors):
                _fetch(kernel, values, (index,), buffer, (column,), inside)
            for index, view in enumerate(kernel.vector_views):
                store(view, T.cast(values[index], str(view.dtype)), slot)


def _fetch(kernel: Any, cells: Any, at: tuple[int, ...], buffer: Any, where: tuple[Expr, ...], inside: Any) -> None:
    """cells[at] = an element of an operand as float32; zero where it is not `inside` (None: it always is).

    The compiler may take an operand for constant while the kernel runs, and load it early.  In a dependent launch the kernel
    in front may still be writing it, so the load is an instruction, which stays behind the wait.
    """
    if not kernel.plan.dependent_launch:
        value = T.cast(buffer[where], "float32")
        store(cells, value if inside is None else T.if_then_else(inside, value, f32(0.0)), *at)
        return
    store(cells, f32(0.0), *at)
    with when(inside) if inside is not None else nullcontext():
        address, dtype = buffer.ptr_to(list(where)), str(buffer.dtype)
        if dtype == "float32":
            do(T.ptx.ld.global_.f32(cells[at], address))
        else:
            bits = registers([1], "uint16", "bits")
            do(T.ptx.ld.global_.u16(bits[0], address))
            store(cells, unpack(u32(bits[0]), dtype)[0], *at)


def _vector_slot(at: Expr, quads: bool) -> Expr:
    """Where column `at` of a vector is kept: first by pair of chunks, then by lane of the quad."""
    if quads:
        return at // 32 * 32 + at // 4 % 2 * PAIR_COLUMNS + at // 8 % 4 * 4 + at % 4
    return at // PAIR_COLUMNS * PAIR_COLUMNS + at % 8 // 2 * 4 + at // 8 % 2 * 2 + at % 2


def load_scalars(kernel: Any) -> Any:
    """Every [1] operand in a register."""
    cells = registers([max(len(kernel.scalars), 1)], "float32", "scalars")
    for index, buffer in enumerate(kernel.scalars):
        _fetch(kernel, cells, (index,), buffer, (0,), None)
    return cells


def column_registers(kernel: Any, rows: int) -> Any:
    """Room for every [M, 1] operand in the rows of a thread."""
    return registers([max(len(kernel.columns), 1), rows], "float32", "columns")


def load_columns(kernel: Any, cells: Any, step: Expr) -> None:
    """Every [M, 1] operand for the rows of this thread; zeros behind M."""
    for index, buffer in enumerate(kernel.columns):
        for row in range(kernel.fragment.rows):
            at = kernel.global_row(step, row)
            where = (at, 0) if len(buffer.shape) == 2 else (at,)
            _fetch(kernel, cells, (index, row), buffer, where, at < kernel.place.rows)


@dataclass(frozen=True)
class Inputs:
    """Registers with what a pass reads in some pairs of chunks of a box; `first` is the number of the first pair.

    vectors  by vector: [pairs, 4] float32, columns (side, element); or [pairs, 2] words, if it is kept so
    words    by staged tile: [blocks, pairs, 4] of two half-precision numbers
    floats   by tile in global memory: [rows, pairs, 2, 2] float32
    eights   by tile in global memory, eight neighbours with one access
    """

    first: int
    vectors: dict[int, Any]
    words: dict[int, tuple[Any, str]]
    floats: dict[int, Any]
    eights: dict[int, Eights]

    def vector(self, index: int, place: ElementPlace, element: int) -> Expr:
        """An element of an [N]-vector."""
        return self.vectors[index][place.pair - self.first, place.side * 2 + element]

    def vector_word(self, index: int, place: ElementPlace) -> Expr:
        """Two neighbours of an [N]-vector that is kept in words."""
        return self.vectors[index][place.pair - self.first, place.side]

    def tile_word(self, index: int, place: ElementPlace) -> Expr:
        """Two neighbours of a half-precision [M, N] operand."""
        if index in self.eights:
            return self.eights[index].word(place)
        return self.words[index][0][place.block, place.pair - self.first, place.matrix]

    def tile(self, index: int, place: ElementPlace, element: int) -> Expr:
        """An element of an [M, N] operand as float32."""
        pair = place.pair - self.first
        if index in self.floats:
            return self.floats[index][place.row, pair, place.side, element]
        if index in self.eights:
            return self.eights[index].element(place, element)
        return unpack(self.tile_word(index, place), self.words[index][1])[element]


def pairs_in_flight(kernel: Any, vectors: list[int], tiles: list[int], besides: int) -> int:
    """How many pairs of chunks are loaded together: a divisor of BOX_PAIRS.  `besides`: further registers of a pair."""
    fragment = kernel.fragment
    of_tile = {index: 4 * fragment.blocks for index in tiles}
    for index in tiles:
        if kernel.tiles[index].tile == NO_TILE and not reads_eights(kernel, index):
            of_tile[index] *= 2
    a_pair = besides + 4 * len(vectors) + sum(of_tile.values())
    least = 2 if any(reads_eights(kernel, index) for index in tiles) else 1
    return next(count for count in (4, 2, 1) if count * a_pair <= IN_FLIGHT or count == least)


def load(
    kernel: Any, far: dict[int, GlobalRows], box: Expr, pairs: range, vectors: list[int], tiles: list[int]
) -> Inputs:
    """Everything a pass reads of some pairs; `vectors` and `tiles` are positions among the operands of that kind, `far` has
    the tiles that are read from global memory."""
    inputs = Inputs(pairs[0], {}, {}, {}, {})
    for index in vectors:
        inputs.vectors[index] = _load_vector(kernel, index, box, pairs)
    for index in tiles:
        operand = kernel.tiles[index]
        if index in kernel.early:
            inputs.eights[index] = kernel.early[index]
        elif reads_eights(kernel, index):
            inputs.eights[index] = Eights(kernel, far[index].dtype, len(pairs) // 2, box * 2 + pairs[0] // 2)
            inputs.eights[index].load(far[index], box, pairs)
        elif index in far:
            inputs.floats[index] = _load_global(kernel, far[index], box, pairs)
        else:
            inputs.words[index] = (load_tile(kernel, operand.tile, box, pairs), str(operand.buffer.dtype))
    return inputs


def _load_vector(kernel: Any, index: int, box: Expr, pairs: range) -> Any:
    in_words = str(kernel.vector_views[index].dtype) != "float32"
    count, size, dtype = (2, 2, "uint32") if in_words else (4, 4, "float32")
    get = T.ptx.ld.shared.v2.u32 if in_words else T.ptx.ld.shared.v4.f32
    cells = registers([len(pairs), count], dtype, "vector")
    group = kernel.group_column(kernel.group) * kernel.plan.tile_n
    for nth, pair in enumerate(pairs):
        first = group + (box * BOX_PAIRS + pair) * PAIR_COLUMNS + kernel.fragment.quad_lane * 4
        address = kernel.smem.ptr_to([kernel.layout.vector(index) + first * size])
        do(get(*[cells[nth, i] for i in range(count)], address))
    return cells


def load_tile(kernel: Any, tile: int, box: Expr, pairs: range) -> Any:
    """A staging tile's words of some pairs: registers [blocks, pairs, 4]."""
    fragment = kernel.fragment
    words = registers([fragment.blocks, len(pairs), 4], "uint32", "words")
    get = T.ptx["ldmatrix.sync.aligned.m8n8.x4.shared.b16"]
    for block in range(fragment.blocks):
        for nth, pair in enumerate(pairs):
            do(get(*[words[block, nth, i] for i in range(4)], matrix_address(kernel, tile, block, box, pair)))
    return words


def matrix_address(kernel: Any, tile: int, block: int, box: Expr, pair: int) -> Expr:
    """Address that this lane gives to ldmatrix or stmatrix for a pair of chunks of a staging tile."""
    return kernel.smem.ptr_to(
        [kernel.layout.tile(kernel.group, tile) + kernel.fragment.matrix_offset(block, box, pair)]
    )


class GlobalRows:
    """Where a thread's elements of an [M, N] tensor are in global memory.

    One address for each of its rows; columns are constants added to it, which the instructions take as immediates.  Rows that
    lie in the tensor are told by their number, columns by theirs.
    """

    def __init__(self, kernel: Any, buffer: Any, step: Expr):
        self.kernel, self.dtype = kernel, str(buffer.dtype)
        self.size = 4 if self.dtype == "float32" else 2
        self.rows = [kernel.global_row(step, row) for row in range(kernel.fragment.rows)]
        self.column = bound("column", kernel.global_column(step, kernel.fragment.lane_column))
        self.bases = [bound("base", buffer.ptr_to([row, self.column])) for row in self.rows]

    def address(self, place: ElementPlace) -> Expr:
        """Address of an element's pair of neighbours."""
        return T.handle_add_byte_offset(self.bases[place.row], self.kernel.fragment.offset(place) * self.size)

    def inside(self, place: ElementPlace) -> Expr:
        """Whether they lie in the tensor."""
        return self.kernel.inside(self.rows[place.row], self.column + self.kernel.fragment.offset(place))


def reads_eights(kernel: Any, index: int) -> bool:
    """Whether an [M, N] operand is read from global memory eight half-precision neighbours at a time."""
    operand = kernel.tiles[index]
    return kernel.fragment.quads and operand.tile == NO_TILE and str(operand.buffer.dtype) != "float32"


class Eights:
    """Registers [rows, groups of 32 columns, 4] with what a lane has of an [M, N] operand: eight neighbours of each group.

    groups, first  how many groups they hold, and the number of the first one in the tile
    """

    def __init__(self, kernel: Any, dtype: str, groups: int, first: Expr):
        self.fragment, self.dtype, self.first = kernel.fragment, dtype, first
        self.words = registers([kernel.fragment.rows, groups, 4], "uint32", "eights")

    def load(self, rows: GlobalRows, box: Expr, pairs: range) -> None:
        """Some pairs of chunks of a box; zeros outside the tensor."""
        for place in places(self.fragment, box, pairs):
            if place.word != 0:
                continue
            at = [(*self._group(place), word) for word in range(4)]
            for index in at:
                store(self.words, u32(0), *index)
            with when(rows.inside(place)):
                do(T.ptx.ld.global_.v4.u32(*[self.words[index] for index in at], rows.address(place)))

    def load_groups(self, rows: GlobalRows, groups: Iterable[int]) -> None:
        """Some groups of 32 columns, by their number in the tile."""
        for group in groups:
            pairs = range(group % 2 * (BOX_PAIRS // 2), (group % 2 + 1) * (BOX_PAIRS // 2))
            self.load(rows, group // 2, pairs)

    def element(self, place: ElementPlace, element: int) -> Expr:
        """An element as float32."""
        return unpack(self.word(place), self.dtype)[element]

    def word(self, place: ElementPlace) -> Expr:
        """Two neighbours."""
        row, group = self._group(place)
        return self.words[row, group, place.word]

    def _group(self, place: ElementPlace) -> tuple[int, Expr]:
        return place.row, place.box * 2 + place.pair // 2 - self.first


def _load_global(kernel: Any, rows: GlobalRows, box: Expr, pairs: range) -> Any:
    """Neighbours of a row with one load; zeros outside the tensor."""
    floats = registers([kernel.fragment.rows, len(pairs), 2, 2], "float32", "floats")
    for place in places(kernel.fragment, box, pairs):
        index = (place.row, place.pair - pairs[0], place.side)
        for element in range(2):
            store(floats, f32(0.0), *index, element)
        with when(rows.inside(place)):
            if rows.dtype == "float32":
                low, high = (*index, 0), (*index, 1)
                do(T.ptx.ld.global_.v2.f32(floats[low], floats[high], rows.address(place)))
            else:
                word = registers([1], "uint32", "word")
                do(T.ptx.ld.global_.u32(word[0], rows.address(place)))
                for element, value in enumerate(unpack(word[0], rows.dtype)):
                    store(floats, value, *index, element)
    return floats


def places(fragment: Any, box: Expr, pairs: range) -> list[ElementPlace]:
    """Every two neighbours in some pairs of chunks of a box, in the order of the registers of ldmatrix."""
    return [
        ElementPlace(box, pair, side, block, half)
        for pair in pairs
        for block in range(fragment.blocks)
        for side in range(2)
        for half in range(2)
    ]


def unpack(word: Expr, dtype: str) -> tuple[Expr, Expr]:
    """The two half-precision numbers in a 32-bit word as float32, low one first."""
    if dtype == "bfloat16":
        return T.reinterpret("float32", word << u32(16)), T.reinterpret("float32", word & u32(0xFFFF0000))
    low = T.reinterpret("float16", T.cast(word & u32(0xFFFF), "uint16"))
    high = T.reinterpret("float16", T.cast(word >> u32(16), "uint16"))
    return T.cast(low, "float32"), T.cast(high, "float32")


def pack(word: Any, low: Expr, high: Expr, dtype: str) -> None:
    """Rounds two float32 numbers to half precision into a 32-bit register."""
    convert = T.ptx.cvt.rn.bf16x2.f32 if dtype == "bfloat16" else T.ptx.cvt.rn.f16x2.f32
    do(convert(word, high, low))
