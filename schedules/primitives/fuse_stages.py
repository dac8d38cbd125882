"""Puts the stages and reductions behind the product of their rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tvm import s_tir

#: loop annotation of the loop over row tiles: rows of a tile
ROW_TILE = "comfuse.row_tile"


def fuse_stages(sch: s_tir.Schedule, row_tile: Any, names: Iterable[str], rows: int) -> None:
    """Moves the blocks ``names`` (every block but gemm, in program order) under the product's loop over row tiles.

    They are moved forward, as consumers, since outputs can be in any stage and an output block cannot be moved as a
    producer.  Each row value is complete within a row tile, so any row reduction may sit there.
    """
    for name in names:
        sch.reverse_compute_at(sch.get_sblock(name), row_tile)
    sch.annotate(row_tile, ROW_TILE, rows)
    sch.parallel(row_tile)
