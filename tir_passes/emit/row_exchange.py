"""Row values of a rows kernel: over the lanes of a warp by shuffles, over the warps of a row through shared memory."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from tvm_comfuse.schedules.rows import LANES
from tvm_comfuse.tir_passes.emit.actions import COMBINE
from tvm_comfuse.tir_passes.emit.dsl import do, store, u32, when
from tvm_comfuse.tir_passes.emit.stages import SHUFFLE_MASK

Expr = Any
#: words from one warp's slot to the next: verify.interpreter knows who wrote shared memory by 16 bytes
SLOT = 4


def reduce_row(kernel: Any, stage: Any, cells: list[tuple[str, Any]], step: Expr) -> None:
    """Combines each lane's partial of some row values, (op, register); every lane of the row gets the results.

    Partials of a step lie in one half of the slots, those of the next step in the other: a warp that is one barrier ahead
    does not overwrite what another still reads.
    """
    for op, cell in cells:
        _shuffle(op, cell, LANES)
    if kernel.plan.warps == 1:
        return
    places = [_slot(kernel, reduction, step) for reduction in stage.reductions]
    for (_, cell), place in zip(cells, places, strict=True):
        with when(kernel.lane == 0):
            store(kernel.partials, cell[0], (place + kernel.part) * SLOT)
    do(T.cuda.cta_sync())
    for (op, cell), place in zip(cells, places, strict=True):
        store(cell, kernel.partials[(place + kernel.lane % kernel.plan.warps) * SLOT], 0)
        _shuffle(op, cell, kernel.plan.warps)


def slots(kernel: Any) -> int:
    """Words of shared memory for all partials."""
    plan = kernel.plan
    return 2 * len(kernel.spec.reductions) * plan.rows * plan.warps * SLOT if plan.warps > 1 else 0


def _slot(kernel: Any, reduction: Any, step: Expr) -> Expr:
    """First of the slots of a row value of a step, one for each warp of the row."""
    count = len(kernel.spec.reductions)
    number = step % 2 * count + kernel.spec.reductions.index(reduction)
    return (number * kernel.plan.rows + kernel.row_in_cta) * kernel.plan.warps


def _shuffle(op: str, cell: Any, lanes: int) -> None:
    distance = lanes // 2
    while distance:
        other = T.tvm_warp_shuffle_xor(u32(SHUFFLE_MASK), cell[0], distance, LANES, LANES)
        store(cell, COMBINE[op](cell[0], other), 0)
        distance //= 2
