"""Shared memory of a CTA, part by part; the one place where this arithmetic is done."""

from __future__ import annotations

import math

import tvm

from .plan import QUAD_COLUMNS, Plan
from .spec import ClusterSpec, Operand, rounds

#: bytes of an element of x and w
HALF_BYTES = 2
#: [N] operands are kept as float32
VECTOR_BYTES = 4
#: a mailbox slot is one float32 and its tag
SLOT_BYTES = 8
#: a slot is written again only after the round after the next has read it
SLOT_GENERATIONS = 2
#: start of a tile with 128-byte swizzle
TILE_ALIGNMENT = 1024
#: mbarriers are static shared memory in front of the tiles, which start at the next multiple of TILE_ALIGNMENT
BARRIERS_BYTES = TILE_ALIGNMENT


def dtype_bytes(dtype: str) -> int:
    """Bytes of an element of a TVM dtype."""
    return (tvm.DataType(dtype).bits + 7) // 8


def row_parts(plan: Plan, spec: ClusterSpec) -> int:
    """CTAs that together hold a row of the result."""
    return math.ceil(spec.n / plan.cta_columns)


def slot_rows(plan: Plan) -> tuple[int, int]:
    """Rows of x and columns of w in one pipeline slot."""
    return plan.tile_m * plan.groups_m, plan.tile_n * plan.groups_n


def w_box_rows(plan: Plan, w_layout: str) -> int:
    """Rows of one TMA box of W; CTAs that share W load boxes in turns.

    Of w [N, K] an equal share of a warp group's tile; or, where its quads cannot be shared equally, one of them.
    """
    if w_layout != "NK":
        return plan.tile_k
    equal = plan.tile_n // plan.cluster_m
    return QUAD_COLUMNS if plan.w_order == "quads" and equal % QUAD_COLUMNS else equal


def a_box_rows(plan: Plan) -> int:
    """Rows of one TMA box of x; CTAs that share A load boxes in turns, so there are as many or, to be equal, a few more."""
    rows = slot_rows(plan)[0]
    return rows >> (plan.cluster_n - 1).bit_length() if plan.share_a else rows


def w_part_bytes(spec: ClusterSpec, columns: int, tile_k: int) -> int:
    """A CTA's columns of W over all of K, in tiles of tile_k."""
    return math.ceil(spec.k / tile_k) * tile_k * columns * HALF_BYTES


def resident_bytes(plan: Plan, spec: ClusterSpec) -> int:
    """What W takes for the CTA's whole life; 0 if it goes through the ring."""
    return w_part_bytes(spec, plan.cta_columns, plan.tile_k) if plan.w_resident else 0


def stored_by_tma(plan: Plan, spec: ClusterSpec) -> list[str]:
    """Blocks of the outputs that TMA writes, in the order in which a kernel computes them."""
    placed = dict(zip([output.block for output in spec.tile_outputs], plan.store, strict=True))
    return [block for blocks in spec.passes for block in blocks if placed.get(block) == "tma"]


def shared_operand(plan: Plan, spec: ClusterSpec) -> Operand | None:
    """The TMA-placed operand whose tile the outputs that TMA writes may take; None if there is none.

    No pass may read it after the one that writes the first output.  That pass itself may: a thread overwrites just the
    elements that it has read.
    """
    stored = stored_by_tma(plan, spec)
    if not stored:
        return None
    position = {block: number for number, blocks in enumerate(spec.passes) for block in blocks}
    first = position[stored[0]]
    loaded = [o for o, where in zip(spec.tile_operands, plan.operands, strict=True) if where == "tma"]
    return next((o for o in loaded if all(position[block] <= first for block in o.readers)), None)


def staging_tiles(plan: Plan, spec: ClusterSpec) -> int:
    """Half-precision tiles of tile_m x tile_n for each MMA warp group.

    One for each [M, N] operand that TMA reads.  The outputs that TMA writes share one: that of the shared_operand, else one
    of their own.
    """
    own = bool(stored_by_tma(plan, spec)) and shared_operand(plan, spec) is None
    return plan.operands.count("tma") + own


def shared_memory(plan: Plan, spec: ClusterSpec) -> dict[str, int]:
    """Bytes of shared memory by part; their sum must fit into Device.shared_memory.

    pipeline    slots of x and w tiles; of x tiles only if W is resident
    resident_w  resident_bytes
    staging     staging_tiles for each MMA warp group
    handover    a half-precision tile for each MMA warp group, if there is a memory warp group
    vectors     [N] operands, the columns of the CTA
    mailboxes   row partials, if they are exchanged inside a CTA or cluster; the tag base, if across the grid
    barriers    mbarriers

    Pipeline, resident_w, staging and handover are multiples of TILE_ALIGNMENT for every legal tile.
    """
    rows, columns = slot_rows(plan)
    in_slot = rows if plan.w_resident else rows + columns
    return {
        "pipeline": plan.pipeline_depth * in_slot * plan.tile_k * HALF_BYTES,
        "resident_w": resident_bytes(plan, spec),
        "staging": plan.mma_groups * staging_tiles(plan, spec) * plan.tile_m * plan.tile_n * HALF_BYTES,
        "handover": plan.mma_groups * plan.tile_m * plan.tile_n * HALF_BYTES if plan.hands_over else 0,
        "vectors": len(spec.col_operands) * VECTOR_BYTES * columns,
        "mailboxes": mailbox_bytes(plan, spec),
        "barriers": BARRIERS_BYTES,
    }


def mailbox_bytes(plan: Plan, spec: ClusterSpec) -> int:
    """Slots for every row and part of a row of each MMA warp group, and every row value of the largest round.

    Those of an exchange across the grid are in global memory; the CTA keeps where their tags begin.
    """
    if plan.exchange == "grid":
        return SLOT_BYTES
    if plan.exchange not in ("cta", "cluster"):
        return 0
    parts = row_parts(plan, spec) * plan.groups_n
    values = max((len(group) for group in rounds(spec)), default=0)
    return SLOT_GENERATIONS * plan.mma_groups * plan.tile_m * parts * values * SLOT_BYTES
