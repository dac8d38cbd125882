"""TMA: boxes, strides and swizzle of every tensor map, and the coordinates it is used with."""

from __future__ import annotations

import math
from collections.abc import Iterator

from tvm import tirx

from tvm_comfuse.verify.finding import Finding
from tvm_comfuse.verify.static.barriers import LOAD
from tvm_comfuse.verify.static.index import KernelIndex, TensorMap
from tvm_comfuse.verify.static.scene import Scene
from tvm_comfuse.verify.static.shared_memory import STORE

MAX_BOX_ROWS = 256
UNIT = 16
#: code of cuTensorMapEncodeTiled for the 128-byte swizzle, and bytes of a row it takes
SWIZZLE_128B, SPAN = 3, 128


def check(index: KernelIndex, scene: Scene) -> Iterator[Finding]:
    """Every map, then every use."""
    for tensor_map in index.tensor_maps:
        yield from _limits(tensor_map)
    for instruction in index.named(LOAD, STORE):
        load = instruction.name == LOAD
        used = index.map_of(instruction.args[1 if load else 0])
        if used is None:
            yield Finding("tensor-map", instruction.shown, "the operand is no tensor map of this kernel", {})
            continue
        inner = instruction.args[2 if load else 1]
        values = scene.values(inner, instruction)
        wrong = values[(values % used.box_columns != 0) | (values < 0)]
        if wrong.size:
            text = f"boxes begin at columns 0, {used.box_columns}, {2 * used.box_columns}, ...; found {int(wrong[0])}"
            numbers = {"column": int(wrong[0]), "step": used.box_columns}
            yield Finding("tma-coordinate", instruction.shown, text, numbers)


def _limits(used: TensorMap) -> Iterator[Finding]:
    where = f"tensor map {used.variable.name}"
    if used.swizzle != SWIZZLE_128B:
        text = f"tiles are written and read with the 128-byte swizzle (code {SWIZZLE_128B}); found code {used.swizzle}"
        yield Finding("tma-swizzle", where, text, {"swizzle": used.swizzle})
    elif used.inner_bytes != SPAN:
        text = (
            f"a row of the box must fill the swizzle: {used.box_columns} x {used.element_bytes} = {used.inner_bytes} bytes, "
            f"needed {SPAN}"
        )
        yield Finding("tma-box-columns", where, text, {"bytes": used.inner_bytes, "swizzle": SPAN})
    if not 1 <= used.box_rows <= MAX_BOX_ROWS:
        text = f"a box has 1 to {MAX_BOX_ROWS} rows; found {used.box_rows}"
        yield Finding("tma-box-rows", where, text, {"rows": used.box_rows, "limit": MAX_BOX_ROWS})
    if used.box_bytes % UNIT:
        text = f"a box is a multiple of {UNIT} bytes; found {used.box_bytes}"
        yield Finding("tma-box-bytes", where, text, {"bytes": used.box_bytes})
    if isinstance(used.stride, tirx.IntImm):
        stride, row = int(used.stride), int(used.columns) * used.element_bytes
        if stride % UNIT or stride < row:
            text = f"the row stride must be a multiple of {UNIT} bytes and hold a row of {row}; found {stride}"
            yield Finding("tma-stride", where, text, {"stride": stride, "row": row})
    if used.fill != 0 or used.interleave != 0 or used.rank not in (2, 5):
        text = f"maps are of two or five dimensions, not interleaved, zeros outside; rank {used.rank}, fill {used.fill}"
        yield Finding("tma-form", where, text, {"rank": used.rank, "interleave": used.interleave, "fill": used.fill})
    if used.fields:
        yield from _parts(used, where)


def _parts(used: TensorMap, where: str) -> Iterator[Finding]:
    """A box has all of every inner part of a row number, and the parts together name each row once."""
    if used.box[:-1] != used.fields:
        text = f"a box must hold every inner part of a row number, {list(used.fields)}; found {list(used.box[:-1])}"
        yield Finding("tma-parts", where, text, {"parts": list(used.fields), "box": list(used.box)})
    if not all(isinstance(stride, tirx.IntImm) for stride in used.strides):
        return
    row = int(used.columns) * used.element_bytes
    rows = {0}
    for extent, stride in zip(used.fields, used.strides, strict=False):
        rows = {at + number * int(stride) for at in rows for number in range(extent)}
    if rows != {number * row for number in range(math.prod(used.fields))} or int(used.strides[-1]) != len(rows) * row:
        strides = [int(stride) for stride in used.strides]
        text = f"the parts of a row number must name each row once; extents {list(used.fields)}, strides {strides}"
        yield Finding("tma-parts", where, text, {"parts": list(used.fields), "strides": strides})
