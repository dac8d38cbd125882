"""The command line, called in this process."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import tvm
import xgboost

import tvm_comfuse
from tvm_comfuse import __version__, _versions
from tvm_comfuse.bench.ops import OPS
from tvm_comfuse.cli import doctor as doctor_module
from tvm_comfuse.cli.main import main
from tvm_comfuse.cuda import find_nvcc, find_nvrtc
from tvm_comfuse.frontend import from_relax
from tvm_comfuse.fusion import fuse
from tvm_comfuse.tuning.api import TunedTask, TuneResult

needs_compiler = pytest.mark.skipif(find_nvcc() is None and find_nvrtc() is None, reason="no CUDA compiler")
MODEL = """
import torch


def build():
    torch.manual_seed(0)
    up, down = torch.nn.Linear(64, 128), torch.nn.Linear(128, 64)
    layer = torch.nn.Sequential(up, torch.nn.GELU(), down, torch.nn.LayerNorm(64))
    return layer.to(torch.bfloat16).eval(), (torch.randn(32, 64).to(torch.bfloat16),)


def odd():
    return torch.nn.Linear(100, 64).to(torch.bfloat16), (torch.randn(8, 100).to(torch.bfloat16),)


def relu():
    return torch.nn.ReLU(), (torch.randn(8),)
"""


ENCODER = """
import torch


def build():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(64, 2, 128, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return model.to(torch.bfloat16).eval(), (torch.randn(2, 16, 64).to(torch.bfloat16),)
"""


class Result:
    """What a call printed and its exit code."""

    def __init__(self, code: int, out: str, err: str):
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> Any:
        """Standard output, which must be JSON and nothing else."""
        return json.loads(self.out)


@pytest.fixture
def comfuse(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """Calls the program; captures what C++ prints too."""

    def call(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["comfuse", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as caught:
            main()
        out, err = capfd.readouterr()
        return Result(int(caught.value.code or 0), out, err)

    return call


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with models."""
    path = tmp_path_factory.mktemp("models") / "models.py"
    path.write_text(MODEL)
    return path


def _is_one_clean_line(result: Result) -> bool:
    lines = result.err.splitlines()
    return result.code == 2 and result.out == "" and len(lines) == 1 and lines[0].startswith("comfuse: needed ")


def test_help_and_version(comfuse: Any) -> None:
    text = comfuse("--help").out
    for command in ("doctor", "explain", "compile", "run", "bench"):
        assert command in text
    assert comfuse("--version").out.strip() == f"comfuse {__version__}"


def test_explain_json(comfuse: Any, model: Path) -> None:
    result = comfuse("explain", f"{model}:build", "--json")
    assert result.code == 0
    first, second = result.json["matmuls"]
    assert first["shape"] == [32, 128, 64]
    assert first["ops"] == ["relax.matmul", "relax.add", "relax.nn.gelu"]
    assert second["ops"][-1] == "relax.nn.layer_norm"
    assert second["fused"] is True
    assert second["plan"]["exchange"] != "none"
    assert first["reason"]["code"] == "fused"


def test_explain_json_of_a_refusal(comfuse: Any, model: Path) -> None:
    (matmul,) = comfuse("explain", f"{model}:odd", "--json").json["matmuls"]
    assert matmul["fused"] is False
    assert matmul["plan"] is None
    assert matmul["ops"] == ["relax.matmul"]
    assert matmul["reason"]["code"] == "k-alignment"
    assert "K=100" in matmul["reason"]["text"]


def test_explain_table(comfuse: Any, model: Path) -> None:
    text = comfuse("explain", f"{model}:odd").out
    assert "8 x 64 x 100" in text
    assert "k-alignment" in text
    assert text.splitlines()[-1] == "1 matmul: 0 fused, 1 not"
    fused = comfuse("explain", f"{model}:build", "--target", "llvm").out
    assert fused.splitlines()[-1] == "2 matmuls: 2 fused"
    assert "plans are those of the h200" in fused
    assert " ends at matmul: the operator belongs" in fused
    assert comfuse("explain", f"{model}:relu").out.strip() == "no matmul in the model"
    assert comfuse("explain", f"{model}:relu", "--json").json == {"matmuls": []}


@pytest.mark.parametrize("kind", ["pt2", "json"])
def test_models_in_files(comfuse: Any, tmp_path: Path, kind: str) -> None:
    layer, x = torch.nn.Linear(64, 128).to(torch.bfloat16), torch.randn(8, 64).to(torch.bfloat16)
    program = torch.export.export(layer, (x,))
    path = tmp_path / f"model.{kind}"
    if kind == "pt2":
        torch.export.save(program, path)
    else:
        from tvm_comfuse.frontend import from_torch

        path.write_text(tvm.ir.save_json(from_torch(program)))
    (matmul,) = comfuse("explain", path, "--json").json["matmuls"]
    assert matmul["shape"] == [8, 128, 64]


@needs_compiler
def test_compile_writes_library_and_dump(comfuse: Any, model: Path, tmp_path: Path) -> None:
    out, dump = tmp_path / "model.so", tmp_path / "dump"
    result = comfuse("compile", f"{model}:build", "-o", out, "--dump", dump, "--json")
    assert result.code == 0
    assert out.stat().st_size > 0
    assert len(list(dump.glob("*.cu"))) == 1
    kernels = [kernel for cubin in result.json["cubins"] for kernel in cubin["kernels"]]
    assert len([kernel for kernel in kernels if kernel["name"].startswith("comfuse")]) == 2
    assert all(kernel["spill_stores"] == kernel["spill_loads"] == 0 for kernel in kernels)
    assert result.json["problem"] is None
    assert len(result.json["matmuls"]) == 2


@needs_compiler
def test_compile_with_plans_of_explain(comfuse: Any, model: Path, tmp_path: Path) -> None:
    explained = comfuse("explain", f"{model}:build", "--json").json
    explained["matmuls"][0]["plan"]["pipeline_depth"] = 3
    plans = tmp_path / "plans.json"
    plans.write_text(json.dumps(explained))
    result = comfuse("compile", f"{model}:build", "-o", tmp_path / "m.so", "--plans", plans, "--json")
    assert result.json["matmuls"][0]["plan"]["pipeline_depth"] == 3
    assert comfuse("explain", f"{model}:build", "--plans", plans, "--json").json["matmuls"] == result.json["matmuls"]
    for text, found in (
        ("[]", "list"),
        ("{", "plans.json"),
        ('{"nothere": {}}', "missing"),
        ('{"lv": 5}', "found 5"),
        ('{"lv": "fused"}', "one of the words split and off for lv; found 'fused'"),
        ('{"lv": {"store": "global"}}', "missing"),
        ('{"matmuls": [5]}', "a name and a plan"),
        ('{"matmuls": [{"plan": {"tile_m": 64}}]}', "a name and a plan"),
    ):
        plans.write_text(text)
        wrong = comfuse("compile", f"{model}:build", "-o", tmp_path / "m.so", "--plans", plans)
        assert _is_one_clean_line(wrong)
        assert found in wrong.err


def test_explain_prints_what_the_cost_model_says(comfuse: Any, model: Path) -> None:
    matmuls = comfuse("explain", f"{model}:build", "--json").json["matmuls"]
    text = " ".join(comfuse("explain", f"{model}:build").out.split())
    for matmul in matmuls:
        estimate = matmul["estimate"]
        assert f"{matmul['name']} estimate {estimate['total']:.1f} us for {matmul['shape'][0]} rows: " in text
        assert f"{estimate['memory_bytes'] / 1e6:.1f} MB of device memory" in text
        assert f"{matmul['name']} fill {estimate['fill']:.1f}, product {estimate['product']:.1f}, " in text


def test_compile_points_to_the_reasons(comfuse: Any, model: Path, tmp_path: Path) -> None:
    plans = tmp_path / "plans.json"
    name = comfuse("explain", f"{model}:build", "--json").json["matmuls"][0]["name"]
    plans.write_text(json.dumps({name: "off"}))
    compile_ = ("compile", f"{model}:build", "-o", tmp_path / "m.so", "--target", "llvm")
    assert "`comfuse explain` with the same options says why not" in comfuse(*compile_, "--plans", plans).out
    assert "says why not" not in comfuse(*compile_).out
    assert "the given plans leave it to TVM" in comfuse("explain", f"{model}:build", "--plans", plans).out


def test_plans_of_another_shape(comfuse: Any, model: Path, tmp_path: Path) -> None:
    explained = comfuse("explain", f"{model}:build", "--json").json
    first = explained["matmuls"][0]
    plans, compile_ = (
        tmp_path / "plans.json",
        ("compile", f"{model}:build", "-o", tmp_path / "m.so", "--target", "llvm"),
    )
    for shape in ([16384, 128, 64], [32, 768, 64], [32, 128, 768], ["m", 768, 64]):
        first["shape"] = shape
        plans.write_text(json.dumps(explained))
        wrong = comfuse(*compile_, "--plans", plans)
        assert _is_one_clean_line(wrong), wrong.err
        assert f"whose {first['name']} is 32 x 128 x 64; found one for " + " x ".join(map(str, shape)) in wrong.err
    # a plan for any M, and one that says nothing of its shape
    first["plan"]["pipeline_depth"] = 3
    for given in ({**first, "shape": ["m", 128, 64]}, {key: first[key] for key in ("name", "plan")}):
        plans.write_text(json.dumps({"matmuls": [given]}))
        found = comfuse(*compile_, "--plans", plans, "--json").json["matmuls"][0]
        assert found["plan"]["pipeline_depth"] == 3
    # the shape is told, not that the plan is illegal on it
    first["shape"] = [16384, 128, 64]
    first["plan"]["ctas"] = 9999
    plans.write_text(json.dumps({"matmuls": [first]}))
    assert "16384 x 128 x 64" in comfuse(*compile_, "--plans", plans).err


def test_plans_of_a_static_m_for_a_symbolic_one() -> None:
    static, symbolic = (OPS["layer_norm"].relax_module(m, 128, 64, "bfloat16") for m in (32, None))
    explained = tvm_comfuse.explain(static).to_dict()
    explained["matmuls"][0]["plan"]["pipeline_depth"] = 3
    _, explanation = fuse(from_relax(symbolic), tvm_comfuse.parse_target("h200"), explained)
    assert explanation.matmuls[0].plan is not None
    assert explanation.matmuls[0].plan.pipeline_depth == 3


def test_plans_of_tune(comfuse: Any, model: Path, tmp_path: Path) -> None:
    (first, _) = comfuse("explain", f"{model}:build", "--json").json["matmuls"]
    plan = replace(tvm_comfuse.Plan.from_dict(first["plan"]), pipeline_depth=3)
    plans, compile_ = (
        tmp_path / "plans.json",
        ("compile", f"{model}:build", "-o", tmp_path / "m.so", "--target", "llvm"),
    )

    def tuned(shape: tuple[int, int, int], plan: Any) -> str:
        task = TunedTask((first["name"],), shape, plan, 9.0, 10.0, None, None, 1, {})
        return json.dumps(TuneResult("h200", (task,), "trials").to_dict())

    plans.write_text(tuned((32, 128, 64), plan))
    found = comfuse(*compile_, "--plans", plans, "--json").json["matmuls"]
    assert found[0]["plan"] == plan.to_dict()
    assert found[1]["plan"] is not None
    for text, words in (
        (tuned((33, 128, 64), plan), "is 32 x 128 x 64; found one for 33 x 128 x 64"),
        (tuned((32, 128, 64), None), "plans that a search found; found tasks without any"),
        ('{"tasks": [5]}', "tasks with matmuls and a plan"),
    ):
        plans.write_text(text)
        wrong = comfuse(*compile_, "--plans", plans)
        assert _is_one_clean_line(wrong), wrong.err
        assert words in wrong.err


def test_plans_of_a_model_without_any(comfuse: Any, model: Path, tmp_path: Path) -> None:
    plans, compile_ = tmp_path / "plans.json", ("compile", f"{model}:relu", "-o", tmp_path / "m.so", "--target", "llvm")
    plans.write_text("{}")
    wrong = comfuse(*compile_, "--plans", plans)
    assert _is_one_clean_line(wrong)
    assert f"found {plans}: an empty object" in wrong.err
    # what explain writes of such a model is no mistake
    plans.write_text(comfuse("explain", f"{model}:relu", "--json").out)
    assert comfuse(*compile_, "--plans", plans).code == 0


@pytest.mark.parametrize("target", ["h200", "llvm"])
def test_plans_of_explain_go_round(comfuse: Any, tmp_path: Path, target: str) -> None:
    (tmp_path / "encoder.py").write_text(ENCODER)
    explained = comfuse("explain", f"{tmp_path}/encoder.py:build", "--json").json
    plans = tmp_path / "b.json"
    plans.write_text(json.dumps(explained))
    arguments = ("-o", tmp_path / "b.so", "--plans", plans, "--target", target, "--json")
    compiled = comfuse("compile", f"{tmp_path}/encoder.py:build", *arguments)
    assert compiled.code == 0, compiled.err
    assert compiled.json["matmuls"] == explained["matmuls"]
    names = [matmul["name"] for matmul in explained["matmuls"]]
    assert len(set(names)) == len(names) == 8


def test_outputs_are_checked_before_the_work(
    comfuse: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(*_: object, **__: object) -> None:
        raise AssertionError("started")

    monkeypatch.setattr("tvm_comfuse.build.compile", work)
    monkeypatch.setattr("tvm_comfuse.bench.run_suite", work)
    monkeypatch.setattr("tvm_comfuse.frontend.load_model", work)
    (tmp_path / "folder.so").mkdir()
    (tmp_path / "file").touch()
    calls = [("compile", f"{model}:build", "-o"), ("run", f"{model}:build", "--save"), ("bench", "--json")]
    for call in calls:
        for path, found in (
            ("nowhere/x.so", "no directory"),
            ("folder.so", "a directory"),
            ("file/x.so", "which is no directory"),
        ):
            result = comfuse(*call, tmp_path / path)
            assert _is_one_clean_line(result), result.err
            assert found in result.err
    for name in ("model", "model.o"):
        result = comfuse(*calls[0], tmp_path / name)
        assert _is_one_clean_line(result), result.err
        assert "ends in .so" in result.err
    monkeypatch.setattr("os.access", lambda *_: False)
    assert "no permission" in comfuse(*calls[0], tmp_path / "x.so").err


@needs_compiler
def test_compile_prints_a_table(comfuse: Any, model: Path, tmp_path: Path) -> None:
    text = comfuse("compile", f"{model}:build", "-o", tmp_path / "m.so").out
    assert "2 matmuls: 2 fused" in text
    assert "registers" in text
    assert "sm_90a" in text


def test_run(comfuse: Any, model: Path, tmp_path: Path) -> None:
    library, saved = tmp_path / "m.so", tmp_path / "out.pt"
    assert comfuse("compile", f"{model}:build", "-o", library, "--target", "llvm").code == 0
    result = comfuse("run", f"{model}:build", "--target", "llvm", "--save", saved, "--json")
    (output,) = result.json["outputs"]
    assert output["shape"] == [32, 64]
    assert output["dtype"] == "bfloat16"
    assert output["finite"] == output["elements"] == 32 * 64
    again = comfuse("run", f"{model}:build", "--library", library)
    assert again.code == 0
    assert "2048 of 2048 finite" in again.out
    scope: dict[str, Any] = {}
    exec(MODEL, scope)
    layer, inputs = scope["build"]()
    (out,) = torch.load(saved)
    with torch.no_grad():
        torch.testing.assert_close(out, layer(*inputs), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("form", ["fused", "split"])
def test_run_in_either_form(comfuse: Any, model: Path, tmp_path: Path, form: str) -> None:
    paths = tmp_path / "auto.pt", tmp_path / "form.pt"
    run = ("run", f"{model}:build", "--target", "llvm", "--save")
    assert comfuse(*run, paths[0]).code == 0
    assert comfuse(*run, paths[1], "--form", form).code == 0
    (expected,), (found,) = (torch.load(path) for path in paths)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_run_in_no_form(comfuse: Any, model: Path) -> None:
    result = comfuse("run", f"{model}:build", "--target", "llvm", "--form", "both")
    assert _is_one_clean_line(result)
    assert "auto, fused, split" in result.err


def test_run_needs_inputs(comfuse: Any, tmp_path: Path) -> None:
    from tvm_comfuse.frontend import from_torch

    mod = from_torch(torch.nn.Linear(64, 128).to(torch.bfloat16), (torch.randn(8, 64).to(torch.bfloat16),))
    path = tmp_path / "model.json"
    path.write_text(tvm.ir.save_json(mod))
    result = comfuse("run", path)
    assert _is_one_clean_line(result)
    assert "example inputs" in result.err


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (("explain", "nowhere.pt2"), "nowhere.pt2"),
        (("explain", "nowhere.py:build"), "nowhere.py"),
        (("explain", "nothing"), "'nothing'"),
        (("explain", "nowhere.pt2", "--target", "h300"), "h300"),
        (("compile", "nowhere.pt2", "-o", "x.so"), "nowhere.pt2"),
        (("run", "nowhere.pt2"), "nowhere.pt2"),
        (("bench", "--suite", "nothing"), "nothing"),
        (("bench", "--suite-file", "nowhere.json"), "nowhere.json"),
    ],
)
def test_wrong_input_is_one_line(comfuse: Any, arguments: tuple[str, ...], found: str) -> None:
    result = comfuse(*arguments)
    assert _is_one_clean_line(result), result.err
    assert found in result.err


def test_corrupt_program(comfuse: Any, tmp_path: Path) -> None:
    (tmp_path / "broken.pt2").write_bytes(b"PK\x03\x04 not a program")
    result = comfuse("explain", tmp_path / "broken.pt2")
    assert _is_one_clean_line(result)
    assert "broken.pt2" in result.err


@pytest.mark.parametrize("arguments", [("explain",), ("explain", "m", "--nothing"), ("nothing",), ("compile", "m")])
def test_wrong_options(comfuse: Any, arguments: tuple[str, ...]) -> None:
    result = comfuse(*arguments)
    assert result.code == 2
    assert result.out == ""


def test_bench_checks_on_the_cpu(comfuse: Any, tmp_path: Path) -> None:
    row = {"name": "tiny", "op": "layer_norm", "M": 64, "N": 64, "K": 64}
    suites = tmp_path / "suites.json"
    suites.write_text(json.dumps({"families": {"mine": {"rows": [row]}}}))
    report = tmp_path / "report.json"
    result = comfuse(
        "bench", "--suite-file", suites, "--check-only", "--target", "llvm", "--seeds", 1, "--json", report
    )
    assert result.code == 0, result.err
    assert "tiny" in result.out
    (measured,) = json.loads(report.read_text())["rows"]
    assert measured["fused"] is True
    assert measured["error"] <= 2 * measured["eager_error"]


def test_doctor(comfuse: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("TVM_COMFUSE_CACHE", str(cache))
    assert comfuse("doctor", "--json").json["cache"] == {"path": str(cache), "size": "0.0 MiB", "bytes": 0}
    (cache / "cubin").mkdir(parents=True)
    (cache / "cubin" / "a.json").write_bytes(bytes(3 * 2**20))
    report = comfuse("doctor", "--json").json
    assert report["cache"] == {"path": str(cache), "size": "3.0 MiB", "bytes": 3 * 2**20}
    assert report["packages"]["apache-tvm"].startswith("0.27.0")
    assert report["llvm"]
    text = comfuse("doctor")
    assert text.code == (1 if report["problems"] else 0)
    monkeypatch.setattr("tvm_comfuse.cuda.find_nvcc", lambda: None)
    monkeypatch.setattr("tvm_comfuse.cuda.find_nvrtc", lambda: None)
    without = comfuse("doctor")
    assert without.code == 1
    assert "tvm-comfuse[nvrtc]" in without.out


def test_doctor_finds_the_module_of_another_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise doctor_module.metadata.PackageNotFoundError(name)

    # as for XGBoost, whose wheel without CUDA is the distribution xgboost-cpu
    monkeypatch.setattr(doctor_module.metadata, "version", missing)
    assert doctor_module._version("xgboost") == xgboost.__version__
    assert doctor_module._version("no_such_module") is None
    monkeypatch.setitem(sys.modules, "half", types.ModuleType("half"))
    assert doctor_module._version("half") is None


def test_wrong_version(comfuse: Any, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = _versions.metadata.version
    monkeypatch.setattr(
        _versions.metadata, "version", lambda name: "0.1.15" if name == "apache-tvm-ffi" else real(name)
    )
    assert doctor_module.examine()["llvm"] is None
    report = comfuse("doctor", "--json")
    assert report.code == 1
    assert "apache-tvm-ffi 0.1.15" in report.json["problems"][0]
    assert _is_one_clean_line(comfuse("explain", f"{model}:build"))


def test_module_form() -> None:
    command = [sys.executable, "-m", "tvm_comfuse", "--version"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == f"comfuse {__version__}"
