"""The split form: what the two functions are, what they compute, and when they are taken."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tvm
from database_examples import commit, function
from tvm import relax

import tvm_comfuse
from tvm_comfuse.bench.ops import OPS
from tvm_comfuse.bench.ours import Records, compile_executable
from tvm_comfuse.bench.suites import Row, load
from tvm_comfuse.cuda import compile_cubin, sources
from tvm_comfuse.errors import LoweringError, PlanError
from tvm_comfuse.forms import ESTIMATES, FUSED, MEASURED, SPLIT, make_split
from tvm_comfuse.frontend import from_relax
from tvm_comfuse.fusion import fuse
from tvm_comfuse.refusal import Refusal
from tvm_comfuse.relay_patterns import discover
from tvm_comfuse.relay_patterns.split_form import SplitForm, split_form
from tvm_comfuse.schedules.device import H200
from tvm_comfuse.schedules.rows import (
    CHUNK,
    LANES,
    analyze_rows,
    rows_estimate,
    rows_plan,
    schedule_rows,
    with_rows_plan,
)
from tvm_comfuse.schedules.spec import RowsSpec, analyze
from tvm_comfuse.target import parse_target
from tvm_comfuse.tir_passes.lower import lower
from tvm_comfuse.tuning.database import Database
from tvm_comfuse.verify.api import verify_kernel
from tvm_comfuse.verify.dynamic import compare, random_inputs
from tvm_comfuse.verify.interpreter import Program
from tvm_comfuse.verify.numeric import check
from tvm_comfuse.verify.reference import reference
from tvm_comfuse.verify.static import check as static_check

#: operators with a row reduction
REDUCING = ("layer_norm", "rms_norm", "ln_relu", "rms", "softcap_softmax")
SUITES = [row for rows in load().values() for row in rows]
TARGET = parse_target("h200")


def form_of(module: tvm.IRModule) -> SplitForm:
    """Of the only cluster of a module."""
    (cluster,) = discover(from_relax(module)).clusters
    return split_form(cluster)


def parameters(func: tvm.tirx.PrimFunc) -> list[str]:
    return [str(param.name) for param in func.params]


# --- the functions ---------------------------------------------------------------------------------------------------


def test_what_is_added_before_the_first_reduction_is_the_products() -> None:
    form = form_of(OPS["layer_norm"].relax_module(64, 128, 32))
    gemm, rows = analyze(form.gemm.func), analyze_rows(form.rows.func)
    assert gemm.kind == "gemm_elementwise"
    assert [operand.kind for operand in gemm.operands] == ["tile", "col"]
    assert parameters(form.rows.func) == ["v", "col_0", "col_1", "stage_2_out0"]
    assert [operand.kind for operand in rows.operands] == ["tile", "col", "col"]
    assert [reduction.merge for reduction in rows.reductions] == [None, "moments"]


def test_a_value_that_half_precision_would_spoil_stays_in_the_rows_function() -> None:
    """30 tanh(v / 30) is near 30 where v is large: rounded, its exponential would be wrong by a sixteenth."""
    form = form_of(OPS["softcap_softmax"].relax_module(64, 128, 32))
    assert not analyze(form.gemm.func).stages[0].operations
    assert analyze_rows(form.rows.func).stages[0].carried == "stage_0"


def norm_of(dtype: str, product: str, residual: str, also: bool = False) -> tvm.IRModule:
    """softmax(x w + r) over the row; with `also` the sum is a result as well."""
    tensors = {"x": (8, 16, dtype), "w": (16, 64, dtype), "r": (8, 64, residual)}
    x, w, r = (relax.Var(name, relax.TensorType((m, n), kind)) for name, (m, n, kind) in tensors.items())
    builder = relax.BlockBuilder()
    with builder.function("main", [x, w, r]):
        with builder.dataflow():
            value = builder.emit(relax.op.matmul(x, w, out_dtype=product))
            if product != residual:
                value = builder.emit(relax.op.astype(value, residual))
            total = builder.emit(relax.op.add(value, r))
            out = builder.emit_output(relax.op.nn.softmax(total))
            results = [out, builder.emit_output(total)] if also else [out]
        builder.emit_func_output(relax.Tuple(results) if also else out)
    return builder.finalize()


@pytest.mark.parametrize(
    ("product", "residual", "between", "operands"),
    [
        ("bfloat16", "bfloat16", "bfloat16", 1),
        ("bfloat16", "float32", "bfloat16", 0),
        ("float32", "float32", "float32", 1),
    ],
)
def test_the_value_between_is_rounded_where_the_model_rounds(
    product: str, residual: str, between: str, operands: int
) -> None:
    form = form_of(norm_of("bfloat16", product, residual))
    assert str(form.rows.func.params[0].dtype) == between
    assert len(form.gemm.operands) == operands


def test_a_result_that_is_there_anyhow_is_the_value_between() -> None:
    form = form_of(norm_of("bfloat16", "bfloat16", "bfloat16", also=True))
    assert len(form.gemm.outputs) == 1
    assert form.gemm.outputs[0].vars


def test_a_rows_function_is_no_cluster() -> None:
    form = form_of(OPS["rms"].relax_module(64, 128, 32))
    with pytest.raises(LoweringError, match="gemm"):
        analyze(form.rows.func)
    with pytest.raises(LoweringError, match="without a product"):
        analyze_rows(form.gemm.func)
    with pytest.raises(PlanError, match="schedule_rows"):
        lower(form.rows.func.with_attr("comfuse.rows", ""))


# --- plans of rows functions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [8, 72, 512, 768, 1000, 2304, 5120, 16384, 32768])
@pytest.mark.parametrize("m", [1, 300, 16384, None])
def test_a_row_fits_its_lanes(m: int | None, n: int) -> None:
    plan = rows_plan(RowsSpec(m, n, (), ()), H200)
    assert not isinstance(plan, Refusal)
    width = plan.warps * LANES * CHUNK
    assert (plan.chunks - 1) * width < n <= plan.chunks * width
    assert plan.threads % 128 == 0
    assert plan.threads <= 512
    assert m is None or plan.ctas * plan.rows >= m


@pytest.mark.parametrize("n", [12, 32776])
def test_a_row_that_does_not_fit_is_refused_with_the_number(n: int) -> None:
    refusal = rows_plan(RowsSpec(64, n, (), ()), H200)
    assert isinstance(refusal, Refusal)
    assert str(n) in str(refusal)


def test_few_rows_are_spread_over_more_warps() -> None:
    few, many = (rows_plan(RowsSpec(m, 1024, (), ()), H200) for m in (256, 16384))
    assert not isinstance(few, Refusal)
    assert not isinstance(many, Refusal)
    assert few.warps > many.warps


# --- kernels ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", SUITES, ids=lambda row: row.label)
def test_rows_kernels_of_the_suites_spill_nothing_and_load_16_bytes(row: Row) -> None:
    form = form_of(OPS[row.op].relax_module(row.M, row.N, row.K, row.dtype))
    func = schedule_rows(form.rows.func, H200)
    assert not isinstance(func, Refusal)
    (source,) = sources(compile_executable(func, TARGET))
    report = compile_cubin(source, "sm_90a")
    assert report.registers > 0
    assert (report.spill_stores, report.spill_loads, report.warnings) == (0, 0, ())
    # each tensor is moved once, by every lane one access for each of its chunks
    plan, tiles = rows_plan(analyze_rows(func), H200), len(analyze_rows(func).tile_operands)
    assert not isinstance(plan, Refusal)
    body = source[source.index("main_kernel(") :]
    assert body.count("st_vec_global_v4") == plan.chunks
    columns = len(analyze_rows(func).col_operands)
    assert body.count("ld_vec_global_v4") == plan.chunks * (tiles + columns)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("m", "n"), [(9, 768), (5, 2304), (7, 1000), (21, 72), (None, 264), (3, 5120)])
@pytest.mark.parametrize("op", REDUCING)
def test_rows_kernels_are_right(op: str, m: int | None, n: int, dtype: str) -> None:
    func = form_of(OPS[op].relax_module(m, n, 16, dtype)).rows.func
    spec = analyze_rows(func)
    plan = rows_plan(spec, H200, ctas=2)
    assert not isinstance(plan, Refusal)
    kernel = lower(with_rows_plan(func, plan), "kernel")
    assert static_check(kernel, H200) == []
    inputs = random_inputs(func, m or 13, len(spec.outputs), seed=n)
    result = Program(kernel).run(inputs, seed=1)
    assert not result.findings, result.findings[0]
    assert compare(result.outputs, reference(func, inputs)) == []


def rows_of(build: Any) -> Any:
    """The rows function of a model: build(emit, value) makes the results of a product [12, 264]."""
    x, w, r, s = (
        relax.Var(name, relax.TensorType(shape, dtype))
        for name, shape, dtype in (
            ("x", (12, 16), "bfloat16"),
            ("w", (16, 264), "bfloat16"),
            ("r", (12, 264), "float32"),
            ("s", (12, 1), "float32"),
        )
    )
    builder = relax.BlockBuilder()
    with builder.function("main", [x, w, r, s]):
        with builder.dataflow():
            value = builder.emit(relax.op.astype(builder.emit(relax.op.matmul(x, w)), "float32"))
            results = [builder.emit_output(each) for each in build(builder.emit, value, r, s)]
        builder.emit_func_output(relax.Tuple(results))
    return form_of(builder.finalize()).rows.func


def _two_outputs(emit: Any, value: Any, r: Any, s: Any) -> list[Any]:
    op = relax.op
    top = emit(op.max(value, axis=[-1], keepdims=True))
    shifted = emit(op.subtract(emit(op.add(value, r)), emit(op.multiply(top, s))))
    return [op.astype(shifted, "float16"), op.nn.softmax(shifted), top]


def _norm_of_softmax(emit: Any, value: Any, r: Any, s: Any) -> list[Any]:
    op = relax.op
    weights = emit(op.nn.softmax(emit(op.multiply(value, s))))
    mean = emit(op.mean(emit(op.multiply(weights, r)), axis=[-1], keepdims=True))
    return [op.divide(weights, emit(op.add(emit(op.abs(mean)), relax.const(1.0, "float32"))))]


@pytest.mark.parametrize("build", [_two_outputs, _norm_of_softmax])
@pytest.mark.parametrize("warps", [1, 4])
def test_several_outputs_wide_operands_and_dependent_reductions(build: Any, warps: int) -> None:
    func = rows_of(build)
    plan = rows_plan(analyze_rows(func), H200, ctas=2)
    assert not isinstance(plan, Refusal)
    plan = dataclasses.replace(plan, warps=warps, chunks=-(-264 // (warps * LANES * CHUNK)), rows=4 // warps)
    kernel = lower(with_rows_plan(func, plan), "kernel")
    assert static_check(kernel, H200) == []
    inputs = random_inputs(func, 12, len(analyze_rows(func).outputs), seed=3)
    result = Program(kernel).run(inputs, seed=2)
    assert not result.findings, result.findings[0]
    assert compare(result.outputs, reference(func, inputs)) == []


def test_nan_and_infinity_stay_in_their_rows() -> None:
    func = form_of(OPS["softcap_softmax"].relax_module(8, 72, 16)).rows.func
    (value,) = random_inputs(func, 8, 1, seed=0)
    value[1, 5] = np.nan
    plan = rows_plan(analyze_rows(func), H200)
    assert not isinstance(plan, Refusal)
    (out,) = Program(lower(with_rows_plan(func, plan), "kernel")).run([value]).outputs.values()
    bad = np.isnan(out.astype(np.float64)).any(axis=1)
    assert bad.tolist() == [row == 1 for row in range(8)]


@pytest.mark.parametrize("op", ["layer_norm", "softcap_softmax"])
def test_verify_takes_both_kernels(op: str) -> None:
    fused, _ = fuse(from_relax(OPS[op].relax_module(None, 1000, 64)), TARGET, form=SPLIT)
    names = {gvar.name_hint: func for gvar, func in fused.functions_items() if isinstance(func, tvm.tirx.PrimFunc)}
    assert sorted(names) == ["comfuse_gemm_elementwise", "comfuse_rows"]
    report = verify_kernel("rows", names["comfuse_rows"], H200, seeds=(0, 1))
    assert report.passed, (report.findings, report.unsupported)
    assert report.interleavings > 2
    assert report.shape == ("symbolic", 1000)


# --- numbers of the whole form ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("m", [50, None])
@pytest.mark.parametrize("op", REDUCING)
def test_split_models_are_as_exact_as_pytorch(op: str, m: int | None, dtype: str) -> None:
    compiled = tvm_comfuse.compile(OPS[op].relax_module(m, 136, 64, dtype), "llvm", form=SPLIT)
    (matmul,) = compiled.explanation.matmuls  # type: ignore[union-attr]
    assert matmul.forms is not None
    assert matmul.forms.chosen == SPLIT
    inputs = OPS[op].make_inputs(50, 136, 64, dtype, seed=4)
    report = check(compiled.run(*inputs), OPS[op].exact(inputs), OPS[op].eager(*inputs))
    assert report.passed, report


def test_a_result_before_the_reduction_keeps_its_shape() -> None:
    """[2, 4, 64] results: the sum, which the product's kernel gives, and its softmax."""
    tensors = {"x": (2, 4, 16), "w": (16, 64), "r": (2, 4, 64)}
    x, w, r = (relax.Var(name, relax.TensorType(shape, "bfloat16")) for name, shape in tensors.items())
    builder = relax.BlockBuilder()
    with builder.function("main", [x, w, r]):
        with builder.dataflow():
            total = builder.emit_output(relax.op.add(builder.emit(relax.op.matmul(x, w)), r))
            out = builder.emit_output(relax.op.nn.softmax(total))
        builder.emit_func_output(relax.Tuple([out, total]))
    torch.manual_seed(0)
    inputs = [torch.randn(shape).bfloat16() for shape in tensors.values()]
    got = tvm_comfuse.compile(builder.finalize(), "llvm", form=SPLIT).run(*inputs)
    exact = inputs[0].double() @ inputs[1].double() + inputs[2].double()
    eager = inputs[0] @ inputs[1] + inputs[2]
    for found, expected, other in zip(got, (exact.softmax(-1), exact), (eager.softmax(-1), eager), strict=True):
        assert found.shape == expected.shape
        assert check(found, expected, other).passed


# --- which form is taken ---------------------------------------------------------------------------------------------


def test_the_faster_form_is_taken_and_both_times_are_told() -> None:
    big = tvm_comfuse.explain(OPS["layer_norm"].relax_module(16384, 1024, 1024))
    (matmul,) = big.matmuls
    assert matmul.fused
    assert matmul.forms is not None
    assert (matmul.forms.chosen, matmul.forms.basis) == (FUSED, ESTIMATES)
    assert matmul.forms.fused_us is not None
    assert matmul.forms.fused_us <= matmul.forms.split_us
    assert matmul.forms.times in str(big)


def test_either_form_can_be_asked_for() -> None:
    module = from_relax(OPS["layer_norm"].relax_module(256, 1024, 1024))
    chosen = {}
    for form in (FUSED, SPLIT):
        _, explanation = fuse(module, TARGET, form=form)
        (matmul,) = explanation.matmuls
        chosen[form] = matmul
        assert matmul.forms is not None
        assert matmul.forms.chosen == form
        assert matmul.fused is (form == FUSED)
    assert chosen[SPLIT].plan is None
    assert chosen[SPLIT].reason.code == "split"
    assert "asked for" in str(chosen[SPLIT].reason)
    assert chosen[SPLIT].to_dict()["forms"]["split"]["rows"]["warps"] > 0
    # a given plan is a wish for the fused form
    plan = chosen[FUSED].plan
    assert plan is not None
    assert fuse(module, TARGET, {chosen[FUSED].name: plan}, form=SPLIT)[1].matmuls[0].plan == plan
    with pytest.raises(PlanError, match="auto, fused, split"):
        fuse(module, TARGET, form="both")


def test_a_cluster_without_reductions_has_one_form() -> None:
    (matmul,) = fuse(from_relax(OPS["bias_gelu"].relax_module(64, 128, 64)), TARGET, form=SPLIT)[1].matmuls
    assert matmul.fused
    assert matmul.forms is None


def test_a_cluster_with_no_plan_of_its_own_is_split() -> None:
    """24576 float32 columns are too many CTAs for one row of the fused kernel, not for the two kernels."""
    (cluster,) = discover(from_relax(OPS["rms"].relax_module(512, 1024, 64))).clusters
    split = make_split(cluster, H200, lambda func: None)
    assert not isinstance(split, Refusal)
    from tvm_comfuse.forms import choose

    choice = choose("auto", Refusal("no-plan", "none is legal"), split, H200)
    assert choice.chosen == SPLIT
    assert choice.fused_us is None
    assert "none is legal" in str(choice.refusal)


def test_the_split_form_moves_more_for_a_longer_row() -> None:
    specs = [analyze_rows(form_of(OPS["rms"].relax_module(4096, n, 64)).rows.func) for n in (1024, 2048)]
    short, long = (rows_estimate(spec, H200, 4096) for spec in specs)
    assert short < long < 2 * short


def test_measured_times_go_before_estimates(tmp_path: Path) -> None:
    database = Database.open(tmp_path / "records")
    func = function()
    for split_us, chosen in ((11.0, FUSED), (9.0, SPLIT)):
        record = commit(database, func, us=10.0, number=17 + (chosen == SPLIT), split_us=split_us)
        assert Database.open(database.path).records()
        assert record.both_us == pytest.approx((10.0, split_us))
        module = from_relax(OPS["layer_norm"].relax_module(24, 128, 64))
        _, explanation = fuse(module, TARGET, tuning_records=database, use_pretuned=False)
        (matmul,) = explanation.matmuls
        assert matmul.forms is not None
        assert (matmul.forms.chosen, matmul.forms.basis) == (chosen, MEASURED)
        assert matmul.forms.split_us == split_us
        database = Database.open(tmp_path / "others")
    assert Records().form == "auto"
