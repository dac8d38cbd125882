"""TMA: boxes, strides and swizzle of every tensor map, and the coordinates it is used with."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from tvm import tirx

from tvm_comfuse.verify.finding import Finding
from tvm_comfuse.verify.static.barriers import LOAD
from tvm_comfuse.verify.static.index import KernelIndex, TensorMap
from tvm_comfuse.verify.static.scene import Scene
from tvm_comfuse.verify.static.shared_memory import STORE

MAX_BOX_ROWS = 256
UNIT = 16
#: codes of cuTensorMapEncodeTiled: swizzle -> bytes of a row it takes
SWIZZLE_SPAN = {0: 256 * 16, 1: 32, 2: 64, 3: 128}


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
        inner, outer = instruction.args[2:4] if load else instruction.args[1:3]
        for name, coordinate, step in (("column", inner, used.box_columns), ("row", outer, 1)):
            values = scene.values(coordinate, instruction)
            wrong = values[values % step != 0]
            if wrong.size:
                text = f"boxes of {step} columns must begin at a multiple of that; {name} {int(wrong[0])}"
                yield Finding("tma-coordinate", instruction.shown, text, {name: int(wrong[0]), "step": step})
        yield from _coverage(scene, instruction, used, inner)


def _limits(used: TensorMap) -> Iterator[Finding]:
    where = f"tensor map {used.variable.name}"
    span = SWIZZLE_SPAN.get(used.swizzle, 0)
    if used.swizzle != 3:
        text = f"tiles are written and read with the 128-byte swizzle (code 3); found code {used.swizzle}"
        yield Finding("tma-swizzle", where, text, {"swizzle": used.swizzle})
    elif used.inner_bytes != span:
        text = (
            f"a row of the box must fill the swizzle: {used.box_columns} x {used.element_bytes} = {used.inner_bytes} bytes, "
            f"needed {span}"
        )
        yield Finding("tma-box-columns", where, text, {"bytes": used.inner_bytes, "swizzle": span})
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
    if used.fill != 0 or used.interleave != 0 or used.rank != 2:
        text = f"maps are of two dimensions, not interleaved, zeros outside; rank {used.rank}, fill {used.fill}"
        yield Finding("tma-form", where, text, {"rank": used.rank, "interleave": used.interleave, "fill": used.fill})


def _coverage(scene: Scene, instruction: object, used: TensorMap, inner: object) -> Iterator[Finding]:
    """No box may lie wholly outside in columns on the left, and coordinates are signed 32-bit."""
    values = scene.values(inner, instruction)
    if values.size and (int(values.min()) < 0 or int(np.abs(values).max()) >= 2**31):
        text = f"column coordinates from {int(values.min())} to {int(values.max())}"
        yield Finding(
            "tma-coordinate", used.variable.name, text, {"least": int(values.min()), "most": int(values.max())}
        )
