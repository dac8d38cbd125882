"""The rows kernel: its plans, its code, and its numbers in the interpreter."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import tvm
from split_examples import REDUCING, form_of
from tvm import relax

from tvm_comfuse.bench.ops import OPS
from tvm_comfuse.bench.ours import compile_executable
from tvm_comfuse.bench.suites import Row, load
from tvm_comfuse.cuda import compile_cubin, sources
from tvm_comfuse.forms import SPLIT
from tvm_comfuse.frontend import from_relax
from tvm_comfuse.fusion import fuse
from tvm_comfuse.refusal import Refusal
from tvm_comfuse.schedules.device import H200
from tvm_comfuse.schedules.rows import (
    CHUNK,
    LANES,
    analyze_rows,
    rows_plan,
    schedule_rows,
    with_rows_plan,
)
from tvm_comfuse.schedules.spec import RowsSpec
from tvm_comfuse.target import parse_target
from tvm_comfuse.tir_passes.lower import lower
from tvm_comfuse.verify.api import verify_kernel
from tvm_comfuse.verify.dynamic import compare, random_inputs
from tvm_comfuse.verify.interpreter import Program
from tvm_comfuse.verify.reference import reference
from tvm_comfuse.verify.static import check as static_check

SUITES = [row for rows in load().values() for row in rows]
TARGET = parse_target("h200")


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
