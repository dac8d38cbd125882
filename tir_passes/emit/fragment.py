"""What a thread holds of its warp group's tile.

wgmma leaves a tile of 64 rows so that a thread has, for each chunk of eight columns, two neighbouring columns in two rows:
row 16 warp + lane / 4 + 8 half, columns 8 chunk + 2 (lane % 4) + element.  A tile of 128 rows is two such blocks.
A quad of four lanes has a whole row of the tile between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Expr = Any


@dataclass(frozen=True)
class Fragment:
    """Index arithmetic of one thread."""

    tile_m: int
    tile_n: int
    warp: Expr
    lane: Expr

    @property
    def blocks(self) -> int:
        """Blocks of 64 rows."""
        return self.tile_m // 64

    @property
    def chunks(self) -> int:
        """Chunks of eight columns."""
        return self.tile_n // 8

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

    @property
    def row_phase(self) -> Expr:
        """row % 8, the same for all rows of a thread."""
        return self.lane // 4

    def row(self, index: int) -> Expr:
        """Row in the tile of a thread's row number `index` (block * 2 + half)."""
        block, half = divmod(index, 2)
        return block * 64 + self.warp * 16 + self.lane // 4 + half * 8

    def column(self, chunk: Expr) -> Expr:
        """First of the two columns in a chunk."""
        return chunk * 8 + self.quad_lane * 2

    def element(self, row_index: int, chunk: Expr, element: int) -> Expr:
        """Accumulator register of an element."""
        block, half = divmod(row_index, 2)
        return block * (self.tile_n // 2) + chunk * 4 + half * 2 + element
