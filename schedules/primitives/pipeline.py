"""Says how loads run ahead of products."""

from __future__ import annotations

from typing import Any

from tvm import s_tir

from ..plan import Plan

#: loop annotation of the loop over K slots: slots in the ring between producer and MMA warp groups
PIPELINE_DEPTH = "comfuse.pipeline_depth"


def set_pipeline(sch: s_tir.Schedule, slot: Any, plan: Plan) -> None:
    """Annotates the loop over K slots with the depth of the ring that holds them."""
    sch.annotate(slot, PIPELINE_DEPTH, plan.pipeline_depth)
