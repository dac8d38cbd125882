"""Which plans there are for a cluster, and which one to take without measuring."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from tvm_comfuse.refusal import Refusal

from .co_residency import MAX_CLUSTER, row_length
from .cost import estimate
from .device import Device
from .footprint import row_parts, w_part_bytes
from .legality import legality, supported
from .plan import COOPERATIVE_GROUPS, QUAD_COLUMNS, Plan
from .spec import ClusterSpec
from .tails import packs
from .walk import COLUMNS, TURNS, in_turn, walks

#: rows and columns of a group's tile: from 32 to 128 accumulators a thread
TILES = ((64, 64), (64, 128), (64, 192), (64, 256), (128, 64), (128, 128))
TILE_K = 64
DEPTHS = range(2, 9)
#: layout, groups_m, groups_n
LAYOUTS = (("pingpong", 1, 1), ("cooperative", 2, 1), ("cooperative", 1, 2), ("memory", 2, 1))
#: of the pingpong layout with a resident W, whose main loop may be too short for two to hide their stages; in kernels of four
#: ptxas spills registers too often to take one unseen
MMA_GROUPS = (2, 3)
CLUSTERS_M = (1, 2)


def candidates(spec: ClusterSpec, device: Device) -> list[Plan]:
    """All legal plans of the enumeration, in a fixed order; [] if there is none."""
    if supported(spec) or any(row_length(spec, device)):
        return []
    return [plan for plan in _enumerate(spec, device) if not legality(plan, spec, device)]


@lru_cache(maxsize=512)
def default_plan(spec: ClusterSpec, device: Device) -> Plan | Refusal:
    """The candidate with the smallest estimate.

    Ties go to the smaller cluster, then to the deeper pipeline, then to fewer CTAs for a row, then to the earlier
    candidate.  A refusal says why no candidate is legal.  It takes up to a second, so equal clusters, as of a model's equal
    layers, are looked at once.
    """
    reasons = [*supported(spec), *row_length(spec, device)]
    if reasons:
        return reasons[0]
    plans = candidates(spec, device)
    if not plans:
        return _why_none(spec, device)
    return min(plans, key=lambda plan: rank(plan, spec, device))


def rank(plan: Plan, spec: ClusterSpec, device: Device) -> tuple[float, int, int, int]:
    """Sort key of default_plan: whole nanoseconds (so that rounding cannot decide), then the tie rules."""
    total = round(estimate(plan, spec, device).total, 3)
    return total, plan.cluster_m * plan.cluster_n, -plan.pipeline_depth, row_parts(plan, spec)


def scopes(spec: ClusterSpec, cta_columns: int, groups_n: int, cluster_m: int) -> list[str]:
    """Exchange scopes that reach all parts of a row, nearest first."""
    if not spec.reductions:
        return ["none"]
    parts = math.ceil(spec.n / cta_columns)
    if parts == 1:
        return ["warp" if groups_n == 1 else "cta"]
    return (["cluster"] if parts * cluster_m <= MAX_CLUSTER else []) + ["grid"]


def persistent_ctas(plan: Plan, spec: ClusterSpec, device: Device) -> int:
    """CTAs of the grid: all that run at once in whole clusters and, unless they take turns, rows; no more than there are tiles.

    At least what one row needs, which is more than run at once for a very long row; legality then says so.
    """
    size = plan.cluster_m * plan.cluster_n
    parts = row_parts(plan, spec)
    step = plan.cluster_m if in_turn(plan) else parts * plan.cluster_m
    most = max(1, device.clusters(size) * size // step) * step
    if spec.m is None:
        return most
    units = math.ceil(spec.m / (plan.tile_m * plan.groups_m))
    return min(most, math.ceil(units / plan.cluster_m) * plan.cluster_m * parts)


def placements(spec: ClusterSpec) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Placements of [M, N] operands and outputs worth a look, the preferred one first.

    The first operand shares its tile with the outputs, so TMA costs nothing more for both; further operands have a tile
    of their own.  float32 tensors do not go through TMA.
    """
    halves = [tuple(tensor.dtype != "float32" for tensor in group) for group in (spec.tile_operands, spec.tile_outputs)]
    operands, store = (tuple("tma" if half else "global" for half in group) for group in halves)
    only = operands.index("tma") if "tma" in operands else -1
    first = tuple("tma" if n == only else "global" for n in range(len(operands)))
    no_operand, no_store = ("global",) * len(operands), ("global",) * len(store)
    return list(dict.fromkeys([(first, store), (operands, store), (no_operand, store), (no_operand, no_store)]))


@dataclass(frozen=True)
class Form:
    """Where [M, N] tensors pass, in which order W's rows are taken, and whether tails are deferred and packed."""

    operands: tuple[str, ...]
    store: tuple[str, ...]
    w_order: str = "rows"
    defer: bool = False
    packed: bool = False


def forms(spec: ClusterSpec, layout: str) -> list[Form]:
    """Forms worth a look: staging tiles, and global memory in quads, which allows tails to be deferred.

    Each also with a packed tail, if it can be one: that rounds intermediate results, with an error below eager PyTorch's.
    """
    found = [Form(operands, store) for operands, store in placements(spec)]
    if spec.w_layout == "NK" and spec.n % QUAD_COLUMNS == 0:
        direct = ("global",) * len(spec.tile_operands), ("global",) * len(spec.tile_outputs)
        found.append(Form(*direct, "quads"))
        if layout != "pingpong" and spec.reductions:
            found.append(Form(*direct, "quads", True))
    return [*found, *(replace(form, packed=True) for form in found)] if packs(spec) else found


def residencies(spec: ClusterSpec, cta_columns: int, cluster_m: int, device: Device) -> tuple[bool, ...]:
    """Whether W may stay in shared memory: never what a cluster shares, nor what cannot fit even without a ring."""
    possible = cluster_m == 1 and w_part_bytes(spec, cta_columns, TILE_K) < device.shared_memory
    return (False, True) if possible else (False,)


def usual_walk(spec: ClusterSpec, w_resident: bool) -> str:
    """CTAs take turns where they can: no SM is left over, and less of W is read from device memory; tuning looks at both."""
    return TURNS if TURNS in walks(spec) and not w_resident else COLUMNS


def group_counts(layout: str, w_resident: bool) -> tuple[int, ...]:
    """Numbers of MMA warp groups worth a look."""
    return MMA_GROUPS if layout == "pingpong" and w_resident else (COOPERATIVE_GROUPS,)


def _enumerate(spec: ClusterSpec, device: Device) -> Iterator[Plan]:
    # a memory warp group has been timed on clusters with row values only
    layouts = [each for each in LAYOUTS if spec.reductions or each[0] != "memory"]
    shapes = product(TILES, layouts, CLUSTERS_M)
    for (tile_m, tile_n), (layout, groups_m, groups_n), cluster_m in shapes:
        columns = tile_n * groups_n
        for scope in scopes(spec, columns, groups_n, cluster_m):
            cluster_n = math.ceil(spec.n / columns) if scope == "cluster" else 1
            resident = residencies(spec, columns, cluster_m, device)
            groups = [(stays, count) for stays in resident for count in group_counts(layout, stays)]
            for form, (w_resident, mma_groups), depth in product(forms(spec, layout), groups, DEPTHS):
                plan = Plan(
                    tile_m=tile_m,
                    tile_n=tile_n,
                    tile_k=TILE_K,
                    pipeline_depth=depth,
                    layout=layout,
                    groups_m=groups_m,
                    groups_n=groups_n,
                    exchange=scope,
                    cluster_m=cluster_m,
                    cluster_n=cluster_n,
                    ctas=1,
                    operands=form.operands,
                    store=form.store,
                    defer=form.defer,
                    w_order=form.w_order,
                    w_resident=w_resident,
                    mma_groups=mma_groups,
                    # waiting happens behind the prologue, so it is never slower
                    dependent_launch=True,
                    packed_tail=form.packed,
                )
                plan = replace(plan, walk=usual_walk(spec, w_resident))
                yield replace(plan, ctas=persistent_ctas(plan, spec, device))


def _why_none(spec: ClusterSpec, device: Device) -> Refusal:
    """The refusals of the candidate that came closest, as one."""
    every = [legality(plan, spec, device) for plan in _enumerate(spec, device)]
    nearest = min(every, key=len)
    return Refusal(
        "no-plan",
        "no plan of the enumeration is legal; the nearest one fails: " + "; ".join(r.fact for r in nearest),
        {"tried": len(every), "N": spec.n, "K": spec.k},
        "; ".join(dict.fromkeys(r.remedy for r in nearest if r.remedy)),
    )
