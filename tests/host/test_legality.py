"""schedules.legality: each clause refuses exactly what it should, on plans one change away from a legal one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tvm
from canonical_examples import EXAMPLES

from tvm_comfuse.schedules.analysis import analyze
from tvm_comfuse.schedules.device import H100, H200, device_of
from tvm_comfuse.schedules.footprint import shared_memory
from tvm_comfuse.schedules.legality import legality, supported
from tvm_comfuse.schedules.plan import Plan
from tvm_comfuse.schedules.registers import entry_registers, role_registers
from tvm_comfuse.schedules.spec import Operand, Output

SPEC = analyze(EXAMPLES["layer_norm"].build(16384, 1024, 1024, "bfloat16"))
NARROW = analyze(EXAMPLES["layer_norm"].build(16384, 256, 1024, "bfloat16"))
PLAIN = analyze(EXAMPLES["bias_gelu"].build(16384, 1024, 1024, "bfloat16"))
GRID = Plan(64, 256, 64, 3, "pingpong", 1, 1, "grid", 1, 1, 132, ("tma",), ("tma",))
CLUSTER = replace(GRID, exchange="cluster", cluster_n=4, ctas=120)
WARP = replace(GRID, exchange="warp")
CTA = replace(GRID, tile_n=128, layout="cooperative", groups_n=2, exchange="cta")
NONE = replace(GRID, exchange="none", operands=())
SMALL = analyze(EXAMPLES["layer_norm"].build(16384, 512, 512, "bfloat16"))
RESIDENT = replace(GRID, tile_n=128, pipeline_depth=8, w_resident=True)


@pytest.mark.parametrize(
    ("plan", "spec"),
    [(GRID, SPEC), (CLUSTER, SPEC), (WARP, NARROW), (CTA, NARROW), (NONE, PLAIN), (RESIDENT, SMALL)],
    ids=["grid", "cluster", "warp", "cta", "none", "resident"],
)
def test_legal(plan: Plan, spec) -> None:
    assert legality(plan, spec, H200) == []


CHANGES = [
    ({"tile_m": 0}, "not-positive"),
    ({"ctas": 0}, "not-positive"),
    ({"layout": "fast"}, "unknown-word"),
    ({"exchange": "node"}, "unknown-word"),
    ({"operands": ("register",)}, "unknown-word"),
    ({"operands": ()}, "operands-count"),
    ({"store": ("tma", "tma")}, "store-count"),
    ({"tile_m": 32}, "tile-m"),
    ({"tile_n": 320, "tile_m": 64}, "tile-n"),
    ({"tile_n": 96}, "tile-n"),
    ({"tile_k": 32}, "tile-k"),
    ({"tile_m": 128}, "accumulators"),
    ({"tile_n": 512}, "box-rows"),
    ({"groups_m": 2}, "groups"),
    ({"layout": "cooperative"}, "groups"),
    ({"pipeline_depth": 1}, "pipeline-depth"),
    ({"pipeline_depth": 17}, "pipeline-depth"),
    ({"pipeline_depth": 4}, "shared-memory"),
    ({"exchange": "none"}, "exchange-scope"),
    ({"exchange": "warp"}, "exchange-scope"),
    ({"exchange": "cta"}, "exchange-scope"),
    ({"exchange": "cluster"}, "cluster-n"),
    ({"cluster_n": 4}, "cluster-n"),
    ({"share_a": True}, "cluster-n"),
    ({"share_a": True, "cluster_n": 3}, "cluster-n"),
    ({"share_a": True, "cluster_n": 4, "cluster_m": 4, "ctas": 128}, "cluster-n"),
    ({"exchange": "cluster", "cluster_n": 4, "cluster_m": 4}, "cluster-size"),
    ({"cluster_m": 5}, "multicast-box"),
    ({"ctas": 136}, "co-residency"),
    ({"ctas": 130}, "grid-step"),
    ({"cluster_m": 2, "ctas": 132}, "grid-step"),
    ({"exchange": "cluster", "cluster_n": 4, "ctas": 132}, "co-residency"),
]


@pytest.mark.parametrize(("change", "code"), CHANGES)
def test_one_change_is_refused(change: dict, code: str) -> None:
    refusals = legality(replace(GRID, **change), SPEC, H200)
    assert code in [refusal.code for refusal in refusals]
    for refusal in refusals:
        assert refusal.numbers
        assert refusal.remedy


def test_who_shares_a() -> None:
    # a row of GRID is four CTAs: all of them, or two by two
    for cluster_n, ctas in ((2, 132), (4, 120)):
        assert legality(replace(GRID, share_a=True, cluster_n=cluster_n, ctas=ctas), SPEC, H200) == []
    assert legality(replace(CLUSTER, share_a=True), SPEC, H200) == []
    (refusal,) = legality(replace(GRID, share_a=True, cluster_n=4, ctas=132), SPEC, H200)
    assert refusal.code == "co-residency"


def test_a_resident_w_is_not_shared_and_has_to_fit() -> None:
    (refusal,) = legality(replace(RESIDENT, cluster_m=2, ctas=128), SMALL, H200)
    assert refusal.code == "resident-multicast"
    assert legality(replace(RESIDENT, cluster_m=2, ctas=128, pipeline_depth=3, w_resident=False), SMALL, H200) == []
    # one more slot of x, or one more tile of W
    for plan, spec in ((replace(RESIDENT, pipeline_depth=9), SMALL), (RESIDENT, replace(SMALL, k=520))):
        (refusal,) = legality(plan, spec, H200)
        assert refusal.code == "shared-memory"
        assert refusal.numbers["total"] - H200.shared_memory in range(1, 64 * 128 * 2)
        assert "w_resident" in refusal.remedy
    far = replace(SMALL, k=1024)
    (refusal,) = legality(RESIDENT, far, H200)
    assert "not even two slots" in refusal.remedy
    assert legality(replace(RESIDENT, pipeline_depth=6, w_resident=False), far, H200) == []
    # both layouts of W, and a K that is no multiple of a tile
    for spec in (replace(SMALL, w_layout="KN"), replace(SMALL, k=456, n=520)):
        assert legality(replace(RESIDENT, ctas=60), spec, H200) == []


QUADS = replace(GRID, operands=("global",), store=("global",), w_order="quads")
DEFERRED = replace(QUADS, layout="cooperative", groups_m=2, defer=True)


@pytest.mark.parametrize("plan", [replace(QUADS, tile_n=144), replace(GRID, tile_n=160)], ids=["quads", "rows"])
def test_a_tile_is_whole_quads_or_whole_boxes(plan: Plan) -> None:
    refusals = {refusal.code: refusal for refusal in legality(replace(plan, ctas=128), replace(SPEC, n=2560), H200)}
    assert plan.w_order in refusals["tile-n"].fact


@pytest.mark.parametrize(
    ("plan", "spec", "code"),
    [
        (QUADS, SPEC, None),
        (replace(QUADS, cluster_m=2, ctas=128), SPEC, None),
        (QUADS, replace(SPEC, w_layout="KN"), "quads-w"),
        (QUADS, replace(SPEC, n=1000), "quads-w"),
        (replace(QUADS, tile_n=64, cluster_m=4, ctas=64), SPEC, "quads-w"),
        # groups of 32 columns are enough; CTAs that share W take them in turns
        (replace(QUADS, tile_n=160, ctas=128), replace(SPEC, n=2560), None),
        (replace(QUADS, tile_n=160, cluster_m=2, ctas=128), replace(SPEC, n=2560), None),
        (replace(QUADS, operands=("tma",)), SPEC, "quads-placement"),
        (replace(QUADS, store=("tma",)), SPEC, "quads-placement"),
        (DEFERRED, SPEC, None),
        (replace(DEFERRED, w_order="rows"), replace(SPEC, n=1000), None),
        (replace(DEFERRED, w_order="rows"), replace(SPEC, w_layout="KN"), None),
        (replace(DEFERRED, layout="pingpong", groups_m=1), SPEC, "defer-layout"),
        (replace(DEFERRED, operands=(), exchange="none"), PLAIN, "defer-layout"),
        (replace(DEFERRED, w_order="rows", pipeline_depth=2, operands=("tma",)), SPEC, "defer-placement"),
        (replace(DEFERRED, w_order="rows", pipeline_depth=2, store=("tma",)), SPEC, "defer-placement"),
        # partials travel for 2 slots, 1 takes them, 4 do two half boxes of 256 columns each, 1 brings operands
        (DEFERRED, replace(SPEC, k=8 * 64), None),
        (DEFERRED, replace(SPEC, k=7 * 64 + 8), None),
        (DEFERRED, replace(SPEC, k=7 * 64), "defer-slots"),
        (replace(DEFERRED, exchange="warp"), replace(NARROW, k=6 * 64), None),
        (replace(DEFERRED, exchange="warp"), replace(NARROW, k=5 * 64), "defer-slots"),
    ],
)
def test_what_the_order_of_w_and_a_deferred_tail_need(plan: Plan, spec, code: str | None) -> None:
    refusals = legality(plan, spec, H200)
    assert [refusal.code for refusal in refusals] == ([] if code is None else [code])
    assert all(refusal.numbers and refusal.remedy for refusal in refusals)
    # one word in the plan makes it legal
    if code is not None:
        remedy = {"w_order": "rows"} if code.startswith("quads") else {"defer": False, "w_order": "rows"}
        fixed = replace(plan, **remedy)
        assert code not in [refusal.code for refusal in legality(fixed, spec, H200)]


def test_a_deferred_tail_makes_no_float32_output() -> None:
    spec = analyze(EXAMPLES["gate_two_outputs"].build(16384, 1024, 1024, "bfloat16"))
    plan = replace(DEFERRED, store=("global", "global"))
    (refusal,) = legality(plan, spec, H200)
    assert refusal.code == "defer-dtype"
    assert refusal.numbers == {"name": "stage_0_out0", "dtype": "float32"}
    halves = tuple(
        replace(o, dtype="bfloat16") if o.dtype == "float32" and o.kind == "tile" else o for o in spec.stages[0].outputs
    )
    narrow = replace(spec, stages=(replace(spec.stages[0], outputs=halves), *spec.stages[1:]))
    assert legality(plan, narrow, H200) == []
    assert legality(replace(plan, defer=False), spec, H200) == []


THREE = replace(RESIDENT, pipeline_depth=6, mma_groups=3)


def test_more_mma_warp_groups_are_legal_where_their_registers_and_tiles_fit() -> None:
    assert legality(THREE, SMALL, H200) == []
    assert legality(replace(THREE, pipeline_depth=4, mma_groups=4), SMALL, H200) == []
    free = replace(THREE, operands=("global",), store=("global",), pipeline_depth=12)
    assert legality(free, SMALL, H200) == []
    (refusal,) = legality(replace(THREE, pipeline_depth=7), SMALL, H200)
    assert refusal.code == "shared-memory"
    assert refusal.numbers["staging"] == 3 * 64 * 128 * 2


@pytest.mark.parametrize(
    ("change", "codes"),
    [
        ({"mma_groups": 1}, ["mma-groups"]),
        ({"mma_groups": 5}, ["mma-groups"]),
        ({"layout": "cooperative", "groups_m": 2, "mma_groups": 2}, []),
        ({"layout": "cooperative", "groups_m": 2}, ["mma-groups"]),
        # 96 accumulators a thread in three groups, 64 if addresses of an operand in global memory are held beside them
        ({"tile_n": 192}, []),
        ({"tile_n": 192, "operands": ("global",)}, ["accumulators"]),
        ({"tile_m": 128, "tile_n": 64, "operands": ("global",), "ctas": 128}, []),
        # what one wgmma needs before setmaxnreg gives more
        ({"tile_n": 256}, ["accumulators", "entry-registers"]),
        ({"tile_n": 192, "mma_groups": 4}, ["accumulators", "entry-registers"]),
        ({"mma_groups": 4, "operands": ("global",)}, ["accumulators"]),
        ({"tile_n": 64, "mma_groups": 4, "operands": ("global",), "ctas": 128}, []),
    ],
)
def test_more_mma_warp_groups_have_fewer_registers_each(change: dict, codes: list[str]) -> None:
    refusals = legality(replace(THREE, w_resident=False, pipeline_depth=2, **change), SMALL, H200)
    assert [refusal.code for refusal in refusals] == codes
    assert all(refusal.numbers and refusal.remedy for refusal in refusals)


@pytest.mark.parametrize("groups", [2, 3, 4])
def test_the_roles_share_the_registers_that_the_cta_starts_with(groups: int) -> None:
    roles, threads = role_registers(groups), 128 * (1 + groups)
    entry = entry_registers(threads)
    assert entry == {2: 168, 3: 128, 4: 96}[groups]
    # setmaxnreg takes multiples of 8 out of the CTA's pool; what is left over is less than a step for every MMA thread
    assert roles.producer % 8 == roles.mma % 8 == 0
    assert 24 <= roles.producer <= entry <= roles.mma
    rest = threads * entry - 128 * roles.producer - 128 * groups * roles.mma
    assert 0 <= rest < 8 * 128 * groups


def test_exchange_without_a_reduction() -> None:
    assert [r.code for r in legality(replace(NONE, exchange="grid"), PLAIN, H200)] == ["exchange-none"]


def test_cooperative_groups_side_by_side_need_cta_scope() -> None:
    codes = [r.code for r in legality(replace(CTA, exchange="warp"), NARROW, H200)]
    assert codes == ["exchange-scope"]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"x_dtype": "float16"}, "matrix-dtype"),
        ({"x_dtype": "float32", "w_dtype": "float32"}, "matrix-dtype"),
        ({"k": 1020}, "k-alignment"),
        ({"n": 1001}, "n-alignment"),
        ({"m": 0}, "no-rows"),
        ({"operands": (*SPEC.operands, Operand("mask", 9, "tile", "int8"))}, "stream-dtype"),
        ({"operands": tuple(Operand(f"b{n}", n + 2, "col", "float32") for n in range(14))}, "parameters"),
    ],
)
def test_clusters_without_a_legal_plan(change: dict, code: str) -> None:
    spec = replace(SPEC, **change)
    assert [r.code for r in supported(spec)] == [code]
    placements = ("tma",) * len(spec.tile_operands)
    assert code in [r.code for r in legality(replace(GRID, operands=placements), spec, H200)]


def test_an_integer_output_is_refused() -> None:
    output = replace(SPEC.stages[-1].outputs[0], dtype="int8")
    stages = (*SPEC.stages[:-1], replace(SPEC.stages[-1], outputs=(output,)))
    assert [r.code for r in supported(replace(SPEC, stages=stages))] == ["stream-dtype"]


def test_all_reasons_at_once() -> None:
    codes = {r.code for r in legality(replace(GRID, tile_k=32, ctas=130, pipeline_depth=1), SPEC, H200)}
    assert codes == {"tile-k", "grid-step", "pipeline-depth"}


def test_shared_memory_by_hand() -> None:
    parts = shared_memory(GRID, SPEC)
    assert parts == {
        "pipeline": 3 * (64 + 256) * 64 * 2,
        "resident_w": 0,
        "staging": 2 * 64 * 256 * 2,
        "handover": 0,
        "vectors": 3 * 4 * 256,
        "mailboxes": 8,
        "barriers": 1024,
    }
    resident = shared_memory(RESIDENT, SMALL)
    assert resident["pipeline"] == 8 * 64 * 64 * 2
    assert resident["resident_w"] == 128 * 512 * 2
    # whole tiles of K, and the columns of both groups that stand side by side
    wide = replace(RESIDENT, layout="cooperative", groups_n=2)
    assert shared_memory(wide, replace(SMALL, k=136))["resident_w"] == 256 * 192 * 2
    # two values a row and part, two generations; pingpong has 128 rows
    assert shared_memory(CLUSTER, SPEC)["mailboxes"] == 128 * 4 * 2 * 8 * 2
    assert shared_memory(CTA, NARROW)["mailboxes"] == 2 * 64 * 2 * 2 * 8 * 2
    # every MMA warp group has staging tiles and, by cluster, mailboxes of its own
    three = shared_memory(replace(CLUSTER, mma_groups=3), SPEC)
    assert three["staging"] == 3 * 64 * 256 * 2
    assert three["mailboxes"] == 192 * 4 * 2 * 8 * 2
    wide = shared_memory(replace(GRID, layout="cooperative", groups_m=2), SPEC)
    assert wide["pipeline"] == 3 * (128 + 256) * 64 * 2


def test_outputs_share_the_tile_of_an_operand_that_is_read_no_more() -> None:
    tile = 2 * 64 * 256 * 2
    assert shared_memory(replace(GRID, operands=("global",)), SPEC)["staging"] == tile
    assert shared_memory(replace(GRID, store=("global",)), SPEC)["staging"] == tile
    assert shared_memory(replace(GRID, operands=("global",), store=("global",)), SPEC)["staging"] == 0
    # an output of stage 0 cannot take the tile of an operand that a later pass still reads: in stage 1, or in the pass
    # that makes the carried value if the output comes in front of it
    plan = replace(GRID, store=("tma", "tma"))
    for late, readers, tiles in (
        (True, ("stage_0",), 1),
        (True, ("stage_0", "stage_0_out0"), 1),
        (True, ("stage_0", "reduce_1"), 2),
        (False, ("stage_0",), 2),
        (False, ("stage_0_out0",), 1),
    ):
        first = replace(SPEC.stages[0], outputs=(Output("stage_0_out0", 7, "bfloat16", "tile", late),))
        operand = replace(SPEC.operands[1], readers=readers)
        operands = (SPEC.operands[0], operand, *SPEC.operands[2:])
        spec = replace(SPEC, stages=(first, *SPEC.stages[1:]), operands=operands)
        assert shared_memory(plan, spec)["staging"] == tiles * tile, (late, readers)
    two = replace(SPEC, operands=(*SPEC.operands, Operand("s", 8, "tile", "bfloat16")))
    assert shared_memory(replace(GRID, operands=("tma", "tma")), two)["staging"] == 2 * tile


def test_float32_tensors_do_not_go_through_tma() -> None:
    spec = analyze(EXAMPLES["gate_two_outputs"].build(256, 256, 64))
    plan = replace(GRID, exchange="warp", operands=("global",), store=("tma", "global"), ctas=2, cluster_m=1)
    assert legality(plan, spec, H200) == []
    for change in ({"operands": ("tma",)}, {"store": ("tma", "tma")}):
        assert [r.code for r in legality(replace(plan, **change), spec, H200)] == ["tma-dtype"]


def test_a_grid_without_exchange_is_whole_rows_too() -> None:
    assert [r.code for r in legality(replace(NONE, ctas=130), PLAIN, H200)] == ["grid-step"]


def test_device_of() -> None:
    def cuda(**more):
        return tvm.target.Target({"kind": "cuda", **more}, host="llvm")

    assert device_of(cuda(arch="sm_90a")) is H200
    assert device_of(tvm.target.Target("nvidia/nvidia-h100")) is H100
    assert device_of(cuda(arch="sm_80")) is None
    assert device_of(cuda(arch="sm_90")) is None
    assert device_of(tvm.target.Target("llvm")) is None


def test_device_clusters() -> None:
    assert [H200.clusters(size) for size in (0, 1, 2, 4, 8, 9)] == [0, 132, 66, 30, 15, 0]
    assert H200.measured
    assert not H100.measured


def test_remedies_name_values_that_are_legal() -> None:
    (refusal,) = legality(replace(GRID, pipeline_depth=4), SPEC, H200)
    assert "pipeline_depth of 2 to 3" in refusal.remedy
    far = next(r for r in legality(replace(GRID, pipeline_depth=99), SPEC, H200) if r.code == "pipeline-depth")
    assert "pipeline_depth of 2 to 3" in far.remedy
    for depth in (2, 3):
        assert legality(replace(GRID, pipeline_depth=depth), SPEC, H200) == []
    assert "this one has some" in legality(replace(GRID, exchange="none"), SPEC, H200)[0].clause


def test_a_row_that_needs_more_ctas_than_run() -> None:
    # 256 columns a CTA: 133 of them
    long = replace(SPEC, n=256 * 132 + 8)
    (refusal,) = legality(GRID, long, H200)
    assert refusal.code == "row-length"
    assert refusal.numbers["CTAs"] == 133
    assert refusal.remedy == "take wider tiles"
    codes = [r.code for r in legality(GRID, replace(SPEC, n=512 * 132 + 8), H200)]
    assert codes == ["row-length", "row-length"]
