"""Clauses about the registers' columns and about the stages behind the last exchange: their order, when and how they run."""

from __future__ import annotations

import math
from collections.abc import Iterator

from tvm_comfuse.refusal import Refusal

from .device import Device
from .plan import COOPERATIVE_GROUPS, QUAD_COLUMNS, Plan
from .spec import ClusterSpec
from .split import head_blocks, tail_blocks, tail_stages
from .timetable import least_slots

MATRIX_DTYPES = ("bfloat16", "float16")


def quads(plan: Plan, spec: ClusterSpec, device: Device) -> Iterator[Refusal]:
    """Groups of 32 rows of w can be put in another order by TMA; the result goes past staging tiles then."""
    if plan.w_order != "quads":
        return
    if spec.w_layout != "NK" or spec.n % QUAD_COLUMNS or plan.tile_n // QUAD_COLUMNS < plan.cluster_m:
        yield Refusal(
            "quads-w",
            f"w_order quads needs w [N, K], N a multiple of {QUAD_COLUMNS}, and such a group of rows for each CTA of cluster_m",
            {"layout": spec.w_layout, "N": spec.n, "tile_n": plan.tile_n, "cluster_m": plan.cluster_m},
            "set w_order to rows",
        )
    if "tma" in plan.operands + plan.store:
        yield Refusal(
            "quads-placement",
            "staging tiles hold columns in their natural order, which the registers do not with w_order quads",
            {"operands": list(plan.operands), "store": list(plan.store)},
            "place every operand and output in global memory, or set w_order to rows",
        )


def deferral(plan: Plan, spec: ClusterSpec, device: Device) -> Iterator[Refusal]:
    """A deferred tail needs no staging tile and no full precision, and, if it runs beside a main loop, slots of that."""
    if not plan.defer:
        return
    if plan.layout == "pingpong" or not spec.reductions:
        yield Refusal(
            "defer-layout",
            "deferred stages are for the cooperative or memory layout of a cluster with a row reduction",
            {"layout": plan.layout, "reductions": len(spec.reductions)},
            "set defer to false",
        )
    if "tma" in plan.operands + plan.store:
        yield Refusal(
            "defer-placement",
            "a deferred tail runs while staging tiles belong to the next step",
            {"operands": list(plan.operands), "store": list(plan.store)},
            "place every operand and output in global memory, or set defer to false",
        )
    for output in spec.tile_outputs:
        if output.dtype not in MATRIX_DTYPES and output.block in tail_blocks(spec):
            yield Refusal(
                "defer-dtype",
                "a deferred tail makes its outputs of values that wait in half precision",
                {"name": output.block, "dtype": output.dtype},
                "set defer to false, or let the model round the output to half precision",
            )
    slots = math.ceil(spec.k / plan.tile_k)
    if not plan.hands_over and slots < least_slots(plan):
        yield Refusal(
            "defer-slots",
            "a main loop must have a slot for each part of the deferred work, and some for the partials to arrive",
            {"K": spec.k, "slots": slots, "needed": least_slots(plan)},
            "set defer to false",
        )


def packing(plan: Plan, spec: ClusterSpec, device: Device) -> Iterator[Refusal]:
    """A packed tail reads and makes half-precision words of two neighbours, by operations that have packed instructions."""
    if not plan.packed_tail:
        return
    yield from unpackable(spec)
    tail = tail_blocks(spec)
    for operand, where in zip(spec.tile_operands, plan.operands, strict=True):
        if where == "global" and plan.w_order != "quads" and not tail.isdisjoint(operand.readers):
            yield Refusal(
                "packed-placement",
                "a packed tail takes words of [M, N] operands, which come as float32 from global memory in the order of rows",
                {"name": operand.name, "placement": where, "w_order": plan.w_order},
                "set packed_tail to false, w_order to quads, or place the operand in a staging tile",
            )


def packs(spec: ClusterSpec) -> bool:
    """Whether a cluster's tail can be packed in some plan."""
    return next(unpackable(spec), None) is None


def unpackable(spec: ClusterSpec) -> Iterator[Refusal]:
    """Every reason why a cluster's tail cannot be packed, whatever the plan."""
    tail, head = tail_blocks(spec), head_blocks(spec)
    outputs = [output for output in spec.tile_outputs if output.block in tail]
    carried = [stage.carried for stage in tail_stages(spec)[1] if stage.carried]
    if not spec.reductions or not outputs or carried:
        yield Refusal(
            "packed-outputs",
            "a packed tail is behind a row reduction and makes outputs of the carried value, no further carried value",
            {"reductions": len(spec.reductions), "outputs": len(outputs), "carried": len(carried)},
            "set packed_tail to false",
        )
    for output in outputs:
        if not output.packable or output.dtype != spec.x_dtype:
            yield Refusal(
                "packed-expression",
                f"packed arithmetic has sums, products and max(v, 0) of {spec.x_dtype} values",
                {"name": output.block, "dtype": output.dtype, "packable": output.packable},
                "set packed_tail to false",
            )
    for operand in spec.operands:
        if operand.kind not in ("tile", "col") or tail.isdisjoint(operand.readers):
            continue
        both = operand.kind == "col" and not head.isdisjoint(operand.readers)
        if operand.dtype != spec.x_dtype or both:
            yield Refusal(
                "packed-operand",
                f"a packed tail reads {spec.x_dtype} operands, and [N] operands that nothing else reads",
                {"name": operand.name, "dtype": operand.dtype, "read before": both},
                "set packed_tail to false",
            )


def in_one_pass(plan: Plan) -> bool:
    """Whether a pair of moments takes one pass over the tile (tir_passes.emit.moments).

    With more warp groups than two, threads have no registers for both sums.
    """
    return plan.mma_groups == COOPERATIVE_GROUPS


def packed_vectors(plan: Plan, spec: ClusterSpec) -> frozenset[str]:
    """Names of the [N] operands that are kept as words of two neighbours, for a packed tail."""
    if not plan.packed_tail:
        return frozenset()
    tail = tail_blocks(spec)
    return frozenset(operand.name for operand in spec.col_operands if not tail.isdisjoint(operand.readers))
