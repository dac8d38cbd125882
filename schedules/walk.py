"""The order in which a persistent grid goes through the tiles of a result.

walk ``columns``  a CTA keeps its columns and goes down the rows, so that the CTAs of a row work on it at the same time
walk ``tiles``    CTAs take turns at all tiles, band by band of columns: no CTA is left over where the tiles of a row do not
                  divide the SMs, rows of any length do, and a band's part of W is read again while it is in L2
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from tvm_comfuse.refusal import Refusal

from .device import Device
from .footprint import row_parts, slot_rows
from .plan import WALKS, Plan
from .spec import ClusterSpec

COLUMNS, TURNS = WALKS


def in_turn(plan: Plan) -> bool:
    """Whether CTAs take turns at all tiles."""
    return plan.walk == TURNS


def walks(spec: ClusterSpec) -> tuple[str, ...]:
    """Walks that a cluster can have."""
    return (COLUMNS, TURNS) if not spec.reductions and not spec.col_operands else (COLUMNS,)


def walk(plan: Plan, spec: ClusterSpec, device: Device) -> Iterator[Refusal]:
    """A CTA that changes its columns neither exchanges row values nor keeps anything of its columns."""
    if not in_turn(plan):
        return
    if spec.reductions:
        yield Refusal(
            "walk-reductions",
            "the CTAs that share a row must work on it at the same time, so they keep their columns",
            {"reductions": len(spec.reductions)},
            f"set walk to {COLUMNS}",
        )
    if spec.col_operands or plan.w_resident:
        yield Refusal(
            "walk-vectors",
            "a CTA that takes turns at all tiles keeps neither [N] operands nor W in shared memory",
            {"vectors": len(spec.col_operands), "w_resident": plan.w_resident},
            f"set walk to {COLUMNS}",
        )
    if plan.share_a:
        yield Refusal(
            "walk-share",
            "CTAs that share A keep their columns",
            {"share_a": plan.share_a},
            f"set walk to {COLUMNS}, or share_a to false",
        )


def band_parts(plan: Plan, spec: ClusterSpec) -> int:
    """Tiles along N of a band; the last band may have fewer.

    What `ctas` tiles at a time read is least where they are about as many columns as rows.
    """
    parts, (rows, columns) = row_parts(plan, spec), slot_rows(plan)
    square = max(1, round(math.sqrt(plan.ctas * rows / columns)))
    return math.ceil(parts / math.ceil(parts / square))


def most_steps(plan: Plan, spec: ClusterSpec, units: int) -> int:
    """Tiles of the busiest CTA.

    units  along M, each of the rows of one step of a CTA
    """
    parts = row_parts(plan, spec)
    if in_turn(plan):
        return math.ceil(math.ceil(units / plan.cluster_m) * parts / (plan.ctas // plan.cluster_m))
    return math.ceil(units / (plan.ctas // parts))
