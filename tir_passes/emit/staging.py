"""Staging tiles: shared memory between TMA and a warp group's registers.

Each TMA-placed [M, N] operand has a tile.  The results that TMA stores share one tile: that of an operand which nothing
reads once the first of them is written (schedules.footprint.shared_operand), else one of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tvm_comfuse.schedules.footprint import shared_operand, stored_by_tma
from tvm_comfuse.schedules.plan import Plan
from tvm_comfuse.schedules.spec import ClusterSpec
from tvm_comfuse.tir_passes.emit.tensormaps import tensor_map

NO_TILE = -1


@dataclass
class Slot:
    """A tensor and its staging tile; tile is NO_TILE for an operand read from global memory.

    block    the block that makes a result; the name of an operand
    readers  blocks that read an operand
    ahead    the producer brings an operand that is read from global memory to L2 ahead of time
    """

    index: int
    block: str
    tile: int
    readers: tuple[str, ...] = ()
    ahead: bool = False
    map: Any = None
    buffer: Any = None


@dataclass
class StagingTiles:
    """The assignment for one cluster and plan."""

    count: int
    operands: list[Slot] = field(default_factory=list)
    stores: list[Slot] = field(default_factory=list)

    @staticmethod
    def of(spec: ClusterSpec, plan: Plan) -> StagingTiles:
        """Decides which tensor goes through which tile."""
        count = 0
        operands = []
        for operand, placement in zip(spec.tile_operands, plan.operands, strict=True):
            tile = count if placement == "tma" else NO_TILE
            count += placement == "tma"
            ahead = placement == "global" and plan.w_order == "quads" and operand.dtype != "float32"
            operands.append(Slot(operand.index, operand.name, tile, operand.readers, ahead))
        stored, over = stored_by_tma(plan, spec), shared_operand(plan, spec)
        if not stored:
            return StagingTiles(count, operands)
        tile = count if over is None else next(slot.tile for slot in operands if slot.index == over.index)
        count += over is None
        index_of = {output.block: output.index for output in spec.outputs}
        return StagingTiles(count, operands, [Slot(index_of[block], block, tile) for block in stored])

    @property
    def operand_tiles(self) -> list[Slot]:
        """Operands that TMA brings."""
        return [slot for slot in self.operands if slot.tile != NO_TILE]

    @property
    def store_tiles(self) -> list[Slot]:
        """Results that TMA takes away, in the order they are ready."""
        return self.stores

    def stored(self, tile: int) -> bool:
        """Whether results leave through this tile."""
        return any(slot.tile == tile for slot in self.stores)

    def loaded(self, tile: int) -> bool:
        """Whether an operand comes through this tile."""
        return any(slot.tile == tile for slot in self.operands)

    def store_of(self, block: str) -> Slot | None:
        """The slot of an output's block, None if it is stored from registers."""
        return next((slot for slot in self.stores if slot.block == block), None)

    def bind(self, real: dict[Any, Any], params: Any, tile_m: int) -> None:
        """Gives every slot its buffer in the kernel, and its tensor map if TMA moves it."""
        for slot in self.operands + self.stores:
            slot.buffer = real[params[slot.index]]
            if slot.tile != NO_TILE or slot.ahead:
                slot.map = tensor_map(f"{slot.buffer.name}_map", slot.buffer, tile_m)
