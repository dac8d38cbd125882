"""The design space: what it holds, that traces of it vary and replay, and that nothing illegal comes out."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tvm
import tvm_ffi
from canonical_examples import EXAMPLES, inputs, references, run_on_cpu
from tuning_examples import TARGET, space_of, task
from tvm import s_tir, te
from tvm.s_tir.schedule import Trace

from tvm_comfuse.errors import PlanError
from tvm_comfuse.refusal import Refusal
from tvm_comfuse.schedules.analysis import analyze
from tvm_comfuse.schedules.apply import PLAN, plan_of
from tvm_comfuse.schedules.choose import candidates, default_plan
from tvm_comfuse.schedules.cost import tiles_of_cta
from tvm_comfuse.schedules.device import H200
from tvm_comfuse.schedules.legality import legality
from tvm_comfuse.tuning.metaschedule import meta_schedule as ms
from tvm_comfuse.tuning.metaschedule import tune_context
from tvm_comfuse.tuning.rules import (
    MutateChoice,
    neighbours,
    plan_in,
    realize,
    sample,
    schedule_at,
    space_generator,
    table_in,
)
from tvm_comfuse.tuning.space import Axis, Space

FORMS = {
    "layer_norm": (16384, 768, 768),
    "rms_residual": (8192, 2304, 2048),
    "bias_gelu": (None, 768, 768),
    "gate_two_outputs": (256, 1024, 1024),
}


@pytest.mark.parametrize("name", FORMS)
def test_holds_every_candidate_and_only_legal_plans(name: str) -> None:
    space = space_of(task(name, *FORMS[name]))
    plans = candidates(space.spec, H200)
    assert set(plans) <= set(space.legal)
    assert default_plan(space.spec, H200) in space.legal
    assert not any(legality(plan, space.spec, H200) for plan in space.legal)
    assert all(space.plan(point) == plan for plan, point in space.legal.items())
    assert all(space.plan(space.point(plan) or ()) == plan for plan in plans)
    assert len(space.legal) < len(space)


def test_holds_more_than_the_enumeration() -> None:
    """Deferred tails without quads are not in the enumeration, but can be measured."""
    legal = space_of(task()).legal
    enumerated = {(plan.defer, plan.w_order) for plan in candidates(space_of(task()).spec, H200)}
    assert enumerated == {(False, "rows"), (False, "quads"), (True, "quads")}
    assert {(plan.defer, plan.w_order) for plan in legal} == {
        (False, "rows"),
        (False, "quads"),
        (True, "rows"),
        (True, "quads"),
    }
    assert {plan.w_resident for plan in legal} == {False, True}


def test_a_dependent_launch_follows_and_fast_math_needs_a_function() -> None:
    for name, has_function in (("layer_norm", False), ("softmax_cap", True)):
        legal = space_of(task(name, 1024, 256, 256)).legal
        assert all(plan.dependent_launch for plan in legal)
        assert {plan.fast_math for plan in legal} == {False, has_function}
        assert {plan.exchange for plan in legal} > {"grid"}


def test_refused_points_are_counted_by_reason() -> None:
    known = space_of(task("softmax_cap", 16384, 1024, 512))
    space = Space.read(known.table(), known.spec, H200)
    assert space.refused == Counter()
    expected: Counter[str] = Counter()
    for number, point in enumerate(point for point in space.points() if point[-1] == 0):
        refusals = legality(space.plan(point), space.spec, H200)
        expected.update({refusal.code for refusal in refusals})
        if refusals and number % 50 == 0:
            # another grid is no way out
            assert legality(space.plan([*point[:-1], 1]), space.spec, H200)
    assert len(space.legal) > 100
    assert space.refused == expected
    assert {"shared-memory", "exchange-scope", "cluster-size"} <= set(expected)


def test_even_grids_need_no_more_rounds() -> None:
    space = space_of(task("layer_norm", 4096, 1024, 512))
    pairs = 0
    for plan, point in space.legal.items():
        if point[-1] == 1:
            full = space.plan([*point[:-1], 0])
            assert plan.ctas < full.ctas
            assert tiles_of_cta(plan, space.spec) == tiles_of_cta(full, space.spec)
            pairs += 1
    assert pairs > 10


def test_a_field_that_the_enumeration_varies_becomes_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_fast_math(spec, device):
        return [replace(plan, fast_math=fast) for plan in candidates(spec, device) for fast in (False, True)]

    before = len(space_of(task()).legal)
    monkeypatch.setattr("tvm_comfuse.tuning.space.candidates", with_fast_math)
    space = Space.of.__wrapped__(space_of(task()).spec, H200)
    assert ("fast_math",) in [axis.fields for axis in space.axes]
    assert {plan.fast_math for plan in space.legal} == {False, True}
    assert len(space.legal) == 2 * before


def test_no_plan_is_a_refusal() -> None:
    func = EXAMPLES["bias_gelu"].build(m=64, n=100, k=64)
    assert isinstance(Space.of(analyze(func), H200), Refusal)


def test_a_table_is_the_space() -> None:
    space = space_of(task())
    assert Space.read(space.table(), space.spec, H200) == space
    for text in ("", "{}", space.table().replace("pipeline_depth", "depth_of_pipeline")):
        with pytest.raises(PlanError, match="table of a design space"):
            Space.read(text, space.spec, H200)


def test_neighbours_of_numbers_are_next_to_them() -> None:
    assert neighbours(Axis(("pipeline_depth",), ((2,), (3,), (4,))), 0) == [1]
    assert neighbours(Axis(("pipeline_depth",), ((2,), (3,), (4,))), 1) == [0, 2]
    assert neighbours(Axis(("exchange",), (("cta",), ("grid",), ("warp",))), 0) == [1, 2]
    assert neighbours(Axis(("tile_m", "tile_n"), ((64, 64), (64, 128), (128, 64))), 0) == [1, 2]


# --- traces -----------------------------------------------------------------------------------------------------------


def test_every_choice_is_a_decision_of_the_trace() -> None:
    what = task()
    space = space_of(what)
    for plan in (default_plan(space.spec, H200), list(space.legal)[100]):
        sch = schedule_at(what.workload, space, space.legal[plan])
        assert plan_of(sch.mod["main"]) == plan == plan_in(sch.trace)
        decisions = [int(value) for value in sch.trace.decisions.values()]
        assert tuple(decisions) == space.legal[plan]
        assert table_in(sch.trace) == space.table()
        notes = sch.get(sch.get_sblock("root")).annotations
        assert [name for name in notes if name.startswith("comfuse.")] == [PLAN]


def test_a_changed_decision_gives_another_plan() -> None:
    """Without the postprocessor's part a trace replays with the decision it has now."""
    what = task()
    space = space_of(what)
    plan = default_plan(space.spec, H200)
    trace = schedule_at(what.workload, space, space.legal[plan]).trace
    names = [axis.fields for axis in space.axes]
    at = names.index(("pipeline_depth",))
    inst = [inst for inst in trace.insts if inst.kind.name == "SampleCategorical"][at]
    changed = trace.with_decision(inst, space.legal[plan][at] - 1, remove_postproc=True)
    sch = s_tir.Schedule(what.workload)
    changed.apply_to_schedule(sch, remove_postproc=True)
    assert realize(sch, H200) == []
    assert plan_of(sch.mod["main"]) == replace(plan, pipeline_depth=plan.pipeline_depth - 1)


def test_replays_in_a_fresh_process_that_knows_nothing_of_the_rules(tmp_path: Path) -> None:
    """From JSON, with stock TVM alone."""
    what = task("layer_norm", 512, 256, 128)
    space = space_of(what)
    sch = schedule_at(what.workload, space, list(space.legal.values())[7])
    values = {
        "workload": tvm.ir.save_json(what.workload),
        "trace": str(tvm.ir.save_json(sch.trace.as_json())),
        "scheduled": tvm.ir.save_json(sch.mod),
    }
    (tmp_path / "record.json").write_text(json.dumps(values))
    code = """
import json, sys, tvm, tvm_ffi
from tvm import s_tir
values = json.load(open(sys.argv[1]))
sch = s_tir.Schedule(tvm.ir.load_json(values["workload"]))
s_tir.schedule.Trace.apply_json_to_schedule(tvm.ir.load_json(values["trace"]), sch)
assert tvm_ffi.structural_equal(sch.mod, tvm.ir.load_json(values["scheduled"]))
assert "tvm_comfuse.tuning.rules" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "record.json")], check=True, cwd=tmp_path)


def test_mutants_are_legal_neighbours() -> None:
    what = task()
    space = space_of(what)
    plan = default_plan(space.spec, H200)
    trace = schedule_at(what.workload, space, space.legal[plan]).trace
    mutator = MutateChoice(H200)
    mutator._initialize_with_tune_context(tune_context(what.workload, target=TARGET, num_threads=1))
    seen = set()
    for _ in range(30):
        mutant = mutator.apply(trace)
        sch = s_tir.Schedule(what.workload)
        mutant.apply_to_schedule(sch, remove_postproc=True)
        assert realize(sch, H200) == []
        other = plan_of(sch.mod["main"])
        assert other in space.legal
        changed = [a != b for a, b in zip(space.legal[other], space.legal[plan], strict=True)]
        # two points may be one plan, so at most one choice differs, and some mutants may be the plan itself
        assert sum(changed) <= 1
        seen.add(other)
    assert len(seen - {plan}) >= 5


def test_stock_search_gets_legal_plans_only() -> None:
    """MetaSchedule's own evolutionary search over the rule, the postprocessor and the mutator."""
    what, refused = task("layer_norm", 4096, 768, 768), Counter[str]()
    context = tune_context(
        what.workload,
        target=TARGET,
        space_generator=space_generator(H200, refused),
        search_strategy=ms.search_strategy.EvolutionarySearch(
            population_size=16, init_min_unmeasured=8, genetic_num_iters=1
        ),
        num_threads=1,
        rand_state=1,
    )
    spaces = context.generate_design_space()
    assert len(spaces) == 1
    context.pre_tuning(8, 8, spaces, ms.database.MemoryDatabase(), ms.cost_model.RandomModel())
    found = context.generate_measure_candidates()
    assert len(found) == 8
    space = space_of(what)
    assert all(plan_of(candidate.sch.mod["main"]) in space.legal for candidate in found)
    assert sum(refused.values()) > 0
    assert set(refused) <= set(space.refused)


def test_other_functions_are_left_alone() -> None:
    a = te.placeholder((8, 8), "float32", "a")
    func = te.create_prim_func([a, te.compute((8, 8), lambda i, j: a[i, j] + 1.0, name="gemm")])
    mod = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    context = tune_context(
        mod, target=TARGET, space_generator=space_generator(H200), search_strategy="replay-trace", num_threads=1
    )
    (sch,) = context.generate_design_space()
    assert tvm_ffi.structural_equal(sch.mod, mod)
    assert len(sch.trace.decisions) == 0


def test_an_unsampled_or_illegal_point_is_turned_down() -> None:
    what = task()
    with pytest.raises(PlanError, match="sampled choices"):
        realize(s_tir.Schedule(what.workload), H200)
    space = space_of(what)
    illegal = next(point for point in space.points() if legality(space.plan(point), space.spec, H200))
    with pytest.raises(PlanError, match="a legal point"):
        schedule_at(what.workload, space, illegal)
    sch = s_tir.Schedule(what.workload)
    sample(sch, space)
    assert isinstance(sch.trace, Trace)


def test_scheduled_points_are_right() -> None:
    """The numeric twin: some points of a small task on LLVM against float64."""
    what = task("layer_norm", 100, 128, 72)
    space, example = space_of(what), EXAMPLES["layer_norm"]
    plans = list(space.legal)
    arrays = inputs(what.func, 1)
    (exact,) = references(example, arrays, "NK")
    for plan in (plans[0], plans[len(plans) // 2], plans[-1]):
        sch = schedule_at(what.workload, space, space.legal[plan])
        (out,) = run_on_cpu(sch.mod["main"], arrays, 1)
        error = np.linalg.norm(out.astype("float64") - exact) / np.linalg.norm(exact)
        assert error < 2 * 2.3e-3
