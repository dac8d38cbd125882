"""The instrumented build: nothing but stamps is added, in the interpreter they are sane, and what is made of them is right."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import interpreted_kernels
import numpy as np
import pytest
import tvm
from tvm import tirx
from verified_kernels import case

from tvm_comfuse.bench.ops import OPS
from tvm_comfuse.cuda import compile_cubin, find_nvcc, find_nvrtc, sources
from tvm_comfuse.frontend import from_relax
from tvm_comfuse.fusion import fuse
from tvm_comfuse.profile.summary import share_of, summarize
from tvm_comfuse.profile.timeline import OUTSIDE, CtaTimeline, Span, decode, segments
from tvm_comfuse.schedules.analysis import analyze
from tvm_comfuse.schedules.apply import plan_of
from tvm_comfuse.schedules.device import H200
from tvm_comfuse.target import parse_target
from tvm_comfuse.tir_passes.emit.geometry import Geometry
from tvm_comfuse.tir_passes.emit.stamps import MEMORY, MMA, WAITS, WORK, Site, StampLayout, role_of
from tvm_comfuse.tir_passes.instrument import instrumented
from tvm_comfuse.tir_passes.lower import is_cluster, lower
from tvm_comfuse.verify.dynamic import compare
from tvm_comfuse.verify.interpreter import Program, Result
from tvm_comfuse.verify.rewrite import call_of, name_of, rewrite
from tvm_comfuse.verify.static import check

needs_compiler = pytest.mark.skipif(find_nvcc() is None and find_nvrtc() is None, reason="no CUDA compiler")
#: families whose roles have every kind of span between them
FAMILIES = [
    "cooperative_cluster",
    "deferred_grid",
    "pingpong_three",
    "memory_staged",
    "memory_deferred",
    "quads_multicast",
    "dependent_ragged",
    "elementwise",
]


@cache
def stamped(name: str) -> tuple[tirx.PrimFunc, StampLayout]:
    given = case(name)
    return instrumented(given.func, given.inputs[0].shape[0], name)


@cache
def run(name: str) -> Result:
    return Program(stamped(name)[0]).run(case(name).inputs, seed=3)


@cache
def timelines(name: str) -> list[CtaTimeline]:
    stamps = run(name).stamps
    assert stamps is not None
    return decode(stamps, stamped(name)[1])


# --- the kernel -------------------------------------------------------------------------------------------------------


def without_stamps(kernel: tirx.PrimFunc) -> tirx.PrimFunc:
    """Takes out the calls of stamps, their own registers, and the parameter."""

    def remove(node: Any, around: tuple[Any, ...]) -> list[Any] | None:
        call = node.then_case if isinstance(node, tirx.IfThenElse) else node
        buffer = node.buffer if isinstance(node, (tirx.BufferStore, tirx.AllocBuffer)) else None
        if name_of(call) == "comfuse_opaque":
            buffer = call_of(call).args[1].source
        own = buffer is not None and str(buffer.name) in ("entry_clock", "stamp_lane")
        return [] if own or name_of(call) in ("comfuse_stamp", "comfuse_anchor") else None

    stripped = rewrite(kernel, remove)
    assert stripped is not None
    return tirx.PrimFunc(list(kernel.params)[:-1], stripped.body, kernel.ret_type, kernel.attrs)


@pytest.mark.parametrize("name", FAMILIES)
def test_nothing_but_stamps_is_added(name: str) -> None:
    """And so the kernel of a plan, emitted by the same code, is what it is without them."""
    stripped, plain = without_stamps(stamped(name)[0]), lower(case(name).func, name)
    assert stripped.script() == plain.script()
    assert "stamp" not in plain.script()
    assert "comfuse_stamp" in stamped(name)[0].script()


@needs_compiler
def test_stamps_need_no_more_registers_than_there_are() -> None:
    """A row with a deferred tail, which uses nearly all of them."""
    op, target = OPS["layer_norm"], parse_target("h200")
    fused, _ = fuse(from_relax(op.relax_module(16384, 1024, 1024)), target)
    (func,) = (func for _, func in fused.functions_items() if is_cluster(func))
    assert plan_of(func).defer
    kernel, layout = instrumented(func, 16384)
    assert layout.left_out == 0
    with target:
        executable = tvm.compile(tvm.IRModule({"main": kernel}), target=target, tir_pipeline="comfuse")
    report = compile_cubin("\n".join(sources(executable)))
    assert report.spill_stores == report.spill_loads == 0
    assert not report.warnings


# --- in the interpreter -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_it_keeps_the_rules_and_the_results(name: str) -> None:
    given, result = case(name), run(name)
    assert check(stamped(name)[0], H200) == []
    assert result.findings == []
    assert compare(result.outputs, given.references) == []
    plain = Program(given.kernel).run(given.inputs, seed=1).outputs
    assert list(plain) == list(result.outputs)
    assert all(np.array_equal(plain[output], result.outputs[output]) for output in plain)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_span_has_an_end_and_they_nest(name: str) -> None:
    layout, stamps = stamped(name)[1], run(name).stamps
    assert stamps is not None
    assert layout.left_out == 0
    spans = stamps[:, 1:].reshape(-1, 2)
    assert ((spans[:, 0] == 0) == (spans[:, 1] == 0)).all()
    assert (spans[:, 0] <= spans[:, 1]).all()
    for timeline in timelines(name):
        for lane in {span.lane for span in timeline.spans}:
            around: list[Span] = []
            for span in sorted((s for s in timeline.spans if s.lane == lane), key=lambda s: (s.begin, -s.end)):
                while around and around[-1].end <= span.begin:
                    around.pop()
                assert not around or span.end <= around[-1].end, (around[-1], span)
                around.append(span)
            assert all(0 <= s.begin <= s.end <= timeline.cycles for s in timeline.spans)


def count(name: str, kind: str) -> int:
    return sum(span.kind == kind for timeline in timelines(name) for span in timeline.spans)


@pytest.mark.parametrize("name", FAMILIES)
def test_there_is_a_span_for_every_step_and_slot(name: str) -> None:
    func = case(name).func
    plan, spec = plan_of(func), analyze(func)
    geometry = Geometry(plan, spec)
    units = -(-case(name).inputs[0].shape[0] // geometry.unit_rows)
    # CTAs that share W do the same number of steps
    units = -(-units // plan.cluster_m) * plan.cluster_m
    loads = units * geometry.parts
    works = loads if geometry.pingpong else loads * plan.mma_groups
    assert count(name, "load") == loads
    assert count(name, "empty slot") == loads * geometry.k_slots
    assert count(name, "full slot") == works * geometry.k_slots
    assert [count(name, kind) for kind in ("main loop", "drain", "head")] == [works] * 3
    rounds = 0 if plan.exchange == "none" else 1
    assert [count(name, kind) for kind in ("post", "exchange", "first pass")] == [works * rounds] * 3
    assert count(name, "store") == count(name, "result") == works * (plan.store == ("tma",))
    assert (count(name, "tail") > works) == plan.defer
    assert (count(name, "turn") > 0) == geometry.pingpong


@pytest.mark.parametrize("name", FAMILIES)
def test_a_step_is_done_in_order(name: str) -> None:
    plan = plan_of(case(name).func)
    for timeline in timelines(name):
        # of a tile, whoever works on it
        steps: dict[tuple[int, int], dict[str, list[Span]]] = {}
        for span in (s for s in timeline.spans if s.lane.startswith((MMA, MEMORY))):
            steps.setdefault((role_of(span.lane)[1], span.step), {}).setdefault(span.kind, []).append(span)
        for (group, step), kinds in steps.items():
            ((main,), (head,), (drain,)) = kinds["main loop"], kinds["head"], kinds["drain"]
            assert main.end <= head.begin
            assert main.begin <= drain.begin <= drain.end <= main.end
            assert [s.number for s in sorted(kinds["full slot"], key=lambda s: s.begin)] == list(
                range(len(kinds["full slot"]))
            )
            assert all(tail.begin >= head.end for tail in kinds["tail"])
            assert len(kinds.get("hand over", [])) == 2 * plan.hands_over
            behind = steps.get((group, step + 1))
            if plan.defer and not plan.hands_over and behind is not None:
                assert all(tail.end <= behind["main loop"][0].end for tail in kinds["tail"])


def test_steps_without_a_place_are_dropped() -> None:
    """A buffer for fewer rows than are launched: nothing is written beside it."""
    given = interpreted_kernels.case("layer_norm", "pingpong_grid", m=700, symbolic=True)
    func = interpreted_kernels._lowered("layer_norm", replace_plan(given), None, 512, 136, "bfloat16", "NK")[0]
    kernel, layout = instrumented(func, 130, "kernel")
    result = Program(kernel).run(given.arrays)
    assert result.findings == []
    interpreted_kernels.check_numbers(result, given.references)
    assert result.stamps is not None
    assert result.stamps.shape == layout.shape
    kept = {span.step for timeline in decode(result.stamps, layout) for span in timeline.spans if span.kind == "load"}
    assert kept == set(range(layout.shape[2]))


def replace_plan(given: Any) -> Any:
    return replace(interpreted_kernels.KINDS["pingpong_grid"][0], operands=("tma",), store=("tma",))


# --- what is made of the stamps ---------------------------------------------------------------------------------------


def test_a_clock_that_wraps() -> None:
    """One CTA, one MMA warp group with a step of 100 cycles, 60 of them a wait, around the end of 32 bits."""
    lanes = ("CTA", "ring filler", "result sender", "mail waiter", f"{MMA} 0")
    sites = (Site(MMA, "main loop", 0, 0), Site(MMA, "full slot", 0, 2, extent=2))
    layout = StampLayout((1, 5, 1, 8), lanes, 1, sites)
    words, top = np.zeros(layout.shape, np.uint32), 2**32
    words[0, 0, 0] = [top - 50, top - 40, 7, 1, 0, 160, 107, 1]
    words[0, 4, 0, :6] = [top - 20, 80, top - 10, 50, 0, 0]
    (timeline,) = decode(words, layout)
    assert (timeline.cycles, timeline.begin_ns, timeline.end_ns, timeline.cycle_ns) == (
        210,
        2**32 + 7,
        2**32 + 107,
        0.5,
    )
    assert [(s.kind, s.begin, s.end) for s in timeline.spans] == [("main loop", 30, 130), ("full slot", 40, 100)]
    assert [(s.kind, s.cycles) for s in segments(timeline)] == [
        ("start", 30),
        ("main loop", 10),
        ("full slot", 60),
        ("main loop", 30),
        ("end", 80),
    ]
    role = summarize([timeline]).roles[MMA]
    assert role.kinds == {"start": 30, "main loop": 40, "full slot": 60, "end": 80}
    assert role.steps == ({"main loop": 40, "full slot": 60},)
    assert (role.waiting, role.outside) == pytest.approx((60 / 210, 110 / 210))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_sums_are_the_whole_time(name: str) -> None:
    summary = summarize(timelines(name))
    assert summary.cycles == np.mean([timeline.cycles for timeline in timelines(name)])
    for role in summary.roles.values():
        assert sum(role.kinds.values()) == pytest.approx(summary.cycles)
        assert role.busy + role.waiting + role.outside == pytest.approx(1.0)
        assert set(role.kinds) <= {*WORK, *WAITS, *OUTSIDE}
        assert sum(share_of(role.kinds).values()) == pytest.approx(1.0)
    for cta, timeline in zip(summary.ctas, timelines(name), strict=True):
        assert sum(cta) == pytest.approx(timeline.cycles)


@pytest.mark.parametrize(("name", "together"), [("deferred_grid", True), ("pingpong_grid", False)])
def test_groups_of_a_tile_do_the_same_steps_and_others_take_turns(name: str, together: bool) -> None:
    spans = [span for cta in timelines(name) for span in cta.spans if span.kind == "main loop"]
    first, second = ({span.step for span in spans if span.lane == f"MMA group {group}"} for group in range(2))
    assert min(first) == 0
    assert first == second if together else not first & second
