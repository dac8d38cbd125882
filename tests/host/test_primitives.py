"""schedules.primitives and schedules.apply: same numbers, same function after replay, the plan comes back."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import tvm
import tvm_ffi
from canonical_examples import EXAMPLES, inputs, run_on_cpu
from tvm import s_tir, tirx

from tvm_comfuse.errors import LoweringError, PlanError
from tvm_comfuse.refusal import Refusal
from tvm_comfuse.schedules.analysis import analyze, blocks
from tvm_comfuse.schedules.apply import apply_plan, block_order, plan_of, schedule
from tvm_comfuse.schedules.choose import candidates, default_plan
from tvm_comfuse.schedules.device import H200
from tvm_comfuse.schedules.plan import Plan
from tvm_comfuse.schedules.primitives import EXCHANGE, PIPELINE_DEPTH, ROLE, ROW_TILE, place_stages


def plan_for(func: tirx.PrimFunc) -> Plan:
    plan = default_plan(analyze(func), H200)
    assert isinstance(plan, Plan)
    return plan


def scheduled_by(func: tirx.PrimFunc, plan: Plan) -> s_tir.Schedule:
    sch = s_tir.Schedule(tvm.IRModule({"main": func}), debug_mask="all")
    apply_plan(sch, plan)
    return sch


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize(("m", "rows"), [(100, 100), (None, 77), (None, 192), (1, 1)])
def test_same_numbers_and_same_spec(name: str, m: int | None, rows: int) -> None:
    func = EXAMPLES[name].build(m, n=104, k=72)
    after = schedule(func, H200)
    assert isinstance(after, tirx.PrimFunc)
    assert analyze(after) == analyze(func)
    count = len(analyze(func).outputs)
    arrays = inputs(func, count, rows)
    for plain, tiled in zip(run_on_cpu(func, arrays, count), run_on_cpu(after, arrays, count), strict=True):
        np.testing.assert_allclose(tiled.astype("float64"), plain.astype("float64"), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("layout", "exchange"), [("pingpong", "grid"), ("cooperative", "cluster")])
def test_every_layout_and_scope_leaves_the_numbers(layout: str, exchange: str) -> None:
    func = EXAMPLES["gate_two_outputs"].build(None, 264, 72, "bfloat16", "KN")
    wanted = (layout, exchange)
    plan = next(p for p in candidates(analyze(func), H200) if (p.layout, p.exchange) == wanted)
    after = schedule(func, H200, plan)
    assert isinstance(after, tirx.PrimFunc)
    assert plan_of(after) == plan
    arrays = inputs(func, 3, 130)
    for plain, tiled in zip(run_on_cpu(func, arrays, 3), run_on_cpu(after, arrays, 3), strict=True):
        np.testing.assert_allclose(tiled.astype("float64"), plain.astype("float64"), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", EXAMPLES)
def test_everything_is_under_one_loop_over_row_tiles(name: str) -> None:
    func = EXAMPLES[name].build(None, 256, 128)
    plan = plan_for(func)
    sch = scheduled_by(func, plan)
    names = ["gemm", *block_order(analyze(func))]
    outer = [sch.get_sref(sch.get_loops(sch.get_sblock(block))[0]) for block in names]
    assert all(loop.same_as(outer[0]) for loop in outer)
    assert outer[0].stmt.annotations[ROW_TILE] == plan.cta_rows
    slot = sch.get(sch.get_loops(sch.get_sblock("gemm"))[2])
    assert slot.annotations[PIPELINE_DEPTH] == plan.pipeline_depth
    for block in names:
        node = sch.get(sch.get_sblock(block))
        assert node.annotations[ROLE] == "mma"
        assert (EXCHANGE in node.annotations) == block.startswith("reduce")


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("m", [100, None])
def test_trace_replays(name: str, m: int | None) -> None:
    func = EXAMPLES[name].build(m)
    sch = scheduled_by(func, plan_for(func))
    text = json.loads(json.dumps(_plain(sch.trace.as_json())))
    again = s_tir.Schedule(tvm.IRModule({"main": func}), debug_mask="all")
    s_tir.schedule.Trace.apply_json_to_schedule(tvm_ffi.convert(text), again)
    tvm.ir.assert_structural_equal(again.mod, sch.mod)


def test_trace_of_a_static_function_replays_on_the_symbolic_one() -> None:
    static, symbolic = EXAMPLES["layer_norm"].build(128), EXAMPLES["layer_norm"].build(None)
    sch = scheduled_by(static, plan_for(static))
    again = s_tir.Schedule(tvm.IRModule({"main": symbolic}), debug_mask="all")
    s_tir.schedule.Trace.apply_json_to_schedule(sch.trace.as_json(), again)
    assert plan_of(again.mod["main"]) == plan_for(static)
    arrays = inputs(symbolic, 1, 77)
    (plain,), (tiled,) = run_on_cpu(symbolic, arrays, 1), run_on_cpu(again.mod["main"], arrays, 1)
    np.testing.assert_allclose(tiled.astype("float64"), plain.astype("float64"), rtol=1e-5, atol=1e-5)


def test_database_round_trip(tmp_path) -> None:
    from tvm.s_tir import meta_schedule as ms

    func = EXAMPLES["layer_norm"].build(128)
    mod = tvm.IRModule({"main": func})
    sch = scheduled_by(func, plan_for(func))
    database = ms.database.JSONDatabase(work_dir=str(tmp_path), module_equality="structural")
    arguments = ms.arg_info.ArgInfo.from_prim_func(func)
    target = tvm.target.Target("llvm")
    workload = database.commit_workload(mod)
    database.commit_tuning_record(ms.database.TuningRecord(sch.trace, workload, [1e-3], target, arguments))

    reopened = ms.database.JSONDatabase(work_dir=str(tmp_path), module_equality="structural")
    record = reopened.get_top_k(reopened.commit_workload(mod), 1)[0]
    again = s_tir.Schedule(mod, debug_mask="all")
    record.trace.apply_to_schedule(again, remove_postproc=False)
    tvm.ir.assert_structural_equal(again.mod, sch.mod)
    assert plan_of(again.mod["main"]) == plan_for(func)
    # the function of the record computes what the canonical function does
    arrays = inputs(func, 1, 128)
    (plain,), (tiled,) = run_on_cpu(func, arrays, 1), run_on_cpu(again.mod["main"], arrays, 1)
    np.testing.assert_allclose(tiled.astype("float64"), plain.astype("float64"), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("symbol", ["main", "cluster_7", None])
def test_attributes_survive_and_the_argument_stays(symbol: str | None) -> None:
    def build() -> tirx.PrimFunc:
        func = EXAMPLES["layer_norm"].build().without_attr("global_symbol").with_attr("comfuse.note", "kept")
        return func.with_attr("global_symbol", symbol) if symbol else func

    func = build()
    after = schedule(func, H200)
    assert isinstance(after, tirx.PrimFunc)
    assert {key: str(value) for key, value in after.attrs.items()} == {
        key: str(value) for key, value in func.attrs.items()
    }
    tvm.ir.assert_structural_equal(func, build())
    with pytest.raises(PlanError, match="annotation"):
        plan_of(func)


def test_illegal_plans_and_clusters_are_refusals() -> None:
    func = EXAMPLES["layer_norm"].build(128, 256, 128)
    refusal = schedule(func, H200, replace(plan_for(func), tile_k=32))
    assert isinstance(refusal, Refusal)
    assert refusal.code == "tile-k"
    refusal = schedule(EXAMPLES["layer_norm"].build(128, 256, 100), H200)
    assert isinstance(refusal, Refusal)
    assert refusal.code == "k-alignment"


def test_apply_needs_one_canonical_function() -> None:
    func = EXAMPLES["layer_norm"].build()
    both = tvm.IRModule({"main": func, "other": func.with_attr("global_symbol", "other")})
    with pytest.raises(LoweringError, match="one function"):
        apply_plan(s_tir.Schedule(both), plan_for(func))


def test_unknown_role() -> None:
    sch = s_tir.Schedule(EXAMPLES["bias_gelu"].build())
    with pytest.raises(ValueError, match="mma"):
        place_stages(sch, ["gemm"], "memory")


def test_block_order_puts_blocks_behind_what_they_read() -> None:
    func = EXAMPLES["gate_two_outputs"].build()
    names = block_order(analyze(func))
    assert sorted(["gemm", *names]) == sorted(blocks(func))
    assert names == ["stage_0", "stage_0_out0", "reduce_0", "stage_1_out0", "stage_1_out1"]


def _plain(value):
    """Plain lists and scalars of a trace's JSON form, as a file would hold them."""
    if isinstance(value, (str, int, float, bool)) or value is None:
        return value
    if isinstance(value, tirx.IntImm):
        return int(value)
    if isinstance(value, tirx.FloatImm):
        return float(value)
    return [_plain(item) for item in value]
