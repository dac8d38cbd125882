"""A drawn shape and plan: choices that are independent of each other, made legal for the cluster they meet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from tvm_comfuse.schedules.co_residency import MAX_CLUSTER, clusters_n
from tvm_comfuse.schedules.device import Device
from tvm_comfuse.schedules.legality import legality
from tvm_comfuse.schedules.plan import COOPERATIVE_GROUPS, QUAD_COLUMNS, Plan
from tvm_comfuse.schedules.spec import ClusterSpec
from tvm_comfuse.schedules.timetable import deferred_slots
from tvm_comfuse.schedules.walk import COLUMNS, TURNS, walks

TILE_K = 64
#: TMA strides
STEP = 8
#: (tile_m, tile_n) of at most 128 accumulators a thread
TILES = ((64, 64), (64, 128), (64, 192), (64, 256), (128, 64), (128, 128))
#: layout, groups_m, groups_n
LAYOUTS = (("cooperative", 2, 1), ("pingpong", 1, 1), ("cooperative", 1, 2), ("memory", 2, 1))
#: elements of the result, those of partly empty tiles included, and CTAs: what is checked and interpreted in half a second
MOST_ELEMENTS, MOST_CTAS = 48 * 1024, 16
MIN_DEPTH = 2


@dataclass(frozen=True)
class Choice:
    """Shape and plan.

    tile, layout      index into TILES, LAYOUTS
    parts             CTAs that share a row, fewer of large tiles
    near              exchange by cluster rather than grid, where both reach
    cluster_m         wished for; less where the cluster grows too large
    row_groups        CTAs along M beyond what a cluster needs
    units             tiles along M; missing_rows, missing_columns: what the last tile lacks, columns in steps of 8
    slots             along K; missing_depth: what the last lacks, in steps of 8
    depth             of the pipeline, less where it does not fit
    resident          W stays in shared memory, where the cluster shares none and it fits
    defer, quads      wished for; where the cluster or the layout does not go with them, there is less or nothing of it
    fast, dependent   fast_math, dependent_launch
    packed            wished for; nothing of it where the tail does not go with it
    narrow            tiles are a group of quads narrower; of other orders they are not
    in_turn           CTAs take turns at all tiles, where the cluster can have it
    share             CTAs of a row share A, where some of them fit into a thread block cluster and keep their columns
    groups            MMA warp groups wished for; fewer where they do not fit, two in the cooperative layout
    operands, stores  bit n: tensor n does not go by TMA; a float32 one never does
    """

    tile: int = 0
    layout: int = 0
    parts: int = 1
    near: bool = True
    cluster_m: int = 1
    row_groups: int = 1
    units: int = 1
    missing_rows: int = 0
    missing_columns: int = 0
    slots: int = 1
    missing_depth: int = 0
    depth: int = 2
    resident: bool = False
    groups: int = COOPERATIVE_GROUPS
    operands: int = 0
    stores: int = 0
    defer: bool = False
    quads: bool = False
    fast: bool = False
    dependent: bool = False
    packed: bool = False
    narrow: bool = False
    in_turn: bool = False
    share: bool = False

    def tile_n(self, w_order: str) -> int:
        """Columns of a tile."""
        return TILES[self.tile][1] - QUAD_COLUMNS * (self.narrow and w_order == "quads")

    def sizes(self, row_multiple: int) -> tuple[int, int, int]:
        """M, N and K; M a multiple of row_multiple."""
        (tile_m, _), (_, groups_m, groups_n) = TILES[self.tile], LAYOUTS[self.layout]
        tile_n = self.tile_n(_order(self))
        columns, tall = tile_n * groups_n, tile_m * groups_m
        parts = min(self.parts, max(2, MOST_ELEMENTS // (columns * tall)))
        units = max(1, min(self.units, MOST_ELEMENTS // (columns * tall * parts)))
        rows = units * tall - self.missing_rows % tall
        rows = max(rows // row_multiple, 1) * row_multiple
        step = QUAD_COLUMNS if self.quads else STEP
        n = parts * columns - step * (self.missing_columns % (columns // step))
        return rows, n, self._slots(tile_n, parts * groups_n) * TILE_K - STEP * (self.missing_depth % (TILE_K // STEP))

    def _slots(self, tile_n: int, row_parts: int) -> int:
        """Slots along K: for a deferred tail as few as there must be, or some more."""
        if not self.defer or LAYOUTS[self.layout][0] != "cooperative":
            return self.slots
        return deferred_slots(tile_n, "warp" if row_parts == 1 else "grid") + self.slots // 3


def fit(choice: Choice, spec: ClusterSpec, device: Device) -> Plan | None:
    """The first legal plan of those nearest to the choice; None if there is none."""
    # a memory warp group has smaller tiles and no outputs in full precision; the cooperative layout 2 x 1 has the same sizes
    layouts = [choice.layout, *([0] if LAYOUTS[choice.layout][0] == "memory" else [])]
    wishes = (plan for layout in layouts for plan in _wishes(replace(choice, layout=layout), spec))
    return next((plan for plan in wishes if not legality(plan, spec, device)), None)


def _wishes(choice: Choice, spec: ClusterSpec) -> Iterator[Plan]:
    forms = [(defer, order) for defer in {choice.defer: 0, False: 0} for order in {_order(choice): 0, "rows": 0}]
    for cluster_m, (defer, w_order) in product(sorted({choice.cluster_m, 1}, reverse=True), forms):
        wish = replace(_plan(choice, spec, cluster_m, choice.tile_n(w_order)), defer=defer, w_order=w_order)
        nowhere = {"operands": ("global",) * len(wish.operands), "store": ("global",) * len(wish.store)}
        less: list[dict[str, Any]] = [{}, {"operands": nowhere["operands"]}, nowhere]
        if defer or w_order != "rows":
            less = [nowhere]
        counts = range(wish.mma_groups, COOPERATIVE_GROUPS - 1, -1)
        stays, tails = (sorted({wished, False}, reverse=True) for wished in (wish.w_resident, choice.packed))
        for placement, packed_tail, mma_groups, w_resident in product(less, tails, counts, stays):
            more = {"packed_tail": packed_tail, "w_resident": w_resident, "mma_groups": mma_groups, **placement}
            for depth in range(choice.depth, MIN_DEPTH - 1, -1):
                yield replace(wish, pipeline_depth=depth, **more)


def _order(choice: Choice) -> str:
    return "quads" if choice.quads else "rows"


def _plan(choice: Choice, spec: ClusterSpec, cluster_m: int, tile_n: int) -> Plan:
    (tile_m, _), (layout, groups_m, groups_n) = TILES[choice.tile], LAYOUTS[choice.layout]
    parts = -(-spec.n // (tile_n * groups_n))
    step, exchange = parts * cluster_m, "none"
    if spec.reductions:
        reach = parts * cluster_m <= MAX_CLUSTER and choice.near
        exchange = ("warp" if groups_n == 1 else "cta") if parts == 1 else "cluster" if reach else "grid"
    in_turn = choice.in_turn and TURNS in walks(spec)
    if in_turn:
        step = cluster_m
    plan = Plan(
        tile_m=tile_m,
        tile_n=tile_n,
        tile_k=TILE_K,
        pipeline_depth=choice.depth,
        layout=layout,
        groups_m=groups_m,
        groups_n=groups_n,
        exchange=exchange,
        cluster_m=cluster_m,
        cluster_n=parts if exchange == "cluster" else 1,
        ctas=step * max(1, min(choice.row_groups, MOST_CTAS // step)),
        operands=_placed(spec.tile_operands, choice.operands),
        store=_placed(spec.tile_outputs, choice.stores),
        w_resident=choice.resident and cluster_m == 1 and not in_turn,
        walk=TURNS if in_turn else COLUMNS,
        mma_groups=choice.groups if layout == "pingpong" else COOPERATIVE_GROUPS,
        fast_math=choice.fast,
        dependent_launch=choice.dependent,
    )
    sharing = replace(plan, share_a=True)
    if not choice.share or in_turn or not clusters_n(sharing, spec):
        return plan
    return replace(sharing, cluster_n=clusters_n(sharing, spec)[0])


def _placed(tensors: Any, bits: int) -> tuple[str, ...]:
    return tuple(
        "global" if bits >> number & 1 or tensor.dtype == "float32" else "tma" for number, tensor in enumerate(tensors)
    )
