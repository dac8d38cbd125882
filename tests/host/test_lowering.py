"""tir_passes: every plan of every kind lowers to a kernel that nvcc or NVRTC takes, without spills where it is the default.

The numbers of these kernels are checked on a GPU (tests/gpu) and those of the scheduled functions in test_primitives.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import tvm
from canonical_examples import EXAMPLES
from tvm import tirx

from tvm_comfuse.cuda import compile_cubin, sources
from tvm_comfuse.errors import LoweringError, PlanError
from tvm_comfuse.refusal import Refusal
from tvm_comfuse.schedules.analysis import analyze, normal_forms
from tvm_comfuse.schedules.apply import plan_of, schedule
from tvm_comfuse.schedules.device import H200
from tvm_comfuse.schedules.footprint import BARRIERS_BYTES, shared_memory
from tvm_comfuse.schedules.plan import Plan
from tvm_comfuse.target import parse_target
from tvm_comfuse.tir_passes.emit.expressions import Binding, rebind
from tvm_comfuse.tir_passes.kernel import Kernel
from tvm_comfuse.tir_passes.lower import LowerClusters, lower
from tvm_comfuse.verify.static.barriers import LOAD
from tvm_comfuse.verify.static.evaluate import WARP_GROUP
from tvm_comfuse.verify.static.index import index_of
from tvm_comfuse.verify.static.scene import Scene, scenes

TARGET = parse_target("h200")
BASE = Plan(64, 256, 64, 3, "cooperative", 2, 1, "grid", 1, 1, 128, ("tma",), ("tma",))
PLANS = {
    "cooperative_grid": BASE,
    "cooperative_multicast": replace(BASE, cluster_m=2),
    "cooperative_cta": replace(BASE, groups_m=1, groups_n=2, exchange="cta", pipeline_depth=2, ctas=64),
    "cooperative_cluster": replace(BASE, exchange="cluster", cluster_n=2, ctas=64),
    "pingpong_grid": replace(BASE, layout="pingpong", groups_m=1),
    "pingpong_multicast": replace(BASE, layout="pingpong", groups_m=1, cluster_m=2),
    "pingpong_tall": replace(BASE, layout="pingpong", groups_m=1, tile_m=128, tile_n=128),
    "cooperative_resident": replace(BASE, tile_n=128, w_resident=True),
    "pingpong_resident": replace(BASE, tile_n=128, layout="pingpong", groups_m=1, pipeline_depth=8, w_resident=True),
    "pingpong_three": replace(
        BASE, tile_n=128, layout="pingpong", groups_m=1, pipeline_depth=6, w_resident=True, mma_groups=3
    ),
    "pingpong_three_tall": replace(
        BASE, tile_m=128, tile_n=64, layout="pingpong", groups_m=1, store=("global",), mma_groups=3
    ),
    "pingpong_four": replace(
        BASE, tile_n=128, layout="pingpong", groups_m=1, pipeline_depth=4, w_resident=True, mma_groups=4
    ),
    "global_store": replace(BASE, store=("global",)),
    "dependent": replace(BASE, dependent_launch=True),
}


def scheduled(name: str, m: Any, n: int, k: int, plan: Plan | None = None, **kinds: Any) -> tirx.PrimFunc:
    result = schedule(EXAMPLES[name].build(m, n, k, kinds.pop("dtype", "bfloat16"), **kinds), H200, plan)
    assert not isinstance(result, Refusal), str(result)
    return result


def cubin_of(kernel: tirx.PrimFunc) -> Any:
    with TARGET:
        executable = tvm.compile(tvm.IRModule({"main": kernel}), target=TARGET, tir_pipeline="tirx")
    (source,) = sources(executable)
    return compile_cubin(source)


@pytest.mark.parametrize("name", PLANS)
def test_every_kind_of_plan_compiles(name: str) -> None:
    report = cubin_of(lower(scheduled("layer_norm", 4096, 512, 256, PLANS[name]), name))
    assert [kernel.name for kernel in report.kernels] == [f"{name}_kernel"]
    assert report.spill_stores == report.spill_loads == 0
    assert not report.warnings


@pytest.mark.parametrize("layout", ["NK", "KN"])
@pytest.mark.parametrize("groups_m", [1, 2], ids=["pingpong", "cooperative"])
def test_a_resident_w_is_loaded_in_the_first_step_only(groups_m: int, layout: str) -> None:
    """Structure; the numbers are in test_interpreter."""
    plan = PLANS["pingpong_resident" if groups_m == 1 else "cooperative_resident"]
    index = index_of(lower(scheduled("layer_norm", 16384, 512, 256, plan, layout=layout), "kernel"))

    def landed(scene: Scene) -> dict[str, int]:
        totals: dict[str, int] = {}
        for load in index.named(LOAD):
            source = index.map_of(load.args[1])
            assert source is not None
            name = str(source.variable.name)
            totals[name] = totals.get(name, 0) + scene.count(load, ()).item() * source.box_bytes
        return totals

    small, large = (landed(scene) for scene in scenes(index))
    assert small["w_map"] == large["w_map"] == 128 * 256 * 2
    assert small["a_map"] < large["a_map"]
    assert small["a_map"] % (groups_m * 64 * 256 * 2) == 0


@pytest.mark.parametrize("depth", [4, 6, 8])
def test_small_k_with_a_resident_w_does_not_spill(depth: int) -> None:
    plan = replace(PLANS["pingpong_resident"], pipeline_depth=depth, ctas=132)
    report = cubin_of(lower(scheduled("layer_norm", 16384, 512, 512, plan), "kernel"))
    assert report.spill_stores == report.spill_loads == report.kernels[0].stack_frame == 0
    assert not report.warnings


def test_small_k_with_three_groups_and_no_staging_tiles_does_not_spill() -> None:
    quads = replace(PLANS["pingpong_three"], operands=("global",), store=("global",), w_order="quads", ctas=132)
    report = cubin_of(lower(scheduled("layer_norm", 16384, 512, 512, replace(quads, pipeline_depth=10)), "kernel"))
    assert report.spill_stores == report.spill_loads == report.kernels[0].stack_frame == 0
    assert not report.warnings


@pytest.mark.parametrize("name", ["pingpong_grid", "pingpong_three", "pingpong_four"])
def test_turns_go_round(name: str) -> None:
    """Structure; the numbers are in test_interpreter."""
    plan = PLANS[name]
    index = index_of(lower(scheduled("layer_norm", 16384, 512, 256, plan), "kernel"))
    assert index.threads == plan.threads
    scene, _ = scenes(index)
    (waits,) = (sync for sync in index.named("barrier_sync_count") if sync.loops)
    (gives,) = index.named("barrier_arrive")
    groups = range(1, plan.mma_groups + 1)
    numbers = [scene.value(site.args[0]).ravel().tolist()[1:] for site in (waits, gives)]
    assert numbers == [list(groups), [*groups[1:], 1]]
    turns = [scene.count(site, (WARP_GROUP,)).ravel() for site in (waits, gives)]
    # one turn more or less at the ends: nobody gives the first, nobody takes one behind the last
    assert turns[0].sum() == turns[1].sum()
    assert all(count[0] == 0 and count[1:].max() - count[1:].min() <= 128 for count in turns)


@pytest.mark.parametrize("m", [4097, None], ids=["ragged", "symbolic"])
@pytest.mark.parametrize("name", ["softmax_cap", "rms_residual", "bias_gelu", "gate_two_outputs"])
def test_default_plans_do_not_spill(name: str, m: int | None) -> None:
    rows = tirx.Var("m", "int64") if m is None else m
    report = cubin_of(lower(scheduled(name, rows, 1000, 72), name))
    assert report.kernels[0].stack_frame == 0
    assert not report.warnings


@pytest.mark.parametrize("name", PLANS)
def test_shared_memory_is_what_legality_counted(name: str) -> None:
    func = scheduled("layer_norm", 4096, 512, 256, PLANS[name])
    spec = analyze(func)
    layout = Kernel(func, spec, PLANS[name], name).layout
    assert layout.total == sum(shared_memory(PLANS[name], spec).values()) - BARRIERS_BYTES


def test_kernels_of_one_module_have_memory_of_their_own() -> None:
    func = scheduled("layer_norm", 4096, 512, 256, PLANS["cooperative_grid"])
    mod = tvm.IRModule({"first": func, "second": func})
    lowered = LowerClusters()(mod)
    with TARGET:
        (source,) = sources(tvm.compile(lowered, target=TARGET, tir_pipeline="tirx"))
    assert {"comfuse_first_mail_slots", "comfuse_second_mail_slots"} <= set(source.replace("[", " ").split())
    assert len(compile_cubin(source).kernels) == 2


def test_passes_do_not_change_their_input() -> None:
    func = scheduled("layer_norm", 4096, 512, 256, PLANS["cooperative_grid"])
    mod = tvm.IRModule({"main": func})
    before = mod.script()
    lowered = LowerClusters()(mod)
    assert mod.script() == before
    assert "wgmma" in lowered.script()
    assert "wgmma" not in before
    # a second time there is nothing left to do
    tvm.ir.assert_structural_equal(LowerClusters()(lowered), lowered)


def test_without_a_plan() -> None:
    with pytest.raises(PlanError, match=r"comfuse\.plan"):
        lower(EXAMPLES["layer_norm"].build(128, 256, 64, "bfloat16"))


def test_unknown_expression_names_it() -> None:
    value = tirx.Var("x", "float32")
    with pytest.raises(LoweringError, match="Let"):
        rebind(tvm.tirx.Let(tirx.Var("y", "float32"), value, value), Binding({}, lambda load: load))


def test_division_by_a_row_value_is_done_once_a_row() -> None:
    func = scheduled("softmax_cap", 128, 256, 64)
    block = normal_forms(func)["stage_2_out0"]
    row = tirx.const(2.0, "float32")
    per_row = rebind(block.value.value, Binding({}, lambda load: row, of_row=lambda load: len(load.indices) == 1))
    assert not isinstance(per_row, tirx.Div)
    per_element = rebind(block.value.value, Binding({}, lambda load: row))
    assert isinstance(per_element, tirx.Div)
    # both are the same number: exp(2 - 2) / 2
    for expr in (per_row, per_element):
        assert float(tvm.sym.Analyzer().simplify(tirx.Cast("float64", expr.b))) in (0.5, 2.0)


def test_plan_survives_scheduling() -> None:
    assert plan_of(scheduled("layer_norm", 4096, 512, 256, PLANS["cooperative_grid"])) == PLANS["cooperative_grid"]
