"""Questions that lowering asks of a canonical function."""

from __future__ import annotations

from typing import Any

from tvm import tirx

from tvm_comfuse.schedules.normal_form import normal_form
from tvm_comfuse.schedules.spec import blocks
from tvm_comfuse.tir_passes.emit.expressions import read_buffers


def normal_forms(func: tirx.PrimFunc) -> dict[str, Any]:
    """Every block in normal form (iteration variables, store, reducing operator, value), by name in program order."""
    return {name: normal_form(name, block) for name, block in blocks(func).items()}


def last_uses(func: tirx.PrimFunc) -> dict[int, int]:
    """For each parameter: the last stage that reads it."""
    last: dict[int, int] = {}
    for block in normal_forms(func).values():
        stage = block.level or 0
        for buffer in read_buffers([block.value]):
            for index, param in enumerate(func.params):
                if param.same_as(buffer):
                    last[index] = max(stage, last.get(index, 0))
    return last
