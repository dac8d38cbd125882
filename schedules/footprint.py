"""Shared memory of a CTA, part by part; the one place where this arithmetic is done."""

from __future__ import annotations

import math

import tvm

from .plan import MMA_GROUPS, Plan
from .spec import ClusterSpec, rounds

#: bytes of an element of x and w
HALF_BYTES = 2
#: [N] operands are kept as float32
VECTOR_BYTES = 4
#: a mailbox slot is one float32 and its tag
SLOT_BYTES = 8
#: a slot is written again only after the round after the next has read it
SLOT_GENERATIONS = 2
#: an mbarrier, and how many a CTA has besides two for each pipeline slot: the order of the groups and their tiles
BARRIER_BYTES, OTHER_BARRIERS = 8, 16
#: start of a tile with 128-byte swizzle
TILE_ALIGNMENT = 1024


def dtype_bytes(dtype: str) -> int:
    """Bytes of an element of a TVM dtype."""
    return (tvm.DataType(dtype).bits + 7) // 8


def row_parts(plan: Plan, spec: ClusterSpec) -> int:
    """CTAs that together hold a row of the result."""
    return math.ceil(spec.n / plan.cta_columns)


def slot_rows(plan: Plan) -> tuple[int, int]:
    """Rows of x and columns of w in one pipeline slot."""
    return plan.tile_m * plan.groups_m, plan.tile_n * plan.groups_n


def staging_bytes(plan: Plan, spec: ClusterSpec) -> int:
    """The staging tile of one MMA warp group, in bytes; 0 if nothing of it goes through TMA.

    It takes the first [M, N] operand that TMA reads and, afterwards, the outputs that TMA writes.
    """
    loaded = [o.dtype for o, where in zip(spec.tile_operands, plan.operands, strict=False) if where == "tma"][:1]
    stored = [o.dtype for o, where in zip(spec.tile_outputs, plan.store, strict=False) if where == "tma"]
    widest = max((dtype_bytes(dtype) for dtype in loaded + stored), default=0)
    return plan.tile_m * plan.tile_n * widest


def shared_memory(plan: Plan, spec: ClusterSpec) -> dict[str, int]:
    """Bytes of shared memory by part; their sum must fit into Device.shared_memory.

    pipeline    slots of x and w tiles
    staging     a tile for each MMA warp group (staging_bytes)
    operands    further tiles for the second and later [M, N] operands that TMA reads
    vectors     [N] operands, the columns of the CTA
    mailboxes   row partials of the CTA's own rows, if they are exchanged inside a CTA or cluster
    barriers    mbarriers

    The parts up to ``operands`` are multiples of TILE_ALIGNMENT for every legal tile.
    """
    rows, columns = slot_rows(plan)
    loaded = [o.dtype for o, where in zip(spec.tile_operands, plan.operands, strict=False) if where == "tma"]
    further = sum(plan.tile_m * plan.tile_n * dtype_bytes(dtype) for dtype in loaded[1:])
    return {
        "pipeline": plan.pipeline_depth * (rows + columns) * plan.tile_k * HALF_BYTES,
        "staging": MMA_GROUPS * staging_bytes(plan, spec),
        "operands": MMA_GROUPS * further,
        "vectors": len(spec.col_operands) * VECTOR_BYTES * columns,
        "mailboxes": mailbox_bytes(plan, spec),
        "barriers": BARRIER_BYTES * (2 * plan.pipeline_depth + OTHER_BARRIERS),
    }


def mailbox_bytes(plan: Plan, spec: ClusterSpec) -> int:
    """Slots for every row of the CTA, every reduction and every part of a row that another warp group holds."""
    if plan.exchange not in ("cta", "cluster"):
        return 0
    parts = plan.groups_n * (plan.cluster_n if plan.exchange == "cluster" else 1)
    values = sum(len(group) for group in rounds(spec))
    return plan.cta_rows * parts * values * SLOT_BYTES * SLOT_GENERATIONS
