"""The producer warp group: two warps that only move tiles.

warp 0 fills the ring with A and B and, spread over the main loop, brings the step's [M, N] operands; warp 1 sends results
away.  One lane of each works, so that nothing here needs more registers than the role has.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from tvm.script import tirx as T

from tvm_comfuse.schedules.footprint import a_box_rows, slot_rows, w_box_rows
from tvm_comfuse.schedules.plan import COOPERATIVE_GROUPS, QUAD_COLUMNS
from tvm_comfuse.tir_passes.emit.dsl import do, loop, rolled, when
from tvm_comfuse.tir_passes.emit.instructions import MULTICAST, TMA_LOAD, TMA_LOAD_5D, TMA_PREFETCH, TMA_STORE
from tvm_comfuse.tir_passes.emit.ring import Cursor, arm, arrive, wait
from tvm_comfuse.tir_passes.emit.shared import ATOM_BYTES, ATOM_COLUMNS

Expr = Any


def fill_ring(kernel: Any) -> None:
    """Warp 0: for each step and slot, wait until it is empty, arm it, load A and B, or this CTA's
    shares of them, where they are due."""
    geometry, plan, place = kernel.geometry, kernel.plan, kernel.place
    cursor = Cursor(plan.pipeline_depth, 1, "fill")
    turn = _turn(kernel)
    with turn(place.steps, "step") as step:
        kernel.stamps.begin("load", step)
        with turn(geometry.k_slots, "k") as k:
            kernel.stamps.begin("empty slot", step, at=k, extent=geometry.k_slots)
            wait(kernel.empty, cursor.slot.value, cursor.parity.value)
            kernel.stamps.end("empty slot", step, at=k, extent=geometry.k_slots)
            arm(kernel.full, cursor.slot.value, kernel.layout.slot_bytes)
            base = cursor.slot.value * kernel.layout.slot_bytes
            barrier = kernel.full.ptr_to([cursor.slot.value])
            depth = k * plan.tile_k
            _load_a(kernel, step, base, depth, barrier)
            with kernel.w_tiles.filled(step, k, cursor.slot.value, barrier) as (b_base, b_barrier):
                _load_b(kernel, step, b_base, depth, b_barrier)
            _bring_operands(kernel, step, k)
            _operands_ahead(kernel, step, k)
            cursor.advance(1)
        kernel.stamps.end("load", step)


def _turn(kernel: Any) -> Callable[[Expr, str], AbstractContextManager[Expr]]:
    """The kind of the role's loops: unrolled, addresses of several rounds would not fit into the registers that more MMA warp
    groups leave it."""
    return rolled if kernel.plan.mma_groups > COOPERATIVE_GROUPS else loop


def _load_a(kernel: Any, step: Expr, base: Expr, depth: Expr, barrier: Expr) -> None:
    """A: boxes of rows; the CTAs that share A take turns at them."""
    plan, place = kernel.plan, kernel.place
    rows = a_box_rows(plan)
    for index in range(slot_rows(plan)[0] // rows):
        target = kernel.smem.ptr_to([base + index * rows * ATOM_BYTES])
        at = depth, place.row(step) + index * rows
        if not plan.share_a:
            do(T.ptx[TMA_LOAD](target, _address(kernel.a_map), *at, barrier))
            continue
        with when(place.seat == index % plan.cluster_n):
            everyone = sum(1 << seat * plan.cluster_m for seat in range(plan.cluster_n))
            mask = T.cast(T.uint32(everyone) << T.cast(place.share, "uint32"), "uint16")
            do(T.ptx[TMA_LOAD + MULTICAST](target, _address(kernel.a_map), *at, barrier, mask))


def _load_b(kernel: Any, step: Expr, base: Expr, depth: Expr, barrier: Expr) -> None:
    """B: [N, K] in boxes of rows, [K, N] in boxes of 64 columns; the CTAs that share W take turns at the boxes."""
    plan, place = kernel.plan, kernel.place
    for index, (offset, column) in enumerate(b_boxes(plan, kernel.spec.w_layout)):
        along_n = place.column(step) + column
        at: tuple[Expr, ...] = (depth, along_n) if kernel.spec.w_layout == "NK" else (along_n, depth)
        load = TMA_LOAD
        if plan.w_order == "quads":
            at, load = (depth, 0, 0, 0, along_n // QUAD_COLUMNS), TMA_LOAD_5D
        target = kernel.smem.ptr_to([base + offset])
        if plan.cluster_m == 1:
            do(T.ptx[load](target, _address(kernel.w_map), *at, barrier))
            continue
        with when(place.share == index % plan.cluster_m):
            mask = T.cast(T.uint32((1 << plan.cluster_m) - 1) << T.cast(place.peer(0), "uint32"), "uint16")
            do(T.ptx[load + MULTICAST](target, _address(kernel.w_map), *at, barrier, mask))


def b_boxes(plan: Any, w_layout: str) -> list[tuple[int, int]]:
    """(byte offset in the B tile, first column) of every box."""
    columns = w_box_rows(plan, w_layout) if w_layout == "NK" else ATOM_COLUMNS
    rows = columns if w_layout == "NK" else plan.tile_k
    count = plan.cta_columns // columns
    return [(index * rows * ATOM_BYTES, index * columns) for index in range(count)]


def _groups_of(kernel: Any, step: Expr) -> list[Expr]:
    """The MMA warp groups that do a step."""
    groups = kernel.plan.mma_groups
    return [step % groups] if kernel.geometry.pingpong else list(range(groups))


def _bring_operands(kernel: Any, step: Expr, k: Expr) -> None:
    """The part of the step's TMA-placed [M, N] operands that is due with slot k.

    All CTAs are at about the same point of their main loops.  If each asked for its operands at the start, the burst would
    delay the slots it starts with; spread over the main loop there is bandwidth to spare.
    """
    groups, use = _groups_of(kernel, step), step // kernel.geometry.steps_of_group
    boxes = range(kernel.plan.tile_n // ATOM_COLUMNS)
    due = [(group, slot, box) for group in groups for slot in kernel.operand_tiles for box in boxes]
    first = _first_operand_slot(kernel)
    for nth, (group, slot, box) in enumerate(due):
        with when(k == first + nth * (kernel.geometry.k_slots - first) // len(due)):
            index = kernel.tile_barrier(group, slot.tile)
            if box == 0:
                kernel.stamps.begin("staging tile", step, nth)
                wait(kernel.tile_empty, index, (use + 1) % 2)  # parity 1 passes on a fresh barrier
                kernel.stamps.end("staging tile", step, nth)
                arm(kernel.tile_full, index, kernel.layout.tile_bytes)
            target, at = box_of(kernel, step, group, slot.tile, box)
            do(T.ptx[TMA_LOAD](target, _address(slot.map), *at, kernel.tile_full.ptr_to([index])))


def _operands_ahead(kernel: Any, step: Expr, k: Expr) -> None:
    """Brings the step's [M, N] operands that the warp groups read from global memory to L2, spread over the main loop."""
    # half a box more than there is may be the neighbour's, who brings it anyhow
    plan, boxes = kernel.plan, math.ceil(kernel.plan.tile_n / ATOM_COLUMNS)
    groups = _groups_of(kernel, step)
    due = [(group, slot, box) for slot in kernel.tiles if slot.ahead for group in groups for box in range(boxes)]
    for nth, (group, slot, box) in enumerate(due):
        with when(k == nth * kernel.geometry.k_slots // len(due)):
            row = kernel.place.row(step) + kernel.group_row(group) * plan.tile_m
            column = kernel.place.column(step) + kernel.group_column(group) * plan.tile_n + box * ATOM_COLUMNS
            do(T.ptx[TMA_PREFETCH](_address(slot.map), column, row))


def _first_operand_slot(kernel: Any) -> int:
    """The slot with which operands begin.

    Before, the step in front may still be at its stages and have its results in the tile.  To wait for the tile then would
    keep the ring empty behind the stages: the first products of each step had to wait for their loads, 4% of a kernel's time.
    """
    return min(kernel.plan.pipeline_depth + 1, kernel.geometry.k_slots - 1)


def send_results(kernel: Any) -> None:
    """Warp 1: stores each result tile once its warp group has written it, then frees the tile.

    Of warp groups that do a step together the first results come first, then the second ones.  Before its next result a group
    waits for the one in front to be gone; and a result behind an exchange waits for the partials of all groups.  So to wait for
    all results of one group first would be to wait for ever.  A memory warp group makes all results of one tile before it takes
    the next one: there it is the other way round.
    """
    groups, results = kernel.plan.mma_groups, range(len(kernel.store_tiles))
    with _turn(kernel)(kernel.place.steps, "step") as step:
        if kernel.plan.hands_over:
            with loop(groups, "group") as group:
                for nth in results:
                    _send(kernel, step, nth, group, step)
            return
        for nth in results:
            if kernel.geometry.pingpong:
                _send(kernel, step, nth, step % groups, step // groups)
                continue
            with loop(groups, "group") as group:
                _send(kernel, step, nth, group, step)


def _send(kernel: Any, step: Expr, nth: int, group: Expr, use: Expr) -> None:
    """A result of one group's step; `use` is how many steps the group did before."""
    stores, groups = kernel.store_tiles, kernel.plan.mma_groups
    slot = stores[nth]
    kernel.stamps.begin("result", step, nth, at=group, extent=groups)
    wait(kernel.tile_ready, group, (use * len(stores) + nth) % 2)
    kernel.stamps.end("result", step, nth, at=group, extent=groups)
    kernel.stamps.begin("store", step, nth, at=group, extent=groups)
    for box in range(kernel.plan.tile_n // ATOM_COLUMNS):
        source, at = box_of(kernel, step, group, slot.tile, box)
        do(T.ptx[TMA_STORE](_address(slot.map), *at, source))
    do(T.ptx.cp.async_.bulk.commit_group())
    do(T.ptx.cp.async_.bulk.wait_group.read(0))
    if nth + 1 < len(stores):
        arrive(kernel.tile_next, group)
    else:
        arrive(kernel.tile_empty, kernel.tile_barrier(group, slot.tile))
    kernel.stamps.end("store", step, nth, at=group, extent=groups)


def box_of(kernel: Any, step: Expr, group: Expr, tile: int, box: int) -> tuple[Expr, tuple[Expr, Expr]]:
    """(shared address, (column, row) in the tensor) of a 64-column box of a group's tile."""
    plan = kernel.plan
    row = kernel.place.row(step) + kernel.group_row(group) * plan.tile_m
    column = kernel.place.column(step) + kernel.group_column(group) * plan.tile_n + box * ATOM_COLUMNS
    offset = kernel.layout.tile(group, tile) + box * plan.tile_m * ATOM_BYTES
    return kernel.smem.ptr_to([offset]), (column, row)


def _address(tensor_map: Any) -> Expr:
    return T.address_of(tensor_map)


__all__ = ["b_boxes", "box_of", "fill_ring", "send_results"]
