"""Shared memory: the total, and where tiles that TMA and wgmma touch begin."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tvm_comfuse.schedules.device import Device
from tvm_comfuse.verify.finding import Finding
from tvm_comfuse.verify.static.barriers import LOAD
from tvm_comfuse.verify.static.evaluate import AXES, Array, along
from tvm_comfuse.verify.static.index import Instruction, KernelIndex, accessed, loads
from tvm_comfuse.verify.static.scene import Scene

#: a 128-byte swizzle repeats after eight rows
SWIZZLE_ALIGNMENT = 1024
#: memory that is not opted in for; static shared memory is at most this
STATIC_LIMIT = 48 * 1024
STORE, ENCODE = "cp_async_bulk_tensor_s2g", "wgmma_encode_matrix_descriptor"
#: position of the shared address among the operands
_ADDRESS = {LOAD: 0, STORE: 3, ENCODE: 1}
#: axis on which a cursor is varied: the innermost loop axis, which no address uses
CURSOR = AXES - 1


def bytes_of(buffer: Any) -> int:
    """Bytes of an allocation."""
    bits = {"uint8": 8, "uint64": 64, "float32": 32, "uint32": 32, "int32": 32}[str(buffer.dtype)]
    return int(np.prod([int(extent) for extent in buffer.shape])) * bits // 8


def check(index: KernelIndex, scene: Scene, device: Device) -> Iterator[Finding]:
    """Totals, then every address."""
    sizes = {"shared": 0, "shared.dyn": 0}
    for buffer, _ in index.allocations:
        if str(buffer.scope()) in sizes:
            sizes[str(buffer.scope())] += bytes_of(buffer)
    static, dynamic = sizes["shared"], sizes["shared.dyn"]
    if static + dynamic > device.shared_memory or static > STATIC_LIMIT:
        text = (
            f"{dynamic} dynamic + {static} static = {static + dynamic} bytes of shared memory; a CTA of {device.name} has "
            f"{device.shared_memory}, of which {STATIC_LIMIT} static"
        )
        yield Finding(
            "shared-memory", "the CTA", text, {"dynamic": dynamic, "static": static, "limit": device.shared_memory}
        )
    for instruction in index.named(LOAD, STORE, ENCODE):
        yield from _address(scene, instruction)
    yield from _overlaps(index, scene)


def cursors(index: KernelIndex, at: Any) -> dict[Any, Array]:
    """The cursors in an index, each with every slot of the ring it points into."""
    return {
        load.source: along(CURSOR, np.arange(index.rings[load.source]))
        for load in loads(at)
        if load.source in index.rings
    }


def _address(scene: Scene, instruction: Instruction) -> Iterator[Finding]:
    buffer, at = accessed(instruction.args[_ADDRESS[instruction.name]])
    offsets = np.unique(scene.values(at, instruction, cursors(scene.index, at)))
    size, length = bytes_of(buffer), SWIZZLE_ALIGNMENT
    if instruction.name != ENCODE:
        tensor_map = scene.index.map_of(instruction.args[1 if instruction.name == LOAD else 0])
        length = tensor_map.box_bytes if tensor_map is not None else 0
    misplaced = offsets[offsets % SWIZZLE_ALIGNMENT != 0]
    if misplaced.size:
        first = int(misplaced[0])
        text = f"a swizzled tile must begin at a multiple of {SWIZZLE_ALIGNMENT} bytes; {first} leaves {first % 1024}"
        yield Finding("tile-alignment", instruction.shown, text, {"offset": first, "alignment": SWIZZLE_ALIGNMENT})
    outside = offsets[(offsets < 0) | (offsets + length > size)]
    if outside.size:
        first = int(outside[-1])
        text = f"bytes {first} to {first + length} of a shared memory of {size} bytes"
        yield Finding("shared-out-of-bounds", instruction.shown, text, {"offset": first, "bytes": length, "size": size})


def _overlaps(index: KernelIndex, scene: Scene) -> Iterator[Finding]:
    """Boxes that land on one barrier must lie side by side, and slots of a ring behind each other."""
    by_barrier: dict[Any, list[Instruction]] = {}
    for instruction in index.named(LOAD):
        by_barrier.setdefault(accessed(instruction.args[4])[0], []).append(instruction)
    for barrier, sites in by_barrier.items():
        boxes: dict[tuple[int, int], str] = {}
        for site in sites:
            at = accessed(site.args[0])[1]
            tensor_map = index.map_of(site.args[1])
            if tensor_map is None:
                continue
            for offset in np.unique(scene.values(at, site, cursors(index, at))):
                box = (int(offset), int(offset) + tensor_map.box_bytes)
                clash = next((b for b in boxes if b[0] < box[1] and box[0] < b[1]), None)
                if clash is not None:
                    text = f"boxes overlap in shared memory: bytes {clash[0]} to {clash[1]} and {box[0]} to {box[1]}"
                    yield Finding("box-overlap", f"loads on {barrier.name}", text, {"first": clash, "second": box})
                    return
                boxes[box] = site.shown
