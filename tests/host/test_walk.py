"""CTAs that take turns at all tiles: numbers, which plans may, and rows of any length."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import tvm
from tvm import relax
from verified_kernels import assert_right

from tvm_comfuse.bench.ops import OPS
from tvm_comfuse.frontend import from_relax
from tvm_comfuse.fusion import fuse
from tvm_comfuse.refusal import Refusal
from tvm_comfuse.relay_patterns import discover
from tvm_comfuse.schedules.analysis import analyze
from tvm_comfuse.schedules.choose import candidates, default_plan
from tvm_comfuse.schedules.co_residency import row_length
from tvm_comfuse.schedules.cost import tiles_of_cta
from tvm_comfuse.schedules.device import H200
from tvm_comfuse.schedules.legality import legality
from tvm_comfuse.schedules.plan import Plan
from tvm_comfuse.schedules.walk import band_parts
from tvm_comfuse.target import parse_target
from tvm_comfuse.tir_passes.lower import is_cluster, lower
from tvm_comfuse.tuning.space import Space
from tvm_comfuse.verify.api import verify_kernel
from tvm_comfuse.verify.dynamic import compare, random_inputs
from tvm_comfuse.verify.interpreter import Program
from tvm_comfuse.verify.reference import reference

PLAN = Plan(64, 64, 64, 2, "cooperative", 2, 1, "none", 1, 1, 3, ("tma",), ("tma",), walk="tiles")
QUADS = {"operands": ("global",), "store": ("global",), "w_order": "quads"}


def model(m: int | None, n: int, k: int, bias: bool = False) -> tvm.IRModule:
    """silu(x w + b) + r"""
    builder = relax.BlockBuilder()
    op, emit = relax.op, builder.emit
    rows = tvm.tirx.Var("m", "int64") if m is None else m
    shapes = {"x": (rows, k), "w": (n, k), "r": (rows, n), **({"b": (n,)} if bias else {})}
    params = [relax.Var(name, relax.TensorType(shape, "bfloat16")) for name, shape in shapes.items()]
    x, w, r, *rest = params
    with builder.function("main", params):
        with builder.dataflow():
            value = emit(op.matmul(x, emit(op.permute_dims(w))))
            value = emit(op.add(value, rest[0])) if bias else value
            result = builder.emit_output(op.add(emit(op.nn.silu(value)), r))
        builder.emit_func_output(result)
    return builder.get()


def function(module: tvm.IRModule, plan: Plan | None = None) -> Any:
    module, target = from_relax(module), parse_target("h200")
    (matmul,) = discover(module).matmuls
    fused, _ = fuse(module, target, {} if plan is None else {matmul.name: plan})
    (func,) = (func for _, func in fused.functions_items() if is_cluster(func))
    return func


@pytest.mark.parametrize("slow", [None, "cta0", "load"])
@pytest.mark.parametrize(
    ("plan", "m", "n"),
    [
        # five columns of tiles: bands of one, two, two and one, all
        (PLAN, 300, 320),
        (replace(PLAN, ctas=5), 300, 328),
        (replace(PLAN, tile_n=96, ctas=8, **QUADS), 300, 480),
        (replace(PLAN, ctas=16), 129, 320),
        (replace(PLAN, layout="pingpong", groups_m=1), 300, 320),
        (replace(PLAN, cluster_m=2, ctas=4), 640, 320),
        (replace(PLAN, cluster_m=2, ctas=6), 300, 320),
    ],
    ids=["one", "two_ragged", "quads", "all", "pingpong", "multicast", "multicast_uneven"],
)
def test_every_tile_once(plan: Plan, m: int, n: int, slow: str | None) -> None:
    func = function(model(m, n, 128), plan)
    assert_right(func, m, 1, slow)


def test_one_program_runs_with_any_number_of_rows() -> None:
    func = function(model(None, 320, 128), replace(PLAN, ctas=5))
    program = Program(lower(func, "kernel"))
    for m in (1, 64, 129, 700):
        inputs = random_inputs(func, m, 1, seed=m)
        result = program.run(inputs)
        assert not result.findings, result.findings[0]
        assert compare(result.outputs, reference(func, inputs)) == []


def test_its_twin_is_verified() -> None:
    plan = replace(PLAN, tile_n=256, pipeline_depth=4, ctas=132, **QUADS)
    result = verify_kernel("wide", function(model(8192, 5120, 512), plan), H200, seeds=(0,))
    assert result.findings == ()
    assert result.interleavings > 3


def test_bands_are_about_square_and_even() -> None:
    spec = analyze(function(model(8192, 5120, 512)))
    plan = replace(PLAN, tile_n=256, ctas=132)
    # of 20 columns of tiles 128 x 256; 8 x 16 tiles at a time would be square
    assert band_parts(plan, spec) == 7
    assert band_parts(replace(plan, groups_m=1, groups_n=2), spec) == 4
    assert band_parts(replace(plan, ctas=1), spec) == 1
    # 64 x 20 tiles on 132 SMs, of which whole rows would leave 12 without work
    assert tiles_of_cta(plan, spec) == 10
    assert tiles_of_cta(replace(plan, walk="columns", ctas=120), spec) == 11


@pytest.mark.parametrize(
    ("change", "code"),
    [({"walk": "rows"}, "unknown-word"), ({"w_resident": True}, "walk-vectors"), ({"cluster_m": 2}, "grid-step")],
)
def test_one_change_is_refused(change: dict[str, Any], code: str) -> None:
    spec = analyze(function(model(300, 320, 128)))
    assert legality(PLAN, spec, H200) == []
    assert code in [refusal.code for refusal in legality(replace(PLAN, **change), spec, H200)]


def test_reductions_and_vectors_keep_their_columns() -> None:
    spec = analyze(function(model(300, 320, 128, bias=True)))
    assert [refusal.code for refusal in legality(PLAN, spec, H200)] == ["walk-vectors"]
    assert {plan.walk for plan in candidates(spec, H200)} == {"columns"}
    spec = analyze(function(OPS["rms_norm"].relax_module(300, 320, 128)))
    assert "walk-reductions" in [refusal.code for refusal in legality(PLAN, spec, H200)]


def test_tuning_looks_at_both_walks() -> None:
    spec = analyze(function(model(300, 320, 128)))
    # without measuring, a CTA that may take turns does, unless it keeps its part of W
    assert {(plan.walk, plan.w_resident) for plan in candidates(spec, H200)} == {("tiles", False), ("columns", True)}
    space = Space.of(spec, H200)
    assert isinstance(space, Space)
    assert {plan.walk for plan in space.legal} == {"columns", "tiles"}


def test_a_vocabulary_is_one_row() -> None:
    """More columns than all CTAs hold at once are no limit where they take turns."""
    spec = analyze(function(model(64, 256000, 128)))
    assert list(row_length(spec, H200)) == []
    plan = default_plan(spec, H200)
    assert not isinstance(plan, Refusal)
    assert plan.walk == "tiles"
    assert legality(plan, spec, H200) == []
    _, explanation = fuse(from_relax(model(64, 256000, 128, bias=True)), parse_target("h200"))
    assert explanation.matmuls[0].plan is None
    assert "67584" in str(explanation.matmuls[0].reason)


def test_a_vocabulary_without_its_softmax() -> None:
    _, explanation = fuse(from_relax(OPS["softcap_softmax"].relax_module(64, 70_000, 128)), parse_target("h200"))
    (matmul,) = explanation.matmuls
    assert matmul.fused
    assert [line for line in matmul.ends if line.startswith("ends at its row reductions: N is at most 67584")]
