"""The split form: what the two functions are, what they compute, and when they are taken."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import tvm
from database_examples import commit, commit_plan, function
from split_examples import REDUCING, form_of
from tvm import relax

import tvm_comfuse
from tvm_comfuse.bench.ops import OPS
from tvm_comfuse.errors import LoweringError, PlanError
from tvm_comfuse.forms import ESTIMATES, FUSED, MEASURED, SPLIT, choose, make_split
from tvm_comfuse.frontend import from_relax
from tvm_comfuse.fusion import fuse
from tvm_comfuse.refusal import Refusal
from tvm_comfuse.relay_patterns import discover
from tvm_comfuse.schedules.analysis import analyze
from tvm_comfuse.schedules.choose import candidates
from tvm_comfuse.schedules.cost import estimate
from tvm_comfuse.schedules.device import H200
from tvm_comfuse.schedules.rows import (
    analyze_rows,
    rows_estimate,
)
from tvm_comfuse.target import parse_target
from tvm_comfuse.tir_passes.lower import lower
from tvm_comfuse.tuning.database import Database
from tvm_comfuse.verify.numeric import check

TARGET = parse_target("h200")


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
        lower(form.rows.func)


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


class Offset(torch.nn.Module):
    """A product in half precision, then float32: what lies between them must not be rounded behind the offset."""

    def __init__(self, dtype: torch.dtype, offset: float):
        super().__init__()
        self.linear, self.offset = torch.nn.Linear(64, 128, dtype=dtype), offset

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.linear(x).float() * 0.5 + self.offset
        return y.softmax(-1), y - y.mean(-1, keepdim=True)


@pytest.mark.parametrize(("dtype", "offset"), [(torch.bfloat16, 1000.0), (torch.float16, 1e5)])
def test_what_the_model_has_in_float32_is_not_rounded_between(dtype: torch.dtype, offset: float) -> None:
    torch.manual_seed(0)
    model, x = Offset(dtype, offset).eval(), torch.randn(24, 64).to(dtype)
    split, fused = (tvm_comfuse.compile(model, "llvm", example_args=(x,), form=form).run(x) for form in (SPLIT, FUSED))
    for found, expected in zip(split, fused, strict=True):
        assert (found - expected).norm() < 1e-2 * expected.norm()


# --- which form is taken ---------------------------------------------------------------------------------------------


def test_the_faster_form_is_taken_and_both_times_are_told() -> None:
    # no record has both times of this shape
    big = tvm_comfuse.explain(OPS["layer_norm"].relax_module(16384, 1024, 1152))
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


def test_the_word_split_in_the_place_of_a_plan() -> None:
    module = from_relax(OPS["layer_norm"].relax_module(256, 1024, 1024))
    name = fuse(module, TARGET)[1].matmuls[0].name
    (matmul,) = fuse(module, TARGET, {name: SPLIT}, form=FUSED)[1].matmuls
    assert matmul.form == SPLIT
    with pytest.raises(PlanError, match="other"):
        fuse(module, TARGET, {"other": SPLIT})


def test_a_split_form_that_cannot_be_had_is_an_error() -> None:
    module = from_relax(OPS["layer_norm"].relax_module(16, 65536, 64))
    assert fuse(module, TARGET)[1].matmuls[0].forms is None
    with pytest.raises(PlanError, match="split form of"):
        fuse(module, TARGET, form=SPLIT)


def test_a_cluster_without_reductions_has_one_form() -> None:
    (matmul,) = fuse(from_relax(OPS["bias_gelu"].relax_module(64, 128, 64)), TARGET, form=SPLIT)[1].matmuls
    assert matmul.fused
    assert matmul.forms is None


def test_a_cluster_with_no_plan_of_its_own_is_split() -> None:
    (cluster,) = discover(from_relax(OPS["rms"].relax_module(512, 1024, 64))).clusters
    split = make_split(cluster, H200, lambda func: None)
    assert not isinstance(split, Refusal)
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


def test_the_fastest_record_takes_the_time_of_the_split_form_from_another(tmp_path: Path) -> None:
    """A folder of searches from before that was measured: `tune` and `compile` decide alike."""
    database, module = Database.open(tmp_path / "records"), from_relax(OPS["layer_norm"].relax_module(24, 128, 64))
    commit(database, function(), us=10.0)
    commit(database, function(), us=12.0, number=18, split_us=9.0)
    best = Database.open(database.path).query(function(), TARGET)
    assert best is not None
    assert best.both_us == pytest.approx((10.0, 9.0))
    (matmul,) = fuse(module, TARGET, tuning_records=database, use_pretuned=False)[1].matmuls
    assert matmul.forms is not None
    assert (matmul.forms.chosen, matmul.forms.basis) == (SPLIT, MEASURED)


def test_a_tuned_plan_with_a_bad_estimate_is_taken_all_the_same(tmp_path: Path) -> None:
    """It was measured to be faster than the plan without tuning, which is fused."""
    database, module = Database.open(tmp_path / "records"), from_relax(OPS["layer_norm"].relax_module(24, 128, 64))
    (without,) = fuse(module, TARGET, use_pretuned=False)[1].matmuls
    assert without.forms is not None
    assert without.forms.chosen == FUSED
    spec = analyze(function())
    slow = max(candidates(spec, H200), key=lambda plan: estimate(plan, spec, H200).total)
    assert estimate(slow, spec, H200).total > without.forms.split_us
    commit_plan(database, function(), slow)
    (tuned,) = fuse(module, TARGET, tuning_records=database, use_pretuned=False)[1].matmuls
    assert tuned.plan == slow
    assert tuned.forms is not None
    assert (tuned.forms.chosen, tuned.forms.fused_us) == (FUSED, without.forms.fused_us)


def test_a_split_that_passes_a_record_over_says_so(tmp_path: Path) -> None:
    database, module = Database.open(tmp_path / "records"), from_relax(OPS["layer_norm"].relax_module(24, 128, 64))
    commit(database, function(), us=10.0, split_us=9.0)
    (matmul,) = fuse(module, TARGET, tuning_records=database, use_pretuned=False)[1].matmuls
    assert matmul.plan is None
    assert "form fused takes the plan of a record" in str(matmul.reason)
