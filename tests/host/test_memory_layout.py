"""The memory layout: MMA warp groups that only multiply, and a memory warp group that runs the stages of their tiles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tvm import relax
from verified_kernels import assert_right

from tvm_comfuse.bench.ops import OPS
from tvm_comfuse.frontend import from_relax
from tvm_comfuse.fusion import fuse
from tvm_comfuse.relay_patterns import discover
from tvm_comfuse.schedules.analysis import analyze
from tvm_comfuse.schedules.choose import candidates, default_plan
from tvm_comfuse.schedules.cost import EXCHANGE_US, MEMORY_TILE_US, estimate
from tvm_comfuse.schedules.device import H200
from tvm_comfuse.schedules.footprint import shared_memory
from tvm_comfuse.schedules.legality import legality
from tvm_comfuse.schedules.plan import Plan
from tvm_comfuse.schedules.registers import REGISTER_FILE, entry_registers, role_registers
from tvm_comfuse.schedules.spec import rounds
from tvm_comfuse.target import parse_target
from tvm_comfuse.tir_passes.lower import is_cluster, lower
from tvm_comfuse.tuning.database.record import structure_of
from tvm_comfuse.tuning.space import Space
from tvm_comfuse.verify.api import verify_kernel
from tvm_comfuse.verify.static.index import index_of

QUADS = {"operands": ("global",), "store": ("global",), "w_order": "quads"}
GRID = Plan(64, 128, 64, 2, "memory", 2, 1, "grid", 1, 1, 2, **QUADS)
STAGED = replace(GRID, tile_n=64, exchange="cluster", cluster_n=2, operands=("tma",), store=("tma",), w_order="rows")


def function(op: str, m: int | None, n: int, k: int, plan: Plan | None = None, dtype: str = "bfloat16") -> Any:
    module, target = from_relax(OPS[op].relax_module(m, n, k, dtype)), parse_target("h200")
    (matmul,) = discover(module).matmuls
    fused, _ = fuse(module, target, {} if plan is None else {matmul.name: plan})
    (func,) = (func for _, func in fused.functions_items() if is_cluster(func))
    return func


@pytest.mark.parametrize("slow", [None, "wg3"])
@pytest.mark.parametrize(
    ("plan", "op", "m", "n", "k"),
    [
        (GRID, "layer_norm", 384, 256, 192),
        (replace(GRID, exchange="cluster", cluster_n=2, packed_tail=True), "layer_norm", 300, 224, 192),
        (replace(GRID, w_resident=True), "layer_norm", 384, 256, 192),
        (replace(GRID, tile_m=128, tile_n=64, pipeline_depth=3, ctas=4), "layer_norm", 500, 256, 192),
        (replace(GRID, exchange="none", tile_n=96, ctas=3, walk="tiles"), "gated", 300, 320, 192),
        (replace(GRID, defer=True, packed_tail=True), "layer_norm", 384, 256, 192),
        (replace(GRID, defer=True, exchange="cluster", cluster_n=2), "rms_norm", 300, 224, 192),
        (STAGED, "layer_norm", 300, 120, 136),
        (replace(STAGED, exchange="warp", cluster_n=1, ctas=1), "rms_norm", 300, 64, 64),
    ],
    ids=["grid", "cluster_packed", "resident", "tall", "in_turn", "deferred", "deferred_cluster", "staged", "warp"],
)
def test_numbers_and_protocol(plan: Plan, op: str, m: int, n: int, k: int, slow: str | None) -> None:
    assert_right(function(op, m, n, k, plan), m, 1, slow)


@pytest.mark.parametrize(
    ("dtype", "n", "change"),
    [
        ("bfloat16", 2304, {"tile_n": 192, "pipeline_depth": 4, "ctas": 132}),
        ("float16", 2048, {"tile_n": 128, "pipeline_depth": 5, "ctas": 128}),
    ],
    ids=["gemma2", "olmo2"],
)
def test_twin_of_a_large_kernel_is_verified(dtype: str, n: int, change: dict[str, Any]) -> None:
    plan = replace(GRID, packed_tail=True, dependent_launch=True, defer=True, **change)
    result = verify_kernel("o", function("rms_norm", 8192, n, 2048, plan, dtype), H200, seeds=(0,))
    assert result.findings == ()
    assert result.interleavings > 3


def test_a_function_of_what_was_handed_over_has_the_tolerance_for_it() -> None:
    """30 tanh(v / 30) under an exponential: rounding v costs more than rounding the result."""
    plan = replace(GRID, operands=(), packed_tail=False)
    result = verify_kernel("softmax", function("softcap_softmax", 384, 256, 192, plan), H200, seeds=(0,))
    assert result.findings == ()


def test_roles_have_the_registers_of_the_cta() -> None:
    roles = role_registers(2, hands_over=True)
    assert 128 * (roles.producer + 2 * roles.mma + roles.memory) <= 512 * entry_registers(512) <= REGISTER_FILE
    assert roles.producer < entry_registers(512) <= roles.mma < roles.memory
    index = index_of(lower(function("layer_norm", 384, 256, 192, GRID), "kernel"))
    given = {int(instruction.args[0]) for instruction in index.named("setmaxnreg")}
    assert given == {roles.producer, roles.mma, roles.memory}
    assert index.threads == GRID.threads == 512


def test_what_is_handed_over_takes_shared_memory() -> None:
    spec = analyze(function("layer_norm", 384, 256, 192))
    assert shared_memory(GRID, spec)["handover"] == 2 * 64 * 128 * 2
    assert shared_memory(replace(GRID, layout="cooperative"), spec)["handover"] == 0


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"groups_m": 1, "groups_n": 2}, "groups"),
        ({"mma_groups": 3}, "mma-groups"),
        ({"tile_n": 256}, "accumulators"),
        ({"defer": True, "operands": ("tma",), "w_order": "rows"}, "defer-placement"),
    ],
)
def test_one_change_is_refused(change: dict[str, Any], code: str) -> None:
    spec = analyze(function("layer_norm", 384, 256, 576))
    assert legality(GRID, spec, H200) == []
    assert code in [refusal.code for refusal in legality(replace(GRID, **change), spec, H200)]


def test_full_precision_is_not_handed_over() -> None:
    module = from_relax(OPS["layer_norm"].relax_module(384, 256, 192, out_dtype="float32"))
    fused, _ = fuse(module, parse_target("h200"))
    (func,) = (func for _, func in fused.functions_items() if is_cluster(func))
    assert "handover-dtype" in [refusal.code for refusal in legality(GRID, analyze(func), H200)]


@pytest.mark.parametrize("product", ["bfloat16", "float32"])
def test_a_product_that_the_model_keeps_in_float32_is_not_handed_over(product: str) -> None:
    """Its norm may subtract a large mean: what eager PyTorch does not lose, a kernel must not lose."""
    x, w = (
        relax.Var(name, relax.TensorType(shape, "bfloat16")) for name, shape in (("x", (384, 192)), ("w", (256, 192)))
    )
    builder = relax.BlockBuilder()
    with builder.function("main", [x, w]):
        with builder.dataflow():
            value = builder.emit(relax.op.matmul(x, builder.emit(relax.op.permute_dims(w)), out_dtype=product))
            value = builder.emit(relax.op.subtract(value, builder.emit(relax.op.max(value, axis=[1], keepdims=True))))
            out = builder.emit_output(value if product == "bfloat16" else relax.op.astype(value, "bfloat16"))
        builder.emit_func_output(out)
    fused, _ = fuse(from_relax(builder.finalize()), parse_target("h200"))
    (func,) = (func for _, func in fused.functions_items() if is_cluster(func))
    spec = analyze(func)
    assert spec.wide_product == (product == "float32")
    plan = replace(GRID, operands=())
    assert [refusal.code for refusal in legality(plan, spec, H200)] == ["handover-product"] * spec.wide_product
    assert any(plan.hands_over for plan in candidates(spec, H200)) != spec.wide_product
    # records of clusters from before the difference was made go on to answer
    assert (structure_of(spec) == structure_of(replace(spec, wide_product=False))) != spec.wide_product


def test_long_main_loops_of_many_parts_take_it_unmeasured() -> None:
    """gemma2_2b_o: twelve tiles of 192 columns fill 132 SMs, and two tiles take the memory warp group less than a main loop."""
    spec = analyze(function("rms_norm", 8192, 2304, 2048))
    plan = default_plan(spec, H200)
    assert isinstance(plan, Plan)
    assert (plan.layout, plan.tile_n, plan.ctas, plan.defer) == ("memory", 192, 132, True)


def test_each_round_in_front_of_the_last_is_waited_for() -> None:
    """Two dependent norms: a tile takes the one memory warp group as long as both exchanges."""
    value = analyze(function("rms_norm", 8192, 2304, 2048))
    twice = replace(value, stages=(value.stages[0], *value.stages))
    plan = replace(GRID, tile_n=192, pipeline_depth=4, ctas=132, defer=True)
    assert len(rounds(twice)) == len(rounds(value)) + 1
    one, two = (estimate(plan, spec, H200).tail for spec in (value, twice))
    assert two - one > 2 * EXCHANGE_US["grid"]
    elementwise = analyze(function("gated", 1024, 768, 768))
    none = estimate(replace(GRID, exchange="none", ctas=6), elementwise, H200).tail
    assert none > 2 * MEMORY_TILE_US[False]


def test_tuning_looks_at_it_where_there_are_row_values() -> None:
    space = Space.of(analyze(function("rms_norm", 1024, 768, 768)), H200)
    assert isinstance(space, Space)
    assert {plan.layout for plan in space.legal} == {"pingpong", "cooperative", "memory"}
    elementwise = analyze(function("gated", 1024, 768, 768))
    assert "memory" not in {plan.layout for plan in candidates(elementwise, H200)}
