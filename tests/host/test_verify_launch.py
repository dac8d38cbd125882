"""Careful launches, checked on the CPU: guard bands, poison, hangs, faults, and the sanitizer's log."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from canonical_examples import EXAMPLES
from verified_kernels import case, load_script

from tvm_comfuse.bench.ours import compile_function
from tvm_comfuse.schedules.analysis import analyze
from tvm_comfuse.target import parse_target
from tvm_comfuse.verify.dynamic import random_inputs
from tvm_comfuse.verify.gpu import FirstLaunches, Limits
from tvm_comfuse.verify.inexact import of_model
from tvm_comfuse.verify.launch import GUARD_BYTES, Guarded, Judge, launch
from tvm_comfuse.verify.reference import reference

LLVM = parse_target("llvm")
ROWS = 384


def test_a_right_kernel() -> None:
    func = case("cooperative_cluster").func
    result = launch(func, compile_function(func, LLVM), ROWS, 0, LLVM)
    assert result.failure == ""
    assert all(0 < result.errors[name] <= result.allowed[name] for name in result.errors)


def test_wrong_kernels() -> None:
    func = case("cooperative_cluster").func
    kernel = compile_function(func, LLVM)

    def leaves_a_row(*tensors: torch.Tensor) -> None:
        kernel(*tensors)
        tensors[-1][-1].fill_(float("nan"))

    def overruns(*tensors: torch.Tensor) -> None:
        kernel(*tensors)
        out = tensors[-1]
        torch.as_strided(out, (1,), (1,), out.storage_offset() + out.numel()).fill_(1.0)

    def writes_an_input(*tensors: torch.Tensor) -> None:
        kernel(*tensors)
        tensors[0][0, 0] += 1.0

    assert "error of stage_2_out0 is nan" in launch(func, leaves_a_row, ROWS, 0, LLVM).failure
    assert launch(func, overruns, ROWS, 0, LLVM).overrun == ["stage_2_out0"]
    assert len(launch(func, writes_an_input, ROWS, 0, LLVM).changed) == 1


def test_what_the_model_rounds_a_kernel_may_round() -> None:
    """A norm subtracts a mean ten times the deviation: bfloat16 products lose more than the result's rounding does."""
    func = EXAMPLES["layer_norm"].build(m=32, n=128, k=2048, dtype="bfloat16")
    spec = analyze(func)

    half = Judge(func, 32, 0, LLVM)

    def hands_over(*tensors: torch.Tensor) -> None:
        (out,) = reference(func, random_inputs(func, 32, 1, 0), of_model(spec))
        tensors[-1].copy_(torch.from_numpy(out))

    def exact(*tensors: torch.Tensor) -> None:
        (out,) = reference(func, random_inputs(func, 32, 1, 0))
        tensors[-1].copy_(torch.from_numpy(out))

    (lost,), (least,) = (half.run(kernel).errors.values() for kernel in (hands_over, exact))
    assert half.run(hands_over).failure == ""
    assert lost > 2 * least
    wide = func.with_attr("comfuse.wide_product", True)
    assert launch(wide, exact, 32, 0, LLVM).failure == ""
    assert "allowed" in launch(wide, hands_over, 32, 0, LLVM).failure


@pytest.mark.parametrize("offset", [-1, 0])
def test_guards_begin_at_the_first_and_last_byte(offset: int) -> None:
    guarded = Guarded((3, 5), torch.bfloat16, "cpu")
    assert guarded.tensor.data_ptr() % 16 == 0
    guarded.tensor.fill_(7.0)
    assert guarded.intact
    at = GUARD_BYTES + offset + (30 if offset == 0 else 0)
    guarded.memory[at] = 0
    assert not guarded.intact


def test_first_launches_in_a_child() -> None:
    func = case("cooperative_cluster").func
    with FirstLaunches("llvm") as launches:
        first = launches.check("kernel", func, ROWS)
        again = launches.check("kernel", func, ROWS, seed=1)
    assert first.failure == again.failure == ""
    assert 0 < first.errors["stage_2_out0"] < 4e-3
    assert first.report().splitlines()[0] == "kernel, 384 rows: ok"


def child(text: str) -> tuple[str, ...]:
    """A stand-in for the child that speaks its protocol."""
    head = "import json, sys, time\ndef send(**m): print(json.dumps(m), flush=True)\nsend(event='ready')\n"
    return (sys.executable, "-c", f"{head}for line in sys.stdin:\n {text}")


def test_a_hang_is_reported_with_plan_and_source() -> None:
    command = child("send(event='built', source='__global__ void k()'); time.sleep(600)")
    with FirstLaunches("cuda", Limits(launch=0.3), command) as launches:
        result = launches.check("kernel", case("cooperative_cluster").func, ROWS)
    assert result.failure == "did not end after its launch within 0.3 s: it hangs"
    assert "'exchange': 'cluster'" in result.report()
    assert result.report().endswith("__global__ void k()")


def test_a_fault_is_reported_and_the_next_kernel_gets_a_new_child() -> None:
    command = child("send(event='built', source='s'); sys.exit('illegal address')")
    with FirstLaunches("cuda", Limits(), command) as launches:
        for _ in range(2):
            result = launches.check("kernel", case("cooperative_cluster").func, ROWS)
            assert "status 1" in result.failure
            assert "illegal address" in result.failure


def script(tmp_path: Path, text: str) -> str:
    path = tmp_path / "sanitizer"
    path.write_text(f"#!{sys.executable}\nimport sys, subprocess\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


#: what racecheck prints of a race, with line information
RACE = """print('''========= Error: Race reported between Write access at {first}(void *)+0x21d0 in kernels.cu:269
=========     and Read access at {second}(unsigned int, void *)+0x2340 in kernels.cu:196 [1536 hazards]
========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)'''); sys.exit(9)"""


@pytest.mark.parametrize(
    ("text", "status", "code"),
    [
        ("print('========= ERROR SUMMARY: 0 errors')", "clean", 0),
        ("print('========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)'); sys.exit(9)", "found", 1),
        (RACE.format(first="comfuse_post_cluster", second="comfuse_take_cluster_4"), "mailbox", 0),
        (RACE.format(first="main_kernel", second="comfuse_take_cluster_4"), "found", 1),
        ("sys.exit(10)", "wrong", 1),
        ("sys.exit(3)", "failed", 1),
        ("import time; time.sleep(600)", "hang", 1),
    ],
)
def test_sanitizer_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, status: str, code: int) -> None:
    module: Any = load_script("benchmarks/sanitize.py")
    monkeypatch.setattr(module, "LIMIT", 5.0 if status != "hang" else 0.3)
    arguments = [
        "--program",
        script(tmp_path, text),
        "--output",
        str(tmp_path),
        "--families",
        "softmax",
        "pingpong_grid",
    ]
    assert module.main([*arguments, "--tools", "memcheck"]) == code
    log = json.loads((tmp_path / "sanitizers.json").read_text())
    assert [run["status"] for run in log["sanitizers"]] == [status] * 2
    assert [run["family"] for run in log["sanitizers"]] == ["softmax", "pingpong_grid"]
    assert {"device", "date", "commit", "versions"} <= set(log)
    if status == "found":
        assert log["sanitizers"][0]["summary"] == "2 hazards displayed (2 errors, 0 warnings)"


def test_what_the_sanitizer_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """The process under the sanitizer: a launch and its numbers; here on LLVM."""
    module: Any = load_script("benchmarks/sanitize.py")
    assert module.launch_one("pingpong_grid", "llvm") == 0
    assert json.loads(capsys.readouterr().out)["overrun"] == []
