"""schedules.cost and schedules.choose: anchored to measurements, monotone, deterministic, and never an illegal plan."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from canonical_examples import EXAMPLES

from tvm_comfuse.bench.ops import OPS
from tvm_comfuse.frontend import from_relax
from tvm_comfuse.fusion import fuse
from tvm_comfuse.refusal import Refusal
from tvm_comfuse.schedules.analysis import analyze
from tvm_comfuse.schedules.choose import candidates, default_plan, rank
from tvm_comfuse.schedules.cost import NOMINAL_ROWS, account, bytes_moved, estimate, stage_time, tiles_of_cta
from tvm_comfuse.schedules.device import H100, H200
from tvm_comfuse.schedules.legality import legality
from tvm_comfuse.schedules.plan import Plan
from tvm_comfuse.target import parse_target
from tvm_comfuse.tir_passes.lower import is_cluster


def spec_of(name: str, m: int | None, n: int, k: int):
    return analyze(EXAMPLES[name].build(m, n, k, "bfloat16"))


SPEC = spec_of("layer_norm", 16384, 1024, 1024)
PING = Plan(64, 256, 64, 3, "pingpong", 1, 1, "grid", 2, 1, 128, ("tma",), ("tma",))
COOP = replace(PING, layout="cooperative", groups_m=2)


MEASURED = json.loads((Path(__file__).parents[2] / "benchmarks/results/h200/forms.json").read_text())["rows"]
MEASURED_ROWS = sorted({row["row"] for row in MEASURED})


@cache
def spec_of_row(op: str, m: int, n: int, k: int):
    func, _ = fuse(from_relax(OPS[op].relax_module(m, n, k)), parse_target("h200"), form="fused")
    (cluster,) = (func for _, func in func.functions_items() if is_cluster(func))
    return analyze(cluster)


def predicted(row: dict[str, Any]) -> float:
    spec = spec_of_row(row["op"], row["M"], row["N"], row["K"])
    return estimate(Plan.from_dict(row["plan"]), spec, H200).total


def test_close_to_the_measured_plans() -> None:
    errors = [abs(predicted(row) / row["us"] - 1) for row in MEASURED]
    assert sum(errors) / len(errors) < 0.08
    assert sorted(errors)[len(errors) * 9 // 10] < 0.15


def warm(row: dict[str, Any]) -> float:
    """Microseconds of the last measurement: the first ones were taken while the board grew warm, one plan after the other."""
    return row.get("again", row["us"])


@pytest.mark.parametrize("name", MEASURED_ROWS)
def test_prefers_a_plan_that_measured_well(name: str) -> None:
    rows = [row for row in MEASURED if row["row"] == name]
    assert warm(min(rows, key=predicted)) <= 1.06 * min(map(warm, rows))


@pytest.mark.parametrize("name", MEASURED_ROWS)
def test_the_default_is_no_plan_that_measured_badly(name: str) -> None:
    rows = [row for row in MEASURED if row["row"] == name and not row["plan"]["fast_math"]]
    first = rows[0]
    default = default_plan(spec_of_row(first["op"], first["M"], first["N"], first["K"]), H200)
    assert isinstance(default, Plan)
    for row in rows:
        assert Plan.from_dict(row["plan"]) != default or warm(row) <= 1.06 * min(map(warm, rows))


def test_an_account_has_the_estimate_and_counts_bytes() -> None:
    # 128 x 256 tiles: 128 rows of them, four to a row; x and w [16384, 1024] and [1024, 1024], residual and result
    plan = replace(COOP, exchange="grid", cluster_m=1, ctas=132)
    found = account(plan, SPEC, H200)
    assert found.estimate == estimate(plan, SPEC, H200)
    assert found.tiles == 4
    assert found.l2_bytes == 128 * 4 * (128 + 256) * 1024 * 2
    assert found.memory_bytes == 2 * (3 * 16384 * 1024 + 1024 * 1024)
    shared = replace(plan, cluster_m=2, cluster_n=2, share_a=True, ctas=120)
    assert account(shared, SPEC, H200).l2_bytes == 128 * 4 * (64 + 128) * 1024 * 2
    assert found.to_dict()["total"] == found.estimate.total
    total, parts = found.lines
    assert total.startswith(f"estimate {found.estimate.total:.1f} us for 16384 rows: 4 tiles a CTA at most, 402.7 MB")
    assert parts.startswith(f"fill {found.estimate.fill:.1f}, product {found.estimate.product:.1f}, ")


def test_global_operands_cost_more() -> None:
    assert stage_time(replace(PING, operands=("global",)), SPEC) > stage_time(PING, SPEC)


def test_memory_bound() -> None:
    assert bytes_moved(SPEC) == 2 * (16384 * 1024 * 3 + 1024 * 1024)
    assert estimate(PING, SPEC, H200).memory == pytest.approx(bytes_moved(SPEC) / 4.3e6)
    assert estimate(PING, SPEC, H100).memory > estimate(PING, SPEC, H200).memory


def test_pingpong_hides_latencies_behind_a_long_main_loop_but_no_instructions() -> None:
    hidden = estimate(PING, SPEC, H200)
    steps = tiles_of_cta(PING, SPEC)
    assert hidden.exposed == pytest.approx((steps - 1) * stage_time(PING, SPEC))
    assert estimate(COOP, SPEC, H200).exposed > (tiles_of_cta(COOP, SPEC) - 1) * stage_time(COOP, SPEC)


def test_a_deferred_tail_hides_the_exchange_and_costs_conversions() -> None:
    direct = replace(COOP, cluster_m=1, ctas=132, operands=("global",), store=("global",), w_order="quads")
    deferred = replace(direct, defer=True)
    assert stage_time(deferred, SPEC) > stage_time(direct, SPEC)
    assert estimate(deferred, SPEC, H200).exposed < estimate(direct, SPEC, H200).exposed
    assert estimate(deferred, SPEC, H200).tail > estimate(direct, SPEC, H200).tail
    # with one step there is no main loop to defer anything to
    few = replace(SPEC, m=128)
    assert estimate(deferred, few, H200).total > estimate(direct, few, H200).total


def test_eight_neighbours_cost_less_than_two() -> None:
    direct = replace(COOP, operands=("global",), store=("global",))
    assert stage_time(replace(direct, w_order="quads"), SPEC) < stage_time(direct, SPEC)


def test_more_groups_hide_what_does_not_fit_into_one_main_loop() -> None:
    spec = spec_of("layer_norm", 16384, 512, 64)
    two = replace(PING, tile_n=128, cluster_m=1, ctas=132, pipeline_depth=6, w_resident=True)
    estimates = [estimate(replace(two, mma_groups=groups), spec, H200) for groups in (2, 3, 4)]
    exposed = [e.exposed for e in estimates]
    assert exposed == sorted(exposed, reverse=True)
    assert exposed[1] < exposed[0]
    assert min(exposed) >= (tiles_of_cta(two, spec) - 1) * stage_time(two, spec)
    assert estimates[1].total < estimates[0].total


def test_multicast_does_not_lower_what_arrives() -> None:
    deep = replace(PING, tile_m=128, tile_n=128, pipeline_depth=8)
    single = estimate(replace(deep, cluster_m=1), SPEC, H200)
    assert estimate(deep, SPEC, H200).loads == single.loads
    assert estimate(deep, SPEC, H200).total > single.total


def test_a_resident_w_is_loaded_once() -> None:
    spec = spec_of("layer_norm", 16384, 512, 512)
    # so many slots that bandwidth decides, not latency
    ring = replace(PING, tile_n=128, cluster_m=1, ctas=132, pipeline_depth=16)
    in_ring, resident = (estimate(replace(ring, w_resident=stays), spec, H200) for stays in (False, True))
    assert resident.fill - in_ring.fill == pytest.approx(128 * 512 * 2 / (H200.l2_to_sm_gbps * 1e3 / H200.sms))
    assert resident.loads < in_ring.loads
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
    assert {plan.layout for plan in plans} == {"pingpong", "cooperative", "memory"}
    assert {plan.cluster_m for plan in plans} == {1, 2}
    assert {(plan.tile_m, plan.tile_n) for plan in plans} >= {(64, 64), (64, 256), (128, 128)}
    assert any(plan.operands == ("global",) for plan in plans)
    assert {plan.layout for plan in plans if plan.w_resident} == {"pingpong", "cooperative", "memory"}
    assert {plan.cluster_m for plan in plans if plan.w_resident} == {1}
    assert {(plan.layout, plan.mma_groups) for plan in plans if plan.w_resident} == {
        ("cooperative", 2),
        ("memory", 2),
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
