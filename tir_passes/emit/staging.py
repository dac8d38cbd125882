"""Staging tiles: shared memory between TMA and a warp group's registers.

Each TMA-placed [M, N] operand has a tile.  The results that TMA stores share one tile: that of an operand which no stage
reads once the first of them is written (a thread overwrites just the elements it has read itself), else one of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tvm_comfuse.schedules.plan import Plan
from tvm_comfuse.schedules.spec import ClusterSpec
from tvm_comfuse.tir_passes.emit.tensormaps import tensor_map

NO_TILE = -1


@dataclass
class Slot:
    """A tensor and its staging tile; tile is NO_TILE for an operand read from global memory."""

    index: int
    block: str
    tile: int
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
        last_stage = {operand.index: operand.last_stage for operand in spec.operands}
        for operand, placement in zip(spec.tile_operands, plan.operands, strict=True):
            tile = count if placement == "tma" else NO_TILE
            count += placement == "tma"
            operands.append(Slot(operand.index, operand.name, tile))
        placed = dict(zip([output.block for output in spec.tile_outputs], plan.store, strict=True))
        outputs = [(s.index, o) for s in spec.stages for o in s.outputs if placed.get(o.block) == "tma"]
        if not outputs:
            return StagingTiles(count, operands)
        first = outputs[0][0]
        shared = next((s for s in operands if s.tile != NO_TILE and last_stage[s.index] <= first), None)
        tile = count if shared is None else shared.tile
        count += shared is None
        stores = [Slot(output.index, output.block, tile) for _, output in outputs]
        return StagingTiles(count, operands, stores)

    @property
    def operand_tiles(self) -> list[Slot]:
        """Operands that TMA brings."""
        return [slot for slot in self.operands if slot.tile != NO_TILE]

    @property
    def store_tiles(self) -> list[Slot]:
        """Results that TMA takes away, in program order."""
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
            if slot.tile != NO_TILE:
                slot.map = tensor_map(f"{slot.buffer.name}_map", slot.buffer, tile_m)
