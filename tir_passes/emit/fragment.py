"""What a thread holds of its warp group's tile.

wgmma leaves a tile of 64 rows so that a thread has, for each chunk of eight columns, two neighbouring columns in two rows:
row 16 warp + lane / 4 + 8 half, columns 8 chunk + 2 (lane % 4) + element.  A tile of 128 rows is two such blocks.
A quad of four lanes has a whole row of the tile between them.

Those are columns of B's tile.  With w_order quads its rows are put there in another order, and the columns of the result are
32 (chunk / 4) + 8 (lane % 4) + 2 (chunk % 4) + element: a lane has eight neighbours of every 32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Expr = Any
#: a box is 64 half-precision columns, 128 bytes; it has four pairs of chunks
BOX_COLUMNS, BOX_BYTES, BOX_PAIRS = 64, 128, 4


@dataclass(frozen=True)
class Fragment:
    """Index arithmetic of one thread."""

    tile_m: int
    tile_n: int
    warp: Expr
    lane: Expr
    quads: bool = False

    @property
    def blocks(self) -> int:
        """Blocks of 64 rows."""
        return self.tile_m // 64

    @property
    def boxes(self) -> int:
        """Boxes of 64 columns, the width of a swizzled tile."""
        return self.tile_n // BOX_COLUMNS

    @property
    def half_boxes(self) -> int:
        """Half boxes of 32 columns; with w_order quads there may be an odd number of them."""
        return 2 * self.tile_n // BOX_COLUMNS

    @property
    def rows(self) -> int:
        """Rows a thread has a part of."""
        return self.blocks * 2

    @property
    def accumulators(self) -> int:
        """Elements of the tile a thread holds."""
        return self.tile_m * self.tile_n // 128

    @property
    def quad_lane(self) -> Expr:
        """Position in the quad that shares a row."""
        return self.lane % 4

    def row(self, index: int) -> Expr:
        """Row in the tile of a thread's row number `index` (block * 2 + half)."""
        block, half = divmod(index, 2)
        return block * 64 + self.warp * 16 + self.lane // 4 + half * 8

    def column(self, place: ElementPlace) -> Expr:
        """Column in the tile of an element's pair of neighbours (element 0)."""
        return self.lane_column + self.offset(place)

    @property
    def lane_column(self) -> Expr:
        """The first column a lane has."""
        return self.quad_lane * (8 if self.quads else 2)

    def offset(self, place: ElementPlace) -> Expr:
        """Columns from there to an element's pair of neighbours: the same in every lane."""
        if not self.quads:
            return place.chunk * 8
        return place.box * BOX_COLUMNS + place.pair // 2 * 32 + place.word * 2

    def accumulator(self, place: ElementPlace, element: int) -> Expr:
        """Register of an element."""
        return place.block * (self.tile_n // 2) + place.chunk * 4 + place.half * 2 + element

    def matrix_offset(self, block: int, box: Expr, pair: int) -> Expr:
        """Byte offset in a swizzled tile of the row that this lane names to ldmatrix or stmatrix.

        One such instruction moves four 8 x 8 matrices, here 16 rows and a pair of chunks: lanes 0-7 name the upper rows of
        the first chunk, 8-15 its lower rows, 16-31 the same of the second chunk.  Register 2 side + half of a thread
        then holds its two elements of that chunk and row.
        """
        row = block * 64 + self.warp * 16 + self.lane % 16
        swizzle = (pair * 2) ^ ((self.lane // 16) ^ (self.lane % 8))
        return box * (self.tile_m * BOX_BYTES) + row * BOX_BYTES + swizzle * 16


@dataclass(frozen=True)
class ElementPlace:
    """Two neighbouring elements of a thread: box (an expression), then pair of chunks, side in the pair, block, half."""

    box: Expr
    pair: int
    side: int
    block: int
    half: int

    @property
    def chunk(self) -> Expr:
        """Chunk of eight columns in the tile."""
        return self.box * (BOX_COLUMNS // 8) + self.pair * 2 + self.side

    @property
    def word(self) -> int:
        """With w_order quads: which of the four words, two neighbours each, of eight neighbouring columns."""
        return self.pair % 2 * 2 + self.side

    @property
    def row(self) -> int:
        """The thread's row number."""
        return self.block * 2 + self.half

    @property
    def matrix(self) -> int:
        """Register of the pair of chunks that holds these elements, see Fragment.matrix_offset."""
        return self.side * 2 + self.half
