"""Tiles the product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import s_tir

from ..plan import Plan
from .pipeline import set_pipeline

#: loop annotation: the layout of the MMA warp groups over the tile inside
LAYOUT = "comfuse.layout"


@dataclass(frozen=True)
class GemmLoops:
    """Loops of the tiled product, from outside in: over row tiles, column tiles, K slots, then inside a tile."""

    row_tile: Any
    column_tile: Any
    slot: Any
    row: Any
    column: Any
    k: Any


def tile_gemm(sch: s_tir.Schedule, plan: Plan) -> GemmLoops:
    """Splits the block ``gemm`` into CTA tiles and pipeline slots.

    Rows are split by the CTA's rows, columns by its columns and K by tile_k; predicates take care of every M, N and K
    that is not a multiple, and of a symbolic M.
    """
    gemm = sch.get_sblock("gemm")
    i, j, k = sch.get_loops(gemm)
    row_tile, row = sch.split(i, [None, plan.cta_rows])
    column_tile, column = sch.split(j, [None, plan.cta_columns])
    slot, inner = sch.split(k, [None, plan.tile_k])
    sch.reorder(row_tile, column_tile, slot, row, column, inner)
    sch.annotate(column_tile, LAYOUT, f"{plan.layout}:{plan.groups_m}x{plan.groups_n}")
    set_pipeline(sch, slot, plan)
    return GemmLoops(row_tile, column_tile, slot, row, column, inner)
