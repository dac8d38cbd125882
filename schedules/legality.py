"""When a plan is legal for a cluster on a device.

One function a clause.  A clause yields refusals; a plan is legal if none of them does.  Clauses do not depend on each
other's outcome, so that all reasons are reported at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tvm_comfuse.refusal import Refusal

from .co_residency import MAX_WGMMA_N, cluster, exchange, grid, row_length
from .device import Device
from .footprint import shared_memory
from .plan import COOPERATIVE_GROUPS, EXCHANGE_SCOPES, LAYOUTS, PLACEMENTS, QUAD_COLUMNS, W_ORDERS, WALKS, Plan
from .registers import THREADS_OF_GROUP, WGMMA_OVERHEAD, entry_registers, role_registers
from .spec import ClusterSpec
from .tails import MATRIX_DTYPES, deferral, packing, quads
from .walk import walk

TILE_ROWS = (64, 128)
#: columns of a 128-byte swizzled tile of half values, and so the step of tile_n and tile_k
ATOM_COLUMNS = 64
#: rows of a swizzle atom
ATOM_ROWS = 8
#: by number of MMA warp groups, whose threads have 232, 160 or 112 registers: with more, ptxas spills addresses, row values
#: and the stages' temporaries
MAX_ACCUMULATORS = {2: 128, 3: 96, 4: 64}
#: the same where [M, N] operands are read from global memory: their rows' addresses and loads in flight take more
MAX_BESIDE_GLOBAL = {2: 128, 3: 64, 4: 32}
#: of MMA warp groups that hand their tile over, and of the memory warp group that takes it
MAX_HANDED_OVER = 96
MAX_BOX_ROWS = 256
#: TMA wants strides that are multiples of 16 bytes
STRIDE_ELEMENTS = 8
MAX_PARAMETERS = 16
STREAM_DTYPES = ("bfloat16", "float16", "float32")
#: the parity of a slot's barrier is kept in a word
MAX_DEPTH = 16

Clause = Callable[[Plan, ClusterSpec, Device], Iterator[Refusal]]


def legality(plan: Plan, spec: ClusterSpec, device: Device) -> list[Refusal]:
    """Every reason why the plan is not legal; [] if it is."""
    malformed = [refusal for clause in FORM for refusal in clause(plan, spec, device)]
    if malformed:
        return malformed
    return [refusal for clause in CLAUSES for refusal in clause(plan, spec, device)]


def supported(spec: ClusterSpec) -> list[Refusal]:
    """Every reason why no plan at all can be legal for a cluster; [] if one may be."""
    return [refusal for clause in CLUSTER_CLAUSES for refusal in clause(spec)]


# --- the cluster itself -----------------------------------------------------------------------------------------------


def matrix_dtype(spec: ClusterSpec) -> Iterator[Refusal]:
    """x and w are both bfloat16 or both float16."""
    if spec.x_dtype != spec.w_dtype or spec.x_dtype not in MATRIX_DTYPES:
        yield Refusal(
            "matrix-dtype",
            "x and w must both be bfloat16 or both float16",
            {"x": spec.x_dtype, "w": spec.w_dtype},
            "convert the model to half precision: model.to(torch.bfloat16)",
        )


def stream_dtypes(spec: ClusterSpec) -> Iterator[Refusal]:
    """Operands and outputs are floats that the stages can convert."""
    streams = [(operand.name, operand.dtype) for operand in spec.operands]
    streams += [(output.block, output.dtype) for output in spec.outputs]
    for name, dtype in streams:
        if dtype not in STREAM_DTYPES:
            yield Refusal(
                "stream-dtype",
                f"operands and outputs must be one of {', '.join(STREAM_DTYPES)}",
                {"name": name, "dtype": dtype},
                "keep the conversion out of the cluster",
            )


def alignment(spec: ClusterSpec) -> Iterator[Refusal]:
    """K and N are multiples of 8, as TMA strides are multiples of 16 bytes."""
    for axis, extent in (("K", spec.k), ("N", spec.n)):
        if extent % STRIDE_ELEMENTS or extent <= 0:
            yield Refusal(
                f"{axis.lower()}-alignment",
                f"{axis} must be a positive multiple of {STRIDE_ELEMENTS}: TMA strides are multiples of 16 bytes",
                {axis: extent, "multiple": STRIDE_ELEMENTS},
                f"pad {axis}",
            )


def rows(spec: ClusterSpec) -> Iterator[Refusal]:
    """There is at least one row."""
    if spec.m is not None and spec.m <= 0:
        yield Refusal("no-rows", "a kernel needs at least one row", {"M": spec.m}, "skip the call for an empty batch")


def parameters(spec: ClusterSpec) -> Iterator[Refusal]:
    """x, w, operands and outputs together are at most 16."""
    count = 2 + len(spec.operands) + len(spec.outputs)
    if count > MAX_PARAMETERS:
        yield Refusal(
            "parameters",
            f"a kernel takes at most {MAX_PARAMETERS} tensors",
            {"tensors": count},
            "end the cluster before an operator that brings a new operand",
        )


def constant_reductions(spec: ClusterSpec) -> Iterator[Refusal]:
    """Row reductions read something."""
    for reduction in spec.reductions:
        if not reduction.reads:
            yield Refusal(
                "constant-reduction",
                "a row reduction must read the product or an operand; this one is of a constant",
                {"block": reduction.block},
                "leave the constant out of the model",
            )


# --- form of the plan: the other clauses compute with these values ----------------------------------------------------


def positive(plan: Plan, spec: ClusterSpec, device: Device) -> Iterator[Refusal]:
    """Counts and sizes are at least 1."""
    for name in (
        "tile_m",
        "tile_n",
        "tile_k",
        "pipeline_depth",
        "groups_m",
        "groups_n",
        "cluster_m",
        "cluster_n",
        "ctas",
    ):
        if getattr(plan, name) < 1:
            remedy = "take a pipeline_depth of 2 or more" if name == "pipeline_depth" else f"raise {name}"
            yield Refusal("not-positive", f"{name} must be at least 1", {name: getattr(plan, name)}, remedy)


def words(plan: Plan, spec: ClusterSpec, device: Device) -> Iterator[Refusal]:
    """layout, exchange, orders and placements are known words."""
    fields = [("layout", plan.layout, LAYOUTS), ("exchange", plan.exchange, EXCHANGE_SCOPES)]
    fields += [("w_order", plan.w_order, W_ORDERS), ("walk", plan.walk, WALKS)]
    fields += [("operands", where, PLACEMENTS) for where in plan.operands]
    fields += [("store", where, PLACEMENTS) for where in plan.store]
    for name, value, known in fields:
        if value not in known:
            yield Refusal("unknown-word", f"{name} must be one of {', '.join(known)}", {name: value}, "correct it")


def group_count(plan: Plan, spec: ClusterSpec, device: Device) -> Iterator[Refusal]:
    """MMA warp groups for whose registers there is a split."""
    if plan.mma_groups not in MAX_ACCUMULATORS:
        counts = sorted(MAX_ACCUMULATORS)
        yield Refusal(
            "mma-groups",
            f"mma_groups must be one of {', '.join(map(str, counts))}",
            {"mma_groups": plan.mma_groups},
            f"take {counts[0]} to {counts[-1]}",
        )


def placements(plan: Plan, spec: ClusterSpec, device: Device) -> Iterator[Refusal]:
    """One placement for each [M, N] operand and each [M, N] output."""
    wanted = {"operands": len(spec.tile_operands), "store": len(spec.tile_outputs)}
    for name, count in wanted.items():
        found = len(getattr(plan, name))
        if found != count:
            yield Refusal(
                f"{name}-count",
                f"{name} must have one placement for each [M, N] tensor",
                {"tensors": count, "placements": found},
                f"give {count} of {', '.join(PLACEMENTS)}",
            )


# --- tiles and layout -------------------------------------------------------------------------------------------------


def tma_dtypes(plan: Plan, spec: ClusterSpec, device: Device) -> Iterator[Refusal]:
    """Staging tiles hold half precision."""
    tensors = [(operand.name, operand.dtype) for operand in spec.tile_operands]
    tensors += [(output.block, output.dtype) for output in spec.tile_outputs]
    for (name, dtype), where in zip(tensors, plan.operands + plan.store, strict=True):
        if where == "tma" and dtype not in MATRIX_DTYPES:
            yield Refusal(
                "tma-dtype",
                f"only {' and '.join(MATRIX_DTYPES)} tensors go through staging tiles",
                {"name": name, "dtype": dtype},
                "place it in global memory",
            )


def tile_sizes(plan: Plan, spec: ClusterSpec, device: Device) -> Iterator[Refusal]:
    """wgmma shapes: 64 or 128 rows, n a multiple of 64 up to 256, of 32 in the order of quads; one swizzle atom of K."""
    if plan.tile_m not in TILE_ROWS:
        yield Refusal("tile-m", f"tile_m must be one of {TILE_ROWS}", {"tile_m": plan.tile_m}, "take 64 or 128")
    # staging tiles and the order of rows come in atoms; quads, which go past staging tiles, in groups of lanes
    unit = QUAD_COLUMNS if plan.w_order == "quads" else ATOM_COLUMNS
    if plan.tile_n % unit or plan.tile_n > MAX_WGMMA_N:
        yield Refusal(
            "tile-n",
            f"tile_n (n of wgmma) must be a multiple of {unit} up to {MAX_WGMMA_N} with w_order {plan.w_order}",
            {"tile_n": plan.tile_n},
            "take 64, 128, 192 or 256",
        )
    if plan.tile_k != ATOM_COLUMNS:
        yield Refusal(
            "tile-k",
            f"tile_k must be {ATOM_COLUMNS}, one 128-byte swizzle atom",
            {"tile_k": plan.tile_k},
            "change pipeline_depth instead",
        )


def accumulators(plan: Plan, spec: ClusterSpec, device: Device) -> Iterator[Refusal]:
    """The float32 result of a group fits into its registers, and that of one wgmma into those that a kernel starts with."""
    count, far = plan.tile_m * plan.tile_n // THREADS_OF_GROUP, "global" in plan.operands
    most = (MAX_BESIDE_GLOBAL if far else MAX_ACCUMULATORS)[plan.mma_groups]
    most = min(most, MAX_HANDED_OVER) if plan.hands_over else most
    if count > most:
        yield Refusal(
            "accumulators",
            f"a thread of {plan.mma_groups} MMA warp groups can hold at most {most} accumulators"
            + (" beside operands in global memory" if far and most < MAX_ACCUMULATORS[plan.mma_groups] else ""),
            {
                "tile_m": plan.tile_m,
                "tile_n": plan.tile_n,
                "accumulators": count,
                "registers": role_registers(plan.mma_groups, plan.hands_over).mma,
            },
            "halve tile_m or tile_n" + (", or lower mma_groups" if plan.mma_groups > COOPERATIVE_GROUPS else ""),
        )
    entry, needed = entry_registers(plan.threads, device.registers), plan.tile_n // 2 + WGMMA_OVERHEAD
    if needed > entry:
        yield Refusal(
            "entry-registers",
            f"a wgmma of n columns needs n / 2 + {WGMMA_OVERHEAD} registers when the kernel starts",
            {"tile_n": plan.tile_n, "needed": needed, "threads": plan.threads, "registers": entry},
            "lower mma_groups or tile_n",
        )


def box_rows(plan: Plan, spec: ClusterSpec, device: Device) -> Iterator[Refusal]:
    """TMA boxes have at most 256 rows, and the part each CTA of a cluster loads is whole swizzle atoms."""
    if max(plan.tile_m, plan.tile_n) > MAX_BOX_ROWS:
        yield Refusal(
            "box-rows",
            f"a TMA box has at most {MAX_BOX_ROWS} rows",
            {"tile_m": plan.tile_m, "tile_n": plan.tile_n},
            "take a smaller tile",
        )
    shared = plan.tile_n if spec.w_layout == "NK" else plan.tile_k
    if plan.w_order != "quads" and shared % (ATOM_ROWS * plan.cluster_m):
        yield Refusal(
            "multicast-box",
            f"each CTA of cluster_m must load whole groups of {ATOM_ROWS} rows of w",
            {"rows": shared, "cluster_m": plan.cluster_m},
            "take cluster_m 1, 2 or 4",
        )


def resident(plan: Plan, spec: ClusterSpec, device: Device) -> Iterator[Refusal]:
    """A CTA that keeps its W loads it alone; `memory` says whether it fits."""
    if plan.w_resident and plan.cluster_m > 1:
        yield Refusal(
            "resident-multicast",
            "w_resident goes with cluster_m 1: W is loaded once, so there is nothing to share",
            {"w_resident": plan.w_resident, "cluster_m": plan.cluster_m},
            "set cluster_m to 1 or w_resident to false",
        )


def groups(plan: Plan, spec: ClusterSpec, device: Device) -> Iterator[Refusal]:
    """1 x 1, each with its own tile (pingpong), or two of one tile, 2 x 1 or, in the cooperative layout, 1 x 2."""
    at = (plan.groups_m, plan.groups_n)
    stacked, beside = (COOPERATIVE_GROUPS, 1), (1, COOPERATIVE_GROUPS)
    if at not in {"pingpong": ((1, 1),), "cooperative": (stacked, beside), "memory": (stacked,)}[plan.layout]:
        yield Refusal(
            "groups",
            "groups must be 1 x 1 for pingpong, 2 x 1 or 1 x 2 for cooperative, 2 x 1 for memory",
            {"layout": plan.layout, "groups_m": plan.groups_m, "groups_n": plan.groups_n},
            "change layout or groups",
        )
    if plan.layout != "pingpong" and plan.mma_groups != COOPERATIVE_GROUPS:
        yield Refusal(
            "mma-groups",
            f"the {plan.layout} layout has {COOPERATIVE_GROUPS} MMA warp groups",
            {"layout": plan.layout, "mma_groups": plan.mma_groups},
            f"set mma_groups to {COOPERATIVE_GROUPS}, or layout to pingpong",
        )


def handover(plan: Plan, spec: ClusterSpec, device: Device) -> Iterator[Refusal]:
    """What is handed over is in half precision."""
    if plan.hands_over and spec.wide_product:
        yield Refusal(
            "handover-product",
            "a memory warp group gets products in half precision, and the model keeps them in float32",
            {"layout": plan.layout},
            "take the cooperative layout, or let the model round the product to half precision",
        )
    for output in spec.tile_outputs:
        if plan.hands_over and output.dtype not in MATRIX_DTYPES:
            yield Refusal(
                "handover-dtype",
                "a memory warp group makes its outputs of products that were handed over in half precision",
                {"name": output.block, "dtype": output.dtype},
                "take the cooperative layout, or let the model round the output to half precision",
            )


def depth(plan: Plan, spec: ClusterSpec, device: Device) -> Iterator[Refusal]:
    """Loads overlap with products only from two slots on."""
    if not 2 <= plan.pipeline_depth <= MAX_DEPTH:
        yield Refusal(
            "pipeline-depth",
            f"pipeline_depth must be 2 to {MAX_DEPTH}",
            {"pipeline_depth": plan.pipeline_depth},
            _depths_that_fit(plan, spec, device),
        )


def _depths_that_fit(plan: Plan, spec: ClusterSpec, device: Device) -> str:
    """What to try instead of a pipeline_depth."""
    parts = shared_memory(plan, spec)
    rest = device.shared_memory - (sum(parts.values()) - parts["pipeline"])
    most = min(MAX_DEPTH, rest * plan.pipeline_depth // parts["pipeline"])
    if most < 2:
        return "take smaller tiles: not even two slots fit into shared memory"
    depths = "2" if most == 2 else f"2 to {most}"
    return f"take a pipeline_depth of {depths}, for which there is shared memory"


def memory(plan: Plan, spec: ClusterSpec, device: Device) -> Iterator[Refusal]:
    """All parts of shared memory fit together."""
    parts = shared_memory(plan, spec)
    total = sum(parts.values())
    if total > device.shared_memory:
        yield Refusal(
            "shared-memory",
            f"a CTA of {device.name} has {device.shared_memory} bytes of shared memory",
            {**parts, "total": total},
            _depths_that_fit(plan, spec, device)
            + ("; or place an operand or output in global memory" if "tma" in plan.operands + plan.store else "")
            + ("; or set w_resident to false" if plan.w_resident else ""),
        )


CLUSTER_CLAUSES: tuple[Callable[[ClusterSpec], Iterator[Refusal]], ...] = (
    matrix_dtype,
    stream_dtypes,
    alignment,
    rows,
    parameters,
    constant_reductions,
)


def the_cluster(plan: Plan, spec: ClusterSpec, device: Device) -> Iterator[Refusal]:
    """The cluster can have a legal plan at all."""
    yield from supported(spec)
    yield from row_length(spec, device)


FORM: tuple[Clause, ...] = (positive, words, group_count, placements)
CLAUSES: tuple[Clause, ...] = (
    the_cluster,
    tma_dtypes,
    handover,
    tile_sizes,
    accumulators,
    box_rows,
    resident,
    groups,
    depth,
    memory,
    quads,
    deferral,
    packing,
    walk,
    exchange,
    cluster,
    grid,
)
