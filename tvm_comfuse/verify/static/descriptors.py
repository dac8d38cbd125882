"""Matrix descriptors of wgmma against the tiles that TMA writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tvm_comfuse.verify.finding import Finding
from tvm_comfuse.verify.static.barriers import LOAD
from tvm_comfuse.verify.static.evaluate import THREAD_AXES, along, constant
from tvm_comfuse.verify.static.index import Instruction, KernelIndex, accessed, loads
from tvm_comfuse.verify.static.scene import Scene
from tvm_comfuse.verify.static.shared_memory import CURSOR, ENCODE

#: (scene, instruction, address, bytes of its unit) -> bytes between neighbours
Distance = Callable[[Scene, Instruction, Any, int], set[int]]
#: bytes a descriptor counts in
UNIT = 16
#: eight rows of 128 bytes, and the code of the 128-byte swizzle in a descriptor
GROUP_STRIDE, SWIZZLE_128B = 8 * 128 // UNIT, 3


def check(index: KernelIndex, scene: Scene) -> Iterator[Finding]:
    """Strides and swizzle of each descriptor, and how far apart it takes slots and the tiles of a W that stays."""
    for encode in index.named(ENCODE):
        stride, swizzle = int(encode.args[3]), int(encode.args[4])
        if swizzle != SWIZZLE_128B:
            text = f"tiles are written with the 128-byte swizzle (code {SWIZZLE_128B} in a descriptor); found {swizzle}"
            yield Finding("descriptor-swizzle", encode.shown, text, {"swizzle": swizzle})
        if stride != GROUP_STRIDE:
            text = f"groups of eight rows lie 8 x 128 bytes = {GROUP_STRIDE} units apart; the descriptor says {stride}"
            yield Finding("descriptor-stride", encode.shown, text, {"stride": stride, "needed": GROUP_STRIDE})
    yield from _strides(index, scene, "the ring", "slots", _between_slots)
    yield from _strides(index, scene, "W that stays", "tiles", _between_iterations)


def _strides(index: KernelIndex, scene: Scene, where: str, things: str, distance: Distance) -> Iterator[Finding]:
    """TMA and wgmma must mean the same bytes by a slot, or by a tile that has no slot."""
    written = {d for i in index.named(LOAD) for d in distance(scene, i, accessed(i.args[0])[1], 1)}
    read = set()
    for instruction in index.instructions:
        if instruction.is_product:
            for operand in instruction.args[-7:-5]:
                read |= distance(scene, instruction, operand, UNIT)
    if written and read and (len(written) != 1 or written != read):
        text = f"TMA writes {things} {sorted(written)} bytes apart, wgmma reads them {sorted(read)} bytes apart"
        yield Finding("slot-stride", where, text, {"written": sorted(written), "read": sorted(read)})


def _between_slots(scene: Scene, instruction: Instruction, at: Any, unit: int) -> set[int]:
    """Bytes between two neighbouring slots in an address; empty if no cursor is in it."""
    cells = {load.source for load in loads(at) if load.source in scene.index.rings}
    if not cells:
        return set()
    # the descriptor itself is a cell too, and its value does not matter here
    known = {load.source: constant(0) for load in loads(at)}
    known.update({cell: along(CURSOR, np.arange(2)) for cell in cells})
    value = scene.value(at, known)
    return {int(d) * unit for d in np.unique(np.diff(value, axis=CURSOR))}


def _between_iterations(scene: Scene, instruction: Instruction, at: Any, unit: int) -> set[int]:
    """Bytes by which an address moves on from one iteration of the innermost loop to the next; empty if it stays."""
    if not instruction.loops:
        return set()
    value = scene.value(at, {load.source: constant(0) for load in loads(at)})
    moves = np.unique(np.diff(value, axis=THREAD_AXES + instruction.loops[-1].depth))
    return {int(d) * unit for d in moves if d}
