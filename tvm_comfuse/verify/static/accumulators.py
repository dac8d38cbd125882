"""Registers arrays are indexed so that they stay registers, and accumulators are left alone while a wgmma writes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from tvm_comfuse.verify.finding import Finding
from tvm_comfuse.verify.static.index import KernelIndex, Loop, variables

LOCAL = "local"


def check(index: KernelIndex) -> Iterator[Finding]:
    """Every index of every array in registers."""
    seen: set[Any] = set()
    for buffer, indices, nest in _accesses(index):
        if str(buffer.scope()) != LOCAL or buffer in seen or all(int(extent) == 1 for extent in buffer.shape):
            continue
        unrolled = {level.variable for level in nest if isinstance(level, Loop) and level.unrolled}
        for position in indices:
            if isinstance(position, tirx.IntImm):
                continue
            moving = [variable for variable in variables(position) if variable not in unrolled]
            if moving:
                seen.add(buffer)
                names = sorted({str(variable.name) for variable in moving})
                text = (
                    f"register arrays may be indexed by constants and variables of unrolled loops only; {position} has "
                    f"{', '.join(names)}: the array goes to local memory"
                )
                yield Finding("accumulator-index", str(buffer.name), text, {"variables": names})
                break


def _accesses(index: KernelIndex) -> Iterator[tuple[Any, Any, Any]]:
    for item in index.stores:
        yield item.buffer, item.indices, item.nest
        yield from _loads(item.value, item.nest)
    for instruction in index.instructions:
        for argument in instruction.args:
            yield from _loads(argument, instruction.nest)


def _loads(expr: Any, nest: Any) -> Iterator[tuple[Any, Any, Any]]:
    if isinstance(expr, tvm.ir.TensorLoad):
        yield expr.source, expr.indices, nest
    elif not isinstance(expr, (tirx.IntImm, tirx.FloatImm, tirx.Var)):
        found: list[Any] = []
        tvm_ffi.structural_walk(expr, [(tvm.ir.TensorLoad, found.append)])
        for node in found:
            yield node.source, node.indices, nest
