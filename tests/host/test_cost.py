"""schedules.cost and schedules.choose: anchored to measurements, monotone, deterministic, and never an illegal plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from canonical_examples import EXAMPLES

from tvm_comfuse.refusal import Refusal
from tvm_comfuse.schedules.choose import candidates, default_plan, rank
from tvm_comfuse.schedules.cost import NOMINAL_ROWS, PINGPONG_MAIN_LOOP, bytes_moved, estimate, stage_time
from tvm_comfuse.schedules.device import H100, H200
from tvm_comfuse.schedules.legality import legality
from tvm_comfuse.schedules.plan import Plan
from tvm_comfuse.schedules.spec import analyze


def spec_of(name: str, m: int | None, n: int, k: int):
    return analyze(EXAMPLES[name].build(m, n, k, "bfloat16"))


SPEC = spec_of("layer_norm", 16384, 1024, 1024)
PING = Plan(64, 256, 64, 3, "pingpong", 1, 1, "grid", 2, 1, 128, ("tma",), ("tma",))
COOP = replace(PING, layout="cooperative", groups_m=2)


MEASURED = json.loads((Path(__file__).parents[2] / "benchmarks/results/h200/layouts.json").read_text())["rows"]
MEASURED_SHAPES = sorted({(row["M"], row["N"], row["K"]) for row in MEASURED})


def plan_of_row(row: dict[str, Any]) -> Plan:
    """The plan a measured row was run with."""
    layout, _, groups = row["layout"].partition(" ")
    groups_m, groups_n = (int(g) for g in (groups or "1x1").split("x"))
    exchange, _, cluster_n = row["exchange"].partition(" ")
    sizes = (row["tile_m"], row["tile_n"], 64, row["pipeline_depth"])
    cluster = (row["cluster_m"], int(cluster_n or 1), row["ctas"])
    return Plan(*sizes, layout, groups_m, groups_n, exchange, *cluster, ("tma",), ("tma",))


def predicted(row: dict[str, Any]) -> float:
    return estimate(plan_of_row(row), spec_of("layer_norm", row["M"], row["N"], row["K"]), H200).total


def test_close_to_the_measured_plans() -> None:
    errors = [abs(predicted(row) / row["us"] - 1) for row in MEASURED]
    assert sum(errors) / len(errors) < 0.12
    assert max(errors) < 0.45


@pytest.mark.parametrize("shape", MEASURED_SHAPES)
def test_prefers_a_plan_that_measured_well(shape: tuple[int, int, int]) -> None:
    rows = [row for row in MEASURED if (row["M"], row["N"], row["K"]) == shape]
    chosen = min(rows, key=predicted)
    assert chosen["us"] <= 1.05 * min(row["us"] for row in rows)


def test_global_operands_cost_more() -> None:
    assert stage_time(replace(PING, operands=("global",)), SPEC) > stage_time(PING, SPEC)


def test_memory_bound() -> None:
    assert bytes_moved(SPEC) == 2 * (16384 * 1024 * 3 + 1024 * 1024)
    assert estimate(PING, SPEC, H200).memory == pytest.approx(bytes_moved(SPEC) / 4.3e6)
    assert estimate(PING, SPEC, H100).memory > estimate(PING, SPEC, H200).memory


def test_pingpong_hides_stages_behind_a_long_main_loop_only() -> None:
    assert estimate(PING, SPEC, H200).exposed == 0
    short = spec_of("layer_norm", 16384, 1024, 128)
    assert estimate(PING, short, H200).exposed > 0
    assert estimate(COOP, SPEC, H200).exposed > 0


def test_more_groups_hide_what_does_not_fit_into_one_main_loop() -> None:
    spec = spec_of("layer_norm", 16384, 512, 512)
    two = replace(PING, tile_n=128, cluster_m=1, ctas=132, pipeline_depth=6, w_resident=True)
    estimates = [estimate(replace(two, mma_groups=groups), spec, H200) for groups in (2, 3, 4)]
    step = [(e.loop - e.exposed) / 8 + e.exposed / 7 for e in estimates]
    main, behind = max(estimates[0].product, estimates[0].loads) / 8, estimates[0].tail
    assert step == pytest.approx([max(main, (main + behind) / groups) for groups in (2, 3, 4)])
    assert estimates[1].total < estimates[0].total
    # where one main loop hides everything there is nothing to gain
    assert estimate(PING, SPEC, H200) == estimate(replace(PING, mma_groups=3), SPEC, H200)


def test_multicast_lowers_loads() -> None:
    deep = replace(PING, tile_m=128, tile_n=128, pipeline_depth=8)
    single = estimate(replace(deep, cluster_m=1), SPEC, H200)
    assert estimate(deep, SPEC, H200).loads < single.loads


def test_a_resident_w_is_loaded_once() -> None:
    spec = spec_of("layer_norm", 16384, 512, 512)
    # so many slots that bandwidth decides, not latency
    ring = replace(PING, tile_n=128, cluster_m=1, ctas=132, pipeline_depth=16)
    in_ring, resident = (estimate(replace(ring, w_resident=stays), spec, H200) for stays in (False, True))
    # eight steps: W in each, or once in front of them
    bandwidth = H200.l2_to_sm_gbps * 1e3 / H200.sms
    assert resident.fill - in_ring.fill == pytest.approx(128 * 512 * 2 / bandwidth)
    assert in_ring.loads - resident.loads == pytest.approx(8 * PINGPONG_MAIN_LOOP * 128 * 512 * 2 / bandwidth)
    assert resident.total < in_ring.total
    assert resident.product == in_ring.product


def test_more_work_takes_longer() -> None:
    base = estimate(PING, SPEC, H200).total
    assert estimate(PING, replace(SPEC, m=32768), H200).total > base
    assert estimate(PING, replace(SPEC, k=2048), H200).total > base
    assert estimate(replace(PING, ctas=64), SPEC, H200).total > base
    assert estimate(replace(PING, pipeline_depth=2), SPEC, H200).total > base


def test_symbolic_rows_count_as_the_nominal_number() -> None:
    symbolic, static = spec_of("layer_norm", None, 1024, 1024), spec_of("layer_norm", NOMINAL_ROWS, 1024, 1024)
    assert estimate(PING, symbolic, H200) == estimate(PING, static, H200)


def test_an_estimate_prints_its_parts() -> None:
    text = str(estimate(PING, SPEC, H200))
    assert text.endswith(")")
    assert all(part in text for part in ("us", "product", "loads", "memory", "tail"))


SHAPES = [
    ("layer_norm", 16384, 768, 768),
    ("layer_norm", 16384, 1024, 4096),
    ("layer_norm", 256, 1024, 1024),
    ("layer_norm", 4096, 1000, 512),
    ("rms_residual", 8192, 5120, 5120),
    ("rms_residual", None, 2304, 2048),
    ("softmax_cap", 16384, 1024, 512),
    ("bias_gelu", 4097, 3072, 768),
    ("gate_two_outputs", 4096, 512, 512),
    ("norm_of_softmax", 1, 8, 8),
]


@pytest.mark.parametrize(("name", "m", "n", "k"), SHAPES)
def test_default_plan_is_legal_best_and_deterministic(name: str, m: int | None, n: int, k: int) -> None:
    spec = spec_of(name, m, n, k)
    plans = candidates(spec, H200)
    assert len(plans) == len(set(plans))
    assert all(legality(plan, spec, H200) == [] for plan in plans)
    chosen = default_plan(spec, H200)
    assert isinstance(chosen, Plan)
    assert chosen in plans
    assert chosen == default_plan(spec, H200)
    assert all(rank(chosen, spec, H200) <= rank(plan, spec, H200) for plan in plans)
    best = estimate(chosen, spec, H200)
    assert best.total >= max(best.memory, best.product)


def test_candidates_span_the_space() -> None:
    plans = candidates(spec_of("layer_norm", 16384, 512, 512), H200)
    assert {plan.exchange for plan in plans} == {"cta", "cluster", "grid"}
    assert {plan.layout for plan in plans} == {"pingpong", "cooperative"}
    assert {plan.cluster_m for plan in plans} == {1, 2}
    assert {(plan.tile_m, plan.tile_n) for plan in plans} >= {(64, 64), (64, 256), (128, 128)}
    assert any(plan.operands == ("global",) for plan in plans)
    assert {plan.layout for plan in plans if plan.w_resident} == {"pingpong", "cooperative"}
    assert {plan.cluster_m for plan in plans if plan.w_resident} == {1}
    assert {(plan.layout, plan.mma_groups) for plan in plans if plan.w_resident} == {
        ("cooperative", 2),
        ("pingpong", 2),
        ("pingpong", 3),
    }
    assert {plan.mma_groups for plan in plans if not plan.w_resident} == {2}
    assert not any(plan.w_resident for plan in candidates(spec_of("layer_norm", 16384, 512, 2048), H200))
    assert {plan.exchange for plan in candidates(spec_of("layer_norm", 16384, 128, 512), H200)} >= {"warp", "cta"}


def test_few_rows_get_few_ctas() -> None:
    plan = default_plan(spec_of("layer_norm", 64, 1024, 1024), H200)
    assert isinstance(plan, Plan)
    assert plan.ctas <= 32


def test_refusals_say_why() -> None:
    refusal = default_plan(spec_of("layer_norm", 16384, 1024, 1020), H200)
    assert isinstance(refusal, Refusal)
    assert refusal.code == "k-alignment"
    assert refusal.numbers["K"] == 1020
    # 300 column tiles of the widest CTA tile: more than there are SMs
    wide = spec_of("layer_norm", 128, 512 * 300, 64)
    assert candidates(wide, H200) == []
    refusal = default_plan(wide, H200)
    assert isinstance(refusal, Refusal)
    assert refusal.code == "row-length"
    assert refusal.numbers == {"N": 512 * 300, "limit": 512 * 132}
    assert refusal.remedy == "split the weight along N into 3 products of at most 67584 columns"
    limit = 512 * 132
    assert isinstance(default_plan(spec_of("layer_norm", 128, limit, 64), H200), Plan)
    assert default_plan(spec_of("layer_norm", 128, limit + 8, 64), H200).code == "row-length"


def test_no_plan_says_each_thing_once() -> None:
    refusal = default_plan(spec_of("layer_norm", 16384, 1024, 1024), replace(H200, shared_memory=20000))
    assert isinstance(refusal, Refusal)
    assert refusal.code == "no-plan"
    assert str(refusal).count("take smaller tiles") == 1
