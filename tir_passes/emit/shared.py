"""The layout of a CTA's dynamic shared memory.

From low to high: the ring of A and B tiles, the B tiles of a W that stays, the staging tiles of the MMA warp groups, the tiles
that they hand over, [N]-vectors as float32, mailboxes.
Tiles that TMA touches start at multiples of 1024 bytes, as the 128-byte swizzle wants.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm_comfuse.schedules.footprint import SLOT_BYTES
from tvm_comfuse.tir_passes.emit.geometry import Geometry

Expr = Any
#: bytes of one row of a swizzled tile: 64 half-precision columns
ATOM_BYTES, ATOM_COLUMNS = 128, 64
ALIGNMENT = 1024


@dataclass(frozen=True)
class SharedLayout:
    """Byte offsets.  staging_tiles: tiles per MMA warp group; row_values: floats per row in a round of exchange."""

    geometry: Geometry
    staging_tiles: int
    vectors: int
    row_values: int

    @property
    def a_bytes(self) -> int:
        """The A tile of a slot."""
        return self.geometry.unit_rows * ATOM_BYTES

    @property
    def b_bytes(self) -> int:
        """One B tile: of a slot, or of a W that stays."""
        return self.geometry.plan.cta_columns * ATOM_BYTES

    @property
    def slot_bytes(self) -> int:
        """One slot of the ring."""
        return self.a_bytes if self.geometry.plan.w_resident else self.a_bytes + self.b_bytes

    @property
    def tile_bytes(self) -> int:
        """One staging tile: tile_m x tile_n half-precision elements."""
        return self.geometry.plan.tile_m * self.geometry.plan.tile_n * 2

    @property
    def resident_w(self) -> int:
        """Offset of the B tiles of a W that stays, behind the ring."""
        return self.geometry.plan.pipeline_depth * self.slot_bytes

    @property
    def staging(self) -> int:
        """Offset of the staging tiles."""
        return self.resident_w + (self.geometry.k_slots * self.b_bytes if self.geometry.plan.w_resident else 0)

    def tile(self, group: Expr, index: int) -> Expr:
        """Offset of staging tile `index` of an MMA warp group."""
        return self.staging + (group * self.staging_tiles + index) * self.tile_bytes

    def handover(self, group: Expr) -> Expr:
        """Offset of the tile that an MMA warp group hands over."""
        return self.tile(self.geometry.plan.mma_groups, 0) + group * self.tile_bytes

    def vector(self, index: int) -> int:
        """Offset of the index-th [N]-vector, cta_columns float32."""
        plan = self.geometry.plan
        first: int = self.handover(plan.mma_groups) if plan.hands_over else self.tile(plan.mma_groups, 0)
        return first + index * plan.cta_columns * 4

    @property
    def mailbox(self) -> int:
        """Offset of the mailboxes."""
        return self.vector(self.vectors)

    @property
    def mailbox_bytes(self) -> int:
        """Two parities, every part of a row, every row value, 8 bytes each; for each warp group.  Of an exchange across the
        grid only the tag base is here."""
        if self.geometry.plan.exchange == "grid":
            return SLOT_BYTES
        if self.geometry.plan.exchange not in ("cta", "cluster"):
            return 0
        return (
            2
            * self.geometry.plan.mma_groups
            * self.geometry.row_parts
            * self.row_values
            * self.geometry.plan.tile_m
            * 8
        )

    @property
    def total(self) -> int:
        """Bytes of dynamic shared memory."""
        return self.mailbox + self.mailbox_bytes
