"""From a model to a library: numbers on the CPU, cubins for the GPU, files, and bad input."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tvm
from tvm import relax

import tvm_comfuse
from tvm_comfuse.cuda import find_nvcc, find_nvrtc
from tvm_comfuse.errors import BuildError, LoweringError, ModelError, OutputError, PlanError, TargetError
from tvm_comfuse.frontend import from_torch
from tvm_comfuse.fusion import fuse
from tvm_comfuse.relay_patterns.discover import discover
from tvm_comfuse.schedules.choose import default_plan
from tvm_comfuse.schedules.device import H200
from tvm_comfuse.schedules.footprint import slot_rows
from tvm_comfuse.target import parse_target
from tvm_comfuse.verify.numeric import relative_error

WIDTH, HIDDEN = 64, 128
needs_compiler = pytest.mark.skipif(find_nvcc() is None and find_nvrtc() is None, reason="no CUDA compiler")


class Block(torch.nn.Module):
    """LayerNorm(x + W2 relu(W1 x)): a cluster with a reduction and one without."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, HIDDEN), torch.nn.Linear(HIDDEN, WIDTH)
        self.norm = torch.nn.LayerNorm(WIDTH)
        torch.nn.init.normal_(self.norm.weight, 1.0, 0.2)
        torch.nn.init.normal_(self.norm.bias, 0.0, 0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(torch.relu(self.up(x))))


def _block(dtype: torch.dtype = torch.bfloat16) -> Block:
    torch.manual_seed(0)
    return Block().to(dtype).eval()


def _input(*leading: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*leading, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)


def _errors(out: torch.Tensor, model: torch.nn.Module, x: torch.Tensor) -> tuple[float, float]:
    """Of ours and of eager, against float64."""
    with torch.no_grad():
        eager = model(x)
        dtype = x.dtype
        reference = model.double()(x.double())
        model.to(dtype)
    return relative_error(out, reference), relative_error(eager, reference)


@pytest.fixture(scope="module")
def dynamic() -> tvm_comfuse.Compiled:
    """Compiled for the CPU with a symbolic batch."""
    batch = torch.export.Dim("batch")
    program = torch.export.export(_block(), (_input(3, 5),), dynamic_shapes=({0: batch},))
    return tvm_comfuse.compile(program, "llvm")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_runs_on_the_cpu_with_right_numbers(dtype: torch.dtype) -> None:
    model, x = _block(dtype), _input(4, 5, dtype=dtype)
    compiled = tvm_comfuse.compile(model, "llvm", example_args=(x,))
    assert repr(compiled) == "Compiled(llvm, 2 matmuls: 2 fused)"
    out = compiled.run(x)
    error, eager_error = _errors(out, model, x)
    assert out.dtype == dtype
    assert out.shape == x.shape
    assert error <= 2 * eager_error


@pytest.mark.parametrize("batch", [1, 2, 9])
def test_dynamic_batch(dynamic: tvm_comfuse.Compiled, batch: int) -> None:
    x = _input(batch, 5)
    error, eager_error = _errors(dynamic.run(x), _block(), x)
    assert error <= 2 * eager_error
    assert dynamic.explanation.matmuls[0].shape[1:] == (HIDDEN, WIDTH)
    assert isinstance(dynamic.explanation.matmuls[0].shape[0], str)


def test_zero_rows(dynamic: tvm_comfuse.Compiled) -> None:
    assert dynamic.run(_input(0, 5)).shape == (0, 5, WIDTH)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nonfinite_rows_stay_in_their_row(dynamic: tvm_comfuse.Compiled, value: float) -> None:
    x = _input(2, 5)
    x[1, 2, 7] = value
    out = dynamic.run(x)
    with torch.no_grad():
        expected = _block()(x)
    assert torch.equal(out.isnan(), expected.isnan())
    assert out.isnan().any(-1).sum() == 1


def test_inputs_of_other_kinds(dynamic: tvm_comfuse.Compiled) -> None:
    x = _input(2, 5)
    expected = dynamic.run(x)
    out = dynamic.run(tvm.runtime.from_dlpack(x))
    assert isinstance(out, tvm.runtime.Tensor)
    assert torch.equal(torch.from_dlpack(out), expected)


def test_wrong_inputs_are_told(dynamic: tvm_comfuse.Compiled) -> None:
    for inputs in ((), (_input(2, 4),), (_input(2, 5).float(),), (_input(2, 5), _input(2, 5))):
        with pytest.raises(ModelError, match="inputs as in the model"):
            dynamic.run(*inputs)


def test_library_round_trip(dynamic: tvm_comfuse.Compiled, tmp_path: Path) -> None:
    path = dynamic.export_library(tmp_path / "new" / "block.so")
    loaded = tvm_comfuse.load(path)
    assert loaded.explanation is None
    assert torch.equal(loaded.run(_input(3, 5)), dynamic.run(_input(3, 5)))


def test_library_that_is_none(dynamic: tvm_comfuse.Compiled, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nothing at"):
        tvm_comfuse.load(tmp_path / "none.so")
    (tmp_path / "text.so").write_text("not a library")
    with pytest.raises(ModelError, match=r"text\.so"):
        tvm_comfuse.load(tmp_path / "text.so")
    (tmp_path / "model.json").write_text("{}")
    with pytest.raises(ModelError, match=r"ends in \.so"):
        tvm_comfuse.load(tmp_path / "model.json")
    (tmp_path / "file").touch()
    with pytest.raises(BuildError, match="write a library"):
        dynamic.export_library(tmp_path / "file" / "block.so")


@needs_compiler
def test_kernels_for_the_gpu_do_not_spill(tmp_path: Path) -> None:
    compiled = tvm_comfuse.compile(_block(), "h200", example_args=(_input(4, 32),), dump=tmp_path / "dump")
    reports = compiled.kernel_report()
    ours = [kernel for report in reports for kernel in report.kernels if kernel.name.startswith("comfuse")]
    assert len(ours) == 2
    assert all(report.cubin.startswith(b"\x7fELF") and report.arch == "sm_90a" for report in reports)
    assert sum(report.spill_stores + report.spill_loads for report in reports) == 0
    for kernel, matmul in zip(sorted(ours, key=lambda kernel: kernel.name), compiled.explanation.matmuls, strict=True):
        # gemm_elementwise comes before gemm_reduce, as the matmuls do
        rows, columns = slot_rows(matmul.plan)
        in_slot = rows + (0 if matmul.plan.w_resident else columns)
        ring = matmul.plan.pipeline_depth * in_slot * matmul.plan.tile_k * 2
        assert ring <= kernel.dynamic_shared_bytes <= H200.shared_memory - kernel.shared_bytes
    names = sorted(path.name for path in (tmp_path / "dump").iterdir())
    phases = [name.partition("_")[2] for name in names]
    for phase in ("import.py", "fuse.py", "legalize.py", "LowerClusters.py", "kernels0.cu", "ptxas.json"):
        assert phase in phases
    assert [name[:2] for name in names] == [f"{number:02d}" for number in range(len(names))]
    ptxas = json.loads((tmp_path / "dump" / names[phases.index("ptxas.json")]).read_text())
    assert ptxas == [report.to_dict() for report in reports]


def test_without_a_gpu_running_is_refused() -> None:
    if tvm.cuda(0).exist:
        pytest.skip("this machine has a GPU")
    compiled = tvm_comfuse.compile(_block(), "h200", example_args=(_input(4, 32),))
    with pytest.raises(TargetError, match="a GPU to run on"):
        compiled.run(_input(4, 32))


def test_gpu_that_is_not_hopper_fuses_nothing_and_says_so() -> None:
    explanation = tvm_comfuse.explain(_block(), "cuda -arch=sm_80", example_args=(_input(4, 32),))
    assert [matmul.fused for matmul in explanation.matmuls] == [False, False]
    assert {matmul.reason.code for matmul in explanation.matmuls} == {"device"}


def test_explanation_has_exactly_the_promised_form() -> None:
    explanation = tvm_comfuse.explain(_block(), example_args=(_input(4, 32),))
    values = json.loads(json.dumps(explanation.to_dict()))
    assert list(values) == ["matmuls"]
    up, down = values["matmuls"]
    for matmul in (up, down):
        assert list(matmul)[:6] == ["name", "shape", "fused", "ops", "plan", "reason"]
        assert list(matmul["reason"]) == ["code", "text"]
        assert matmul["fused"] is True
        assert matmul["plan"]["tile_k"] == 64
    assert up["shape"] == [128, HIDDEN, WIDTH]
    assert up["ops"] == ["relax.matmul", "relax.add", "relax.nn.relu"]
    assert down["ops"][0] == "relax.matmul"
    assert down["ops"][-1] == "relax.nn.layer_norm"
    assert "forms" not in up
    assert list(down["forms"]) == ["chosen", "fused_us", "split_us", "basis", "split"]
    assert "fused" in str(explanation)


def test_given_plan_is_used_and_checked() -> None:
    mod, target = from_torch(_block(), (_input(4, 32),)), parse_target("h200")
    up, down = fuse(mod, target)[1].matmuls
    plan = dataclasses.replace(up.plan, pipeline_depth=3)
    for form in (plan, plan.to_dict(), plan.to_json()):
        again = fuse(mod, target, {up.name: form})[1].matmuls
        assert again[0].plan == plan
        assert again[1].plan == down.plan
    with pytest.raises(PlanError, match=r"nothere.*explain"):
        fuse(mod, target, {"nothere": plan})
    with pytest.raises(PlanError, match=f"legal on h200.*{up.name}|{up.name}.*legal on h200"):
        fuse(mod, target, {up.name: dataclasses.replace(plan, tile_n=72)})
    with pytest.raises(PlanError, match="missing"):
        fuse(mod, target, {up.name: {"tile_m": 64}})
    for wrong in (5, None, [plan]):
        with pytest.raises(PlanError, match=rf"needed a plan.*{up.name}; found"):
            fuse(mod, target, {up.name: wrong})  # type: ignore[dict-item]
    with pytest.raises(PlanError, match=r"plan field store .* found \[1\]"):
        fuse(mod, target, {up.name: {**plan.to_dict(), "store": [1]}})
    with pytest.raises(PlanError, match="found list"):
        fuse(mod, target, [plan])  # type: ignore[arg-type]


def test_message_of_an_illegal_plan() -> None:
    mod, target = from_torch(_block(), (_input(4, 32),)), parse_target("h200")
    up = fuse(mod, target)[1].matmuls[0]
    with pytest.raises(PlanError) as caught:
        fuse(mod, target, {up.name: dataclasses.replace(up.plan, tile_m=32)})
    rule = f"a plan for {up.name} that is legal on h200: tile_m must be one of (64, 128)"
    assert str(caught.value) == f"needed {rule}; found tile_m=32; try: take 64 or 128"


def _equal_names(function: str = "main") -> tvm.IRModule:
    """Products bound to variables called lv1, lv1, lv1#2 and lv1."""
    rows, square = (relax.TensorType(shape, "bfloat16") for shape in ((32, WIDTH), (WIDTH, WIDTH)))
    x, w = relax.Var("x", rows), relax.Var("w", square)
    bindings: list[relax.VarBinding] = []

    def bind(name: str, call: relax.Expr, kind: type = relax.DataflowVar) -> relax.Var:
        bindings.append(relax.VarBinding(kind(name, rows), call))
        return bindings[-1].var

    value = x
    for name in ("lv1", "lv1", "lv1#2", "lv1"):
        value = bind("lv", relax.op.nn.relu(bind(name, relax.op.matmul(value, w))))
    out = bind("out", value, relax.Var)
    func = relax.Function([x, w], relax.SeqExpr([relax.DataflowBlock(bindings)], out), rows)
    mod = tvm.IRModule({function: func.with_attr("global_symbol", function)})
    return relax.transform.Normalize()(mod)


def test_names_are_unique_and_plans_go_round() -> None:
    mod, target = _equal_names(), parse_target("h200")
    explained = fuse(mod, target)[1]
    names = [matmul.name for matmul in explained.matmuls]
    assert names == ["lv1", "lv1#3", "lv1#2", "lv1#4"]
    assert [matmul.name for matmul in discover(mod).matmuls] == names
    assert [matmul.name for matmul in fuse(mod, parse_target("llvm"))[1].matmuls] == names
    third = dataclasses.replace(explained.matmuls[3].plan, pipeline_depth=3)
    plans = {matmul["name"]: matmul["plan"] for matmul in explained.to_dict()["matmuls"]}
    again = fuse(mod, target, {**plans, names[3]: third})[1]
    assert [matmul.plan for matmul in again.matmuls] == [*(m.plan for m in explained.matmuls[:3]), third]


def test_names_are_unique_over_all_functions_of_a_module() -> None:
    first, second = _equal_names(), _equal_names("other")
    mod = tvm.IRModule({"main": first["main"], "other": second["other"]})
    names = [matmul.name for matmul in fuse(mod, parse_target("h200"))[1].matmuls]
    assert len(set(names)) == len(names) == 8
    both = [matmul.name for function in ("main", "other") for matmul in discover(mod, function).matmuls]
    assert both == names


def test_explanation_prints_short_lines() -> None:
    mod = from_torch(_block(), (_input(4, 32),))
    text = str(fuse(mod, parse_target("h200"))[1])
    assert text.splitlines()[-1] == "2 matmuls: 2 fused"
    assert len(text.splitlines()) >= 8
    assert max(map(len, text.splitlines())) < 120
    assert "h200" not in text
    on_cpu = str(fuse(mod, parse_target("llvm"))[1]).splitlines()
    assert on_cpu[-2] == "clusters and plans are those of the h200; llvm runs the clusters without the plans"
    odd = from_torch(torch.nn.Linear(100, 64).to(torch.bfloat16), (torch.ones(8, 100).bfloat16(),))
    text = str(fuse(odd, parse_target("h200"))[1])
    assert text.splitlines()[-1] == "1 matmul: 0 fused, 1 not"
    assert "k-alignment" in text


def test_library_needs_its_suffix(dynamic: tvm_comfuse.Compiled, tmp_path: Path) -> None:
    for name in ("model", "model.dll", "model.so.1"):
        with pytest.raises(OutputError, match=r"ends in \.so"):
            dynamic.export_library(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_fuse_leaves_its_argument_alone() -> None:
    mod = from_torch(_block(), (_input(4, 32),))
    before = mod.script()
    fuse(mod, parse_target("h200"))
    fuse(mod, parse_target("llvm"))
    assert mod.script() == before


def test_equal_layers_are_planned_once() -> None:
    layers = [layer for _ in range(3) for layer in (torch.nn.Linear(96, 96), torch.nn.ReLU())]
    mod = from_torch(torch.nn.Sequential(*layers).to(torch.bfloat16), (torch.randn(40, 96).to(torch.bfloat16),))
    before = default_plan.cache_info()
    _, explanation = fuse(mod, parse_target("h200"), use_pretuned=False)
    after = default_plan.cache_info()
    plans = [matmul.plan for matmul in explanation.matmuls]
    assert len(plans) == 3
    assert plans[0] == plans[1] == plans[2] is not None
    assert (after.misses - before.misses, after.hits - before.hits) == (1, 2)


def test_passes_one_by_one() -> None:
    from tvm_comfuse.cpu_schedule import cpu_schedule
    from tvm_comfuse.frontend import legalize

    model, x = _block(), _input(4, 32)
    passes = tvm.transform.Sequential([tvm_comfuse.FuseClusters(cpu_schedule), legalize()])
    executable = tvm.compile(passes(from_torch(model, (x,))), target="llvm")
    machine = relax.VirtualMachine(executable, tvm.cpu())
    out = torch.from_dlpack(machine["main"](tvm.runtime.from_dlpack(x)))
    error, eager_error = _errors(out, model, x)
    assert error <= 2 * eager_error


def test_pipeline_by_name() -> None:
    model, x = _block(), _input(4, 32)
    tvm_comfuse._autoload()
    executable = tvm.compile(from_torch(model, (x,)), target=parse_target("llvm"), relax_pipeline="comfuse")
    machine = relax.VirtualMachine(executable, tvm.cpu())
    out = torch.from_dlpack(machine["main"](tvm.runtime.from_dlpack(x)))
    error, eager_error = _errors(out, model, x)
    assert error <= 2 * eager_error
    assert "comfuse_gemm_reduce" in executable.as_text()
    # an exception of a Python pass comes out of TVM as a RuntimeError with its message
    with pytest.raises(RuntimeError, match="a target in scope"):
        relax.get_pipeline("comfuse")(from_torch(model, (x,)))


def test_reshapes_are_views(tmp_path: Path) -> None:
    """[4, 32, 64] is [128, 64] without a kernel; only the result is copied into its shape."""
    compiled = tvm_comfuse.compile(_block(), "h200", example_args=(_input(4, 32),), dump=tmp_path)
    (lowered,) = tmp_path.glob("*_AttachGlobalSymbol.py")
    assert "vm.builtin.reshape" in lowered.read_text()
    kernels = [line for source in compiled.sources() for line in source.splitlines() if line.endswith(");")]
    assert sum("__global__" in line and "reshape" in line for line in kernels) <= 1


def test_error_of_a_pass_keeps_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    from tvm_comfuse.tir_passes import lower as lower_module

    def fail(*_arguments: object) -> None:
        raise LoweringError("a kernel", "none", "another plan")

    monkeypatch.setattr(lower_module, "lower", fail)
    with pytest.raises(BuildError) as caught:
        tvm_comfuse.compile(_block(), "h200", example_args=(_input(4, 32),))
    assert str(caught.value) == "needed a kernel; found none; try: another plan"


def test_model_without_matmul() -> None:
    x = _input(3)
    compiled = tvm_comfuse.compile(torch.nn.ReLU(), "llvm", example_args=(x,))
    assert compiled.explanation.matmuls == ()
    assert str(compiled.explanation) == "no matmul in the model"
    assert torch.equal(compiled.run(x), torch.relu(x))


def test_dtype_that_is_not_fused_is_told_and_still_right() -> None:
    model, x = _block(torch.float32), _input(4, 5, dtype=torch.float32)
    compiled = tvm_comfuse.compile(model, "llvm", example_args=(x,))
    assert not any(matmul.fused for matmul in compiled.explanation.matmuls)
    assert all("dtype" in matmul.reason.code for matmul in compiled.explanation.matmuls)
    with torch.no_grad():
        np.testing.assert_allclose(compiled.run(x), model(x), rtol=1e-4, atol=1e-4)


def test_operator_that_tvm_cannot_compile_is_told() -> None:
    """TVM has no float64 layer norm, and a float64 cluster is not ours."""
    x = _input(4, 5, dtype=torch.float64)
    with pytest.raises(BuildError, match="layer_norm"):
        tvm_comfuse.compile(_block(torch.float64), "llvm", example_args=(x,))


def test_k_that_is_not_a_multiple_of_eight() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(100, 64).to(torch.bfloat16)
    x = torch.randn(6, 100).to(torch.bfloat16)
    compiled = tvm_comfuse.compile(model, "llvm", example_args=(x,))
    (matmul,) = compiled.explanation.matmuls
    assert not matmul.fused
    assert matmul.reason.code == "k-alignment"
    assert matmul.reason.numbers["K"] == 100
    error, eager_error = _errors(compiled.run(x), model, x)
    assert error <= 2 * eager_error


@pytest.mark.parametrize(
    ("model", "found"), [("nowhere.pt2", "nothing at"), ("model.txt", "model.txt"), (3, "int"), (None, "NoneType")]
)
def test_models_that_are_none(model: object, found: str) -> None:
    with pytest.raises(ModelError, match=found):
        tvm_comfuse.compile(model, "llvm")


def test_corrupt_file(tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    torch.export.save(torch.export.export(_block(), (_input(2, 3),)), path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match=r"model\.pt2"):
        tvm_comfuse.explain(path)


def test_unknown_target_is_told_before_the_model_is_read() -> None:
    with pytest.raises(TargetError, match="h300"):
        tvm_comfuse.compile("nowhere.pt2", "h300")


class Named(torch.nn.Module):
    """A dict with a nested value, its keys not in the order of the alphabet."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(64, 128)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = self.linear(x)
        return {"second": y, "first": (y.relu(), [-y])}


def test_nested_outputs_are_flat_and_in_order() -> None:
    model, x = Named().to(torch.bfloat16).eval(), torch.randn(24, 64).to(torch.bfloat16)
    found = tvm_comfuse.compile(model, "llvm", example_args=(x,)).run(x)
    assert isinstance(found, tuple)
    y, positive, negative = found
    torch.testing.assert_close(y, model(x)["second"].detach(), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close((positive, negative), (y.relu(), -y))
