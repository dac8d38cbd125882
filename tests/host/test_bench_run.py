"""Running suites: the child process, TorchInductor's settings, our kernel's call, and a whole run on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import tvm
from tvm import relax, te

from tvm_comfuse.bench import contenders, run_suite
from tvm_comfuse.bench.chain import kernel_calls
from tvm_comfuse.bench.checks import RowCheck, check_row, run_seed
from tvm_comfuse.bench.isolate import IsolatedChecks, Limits
from tvm_comfuse.bench.ops import OPS
from tvm_comfuse.bench.ours import OurKernel
from tvm_comfuse.bench.report import BenchReport, RowResult
from tvm_comfuse.bench.run import record_rounds
from tvm_comfuse.bench.suites import Row, SuiteError
from tvm_comfuse.bench.timing import Captured, in_turns
from tvm_comfuse.errors import TargetError

ROW = Row("mine", "small", "layer_norm", 48, 64, 32)
LIMITS = Limits(start=60, build=60, launch=1.0)
#: what a child of these tests starts with
ANSWER = """
import json, sys, os, time
def say(event, **check): print(json.dumps({"event": event, "check": check}), flush=True)
"""


def child(text: str) -> tuple[str, ...]:
    return (sys.executable, "-c", ANSWER + textwrap.dedent(text))


# --- the child process -----------------------------------------------------------------------------------------------


def test_isolated_check_gives_the_childs_answer() -> None:
    command = child("""
        say('ready')
        for line in sys.stdin:
            row = json.loads(line)
            say('built', fused=True)
            say('done', fused=True, seeds=[{'seed': s, 'passed': True} for s in row['seeds']], via=row['target'])
    """)
    with IsolatedChecks(LIMITS, command) as checks:
        for seeds in ([0, 1], [2]):
            check = checks.check(ROW, seeds, "llvm")
            assert check.passed
            assert check.via == "llvm"
            assert [seed["seed"] for seed in check.seeds] == seeds


def test_a_hanging_kernel_ends_with_its_process_and_the_next_row_runs(tmp_path: Path) -> None:
    marker = tmp_path / "hung"
    command = child(f"""
        say('ready')
        for line in sys.stdin:
            say('built', fused=True, plan={{'tile_m': 64}})
            if not os.path.exists({str(marker)!r}):
                open({str(marker)!r}, 'w').write(str(os.getpid()))
                time.sleep(600)
            say('done', fused=True, seeds=[{{'seed': 0, 'passed': True}}])
    """)
    with IsolatedChecks(LIMITS, command) as checks:
        hung = checks.check(ROW, [0], "llvm")
        assert hung.fused
        assert hung.plan == {"tile_m": 64}
        assert hung.passed is False
        assert "hangs" in str(hung.failure)
        assert not Path(f"/proc/{marker.read_text()}").exists()
        assert checks.check(ROW, [0], "llvm").passed


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sys.exit(3)", "start ended: status 3"),
        ("say('ready'); sys.stdin.readline(); sys.stderr.write('no loader'); sys.exit(1)", "status 1; no loader"),
        ("say('ready'); sys.stdin.readline(); say('built', fused=True); os.abort()", "launch ended: status -6"),
        ("say('ready'); sys.stdin.readline(); print('garbage', flush=True); time.sleep(0.1)", "status 0"),
    ],
)
def test_a_dying_child_is_a_failure_of_the_row(text: str, words: str) -> None:
    with IsolatedChecks(LIMITS, child(text)) as checks:
        check = checks.check(ROW, [0], "llvm")
    assert check.passed is False
    assert words in str(check.failure)


def test_a_silent_child_is_a_failure_of_the_row() -> None:
    with IsolatedChecks(Limits(start=0.3), child("time.sleep(600)")) as checks:
        assert "did not start within 0.3 s" in str(checks.check(ROW, [0], "llvm").failure)


# --- checks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["none", "unwritten", "scaled"])
def test_run_seed_finds_wrong_kernels(fault: str) -> None:
    op = OPS[ROW.op]

    def run(inputs: list[torch.Tensor], out: torch.Tensor) -> None:
        value = op.exact(inputs) * (1.02 if fault == "scaled" else 1.0)
        rows = slice(0, ROW.M - 1) if fault == "unwritten" else slice(None)
        out[rows] = value[rows].to(out.dtype)

    report = run_seed(ROW, OurKernel(run, {}), 0, "cpu")
    assert report["passed"] is (fault == "none")
    assert report["nonfinite"] == (ROW.N if fault == "unwritten" else 0)


def test_the_worst_seed_is_reported() -> None:
    seeds = [
        {"seed": 0, "error": 1e-3, "eager_error": 2e-3, "passed": True},
        {"seed": 1, "error": 3e-3, "eager_error": 2e-3, "passed": True},
        {"seed": 2, "error": 3.1e-3, "eager_error": 4e-3, "passed": True},
    ]
    result = RowResult.of(ROW)
    check = RowCheck(fused=True, seeds=seeds)
    check.copy_to(result)
    assert (result.error, result.passed) == (3e-3, True)
    check.seeds.append({"seed": 3, "error": float("nan"), "eager_error": 1e-3, "passed": False})
    check.copy_to(result)
    assert result.error != result.error
    assert result.passed is False
    assert RowCheck().passed is None


# --- TorchInductor ---------------------------------------------------------------------------------------------------


class Fixed(Captured):
    """A contender that always takes the same time."""

    def __init__(self, us: float):
        super().__init__(None, 1, lambda: None)
        self.us = us

    def measure(self) -> float:
        return self.us


def inductor(times: dict[str, float], budget: float = 1e9, level: str = "full") -> RowResult:
    """The settings of a level, captured by what knows which setting is on, without compiling anything."""
    import torch._inductor.config as config

    def capture(call: Callable[..., Any], sets: Sequence[Sequence[torch.Tensor]]) -> Captured:
        for name in reversed(contenders.INDUCTOR_SETTINGS):
            setting = contenders.INDUCTOR_SETTINGS[name]
            if all(config.get_config_copy()[key] == value for key, value in setting.items()):
                if name not in times:
                    raise RuntimeError(f"no valid triton configs for {name}")
                return Fixed(times[name])
        raise AssertionError("no setting is on")

    op, result = OPS["bias"], RowResult.of(ROW)
    found = contenders.capture_inductor(op, [op.make_inputs(4, 8, 8)], level, budget, capture)
    result.inductor = {name: each.why for name, each in found.items() if isinstance(each, contenders.Skipped)}
    graphs = {f"inductor {name}": each.measure for name, each in found.items() if isinstance(each, Captured)}
    record_rounds(result, in_turns(graphs))
    return result


def test_the_best_setting_of_inductor_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    times = {"default": 9.0, "coordinate-descent": 7.0, "max-autotune-no-epilogue": 8.0, "max-autotune-tma": 7.5}
    result = inductor(times)
    assert (result.inductor_us, result.inductor_setting) == (7.0, "coordinate-descent")
    assert set(result.inductor) == set(contenders.INDUCTOR_SETTINGS)
    assert {name: us for name, us in result.inductor.items() if isinstance(us, float)} == times
    assert result.rounds["inductor default"] == [9.0, 9.0, 9.0]
    assert "no valid triton configs" in str(result.inductor["max-autotune"])


def test_inductor_keeps_to_its_level_and_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    assert inductor({}, level="none").inductor == {}
    failed = inductor({}, level="default")
    assert (failed.inductor_us, failed.inductor_setting, list(failed.inductor)) == (None, None, ["default"])
    assert "not tried" in str(inductor({}, budget=-1.0).inductor["max-autotune"])


def test_settings_are_compiled_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a code object of its own, or PyTorch would take the first compilation for all of them."""
    compiled: list[Any] = []

    def keep(function: Any, **_: Any) -> Any:
        compiled.append(function)
        return function

    monkeypatch.setattr(torch, "compile", keep)
    inductor(dict.fromkeys(contenders.INDUCTOR_SETTINGS, 1.0))
    assert len({id(function.__code__) for function in compiled}) == len(contenders.INDUCTOR_SETTINGS)
    inputs = OPS["bias"].make_inputs(4, 8, 8)
    assert all(torch.equal(function(*inputs), OPS["bias"].eager(*inputs)) for function in compiled)


# --- turns -----------------------------------------------------------------------------------------------------------


def test_contenders_take_turns_and_the_median_counts() -> None:
    order: list[str] = []
    times = {"ours": iter([5.0, 7.0, 6.0]), "mm": iter([1.0, 3.0, 2.0])}

    def turn(name: str) -> Callable[[], float]:
        def measure() -> float:
            order.append(name)
            return next(times[name])

        return measure

    result = RowResult.of(ROW)
    record_rounds(result, in_turns({name: turn(name) for name in times}))
    assert order == ["ours", "mm"] * 3
    assert (result.ours_us, result.mm_us) == (6.0, 2.0)
    assert result.rounds == {"ours": [5.0, 7.0, 6.0], "mm": [1.0, 3.0, 2.0]}


def test_a_contender_that_fails_takes_no_further_turn() -> None:
    def broken() -> float:
        order.append("broken")
        raise RuntimeError("an illegal memory access")

    order: list[str] = []
    result = RowResult.of(ROW)
    record_rounds(result, in_turns({"split": broken, "mm": lambda: 2.0}))
    assert order == ["broken"]
    assert (result.split_us, result.mm_us) == (None, 2.0)
    assert result.failure is not None
    assert "split: RuntimeError: an illegal memory access" in result.failure


def test_every_setting_exists_in_this_pytorch() -> None:
    import torch._inductor.config as config

    names = config.get_config_copy()
    assert {key for setting in contenders.INDUCTOR_SETTINGS.values() for key in setting} <= set(names)
    before = dict(names)
    with contenders.inductor_setting("max-autotune-exhaustive"):
        assert config.max_autotune_gemm_search_space == "EXHAUSTIVE"
        assert config.triton.enable_persistent_tma_matmul
    assert config.get_config_copy() == before


# --- our kernel ------------------------------------------------------------------------------------------------------


def a_module(extra: bool = False, reshaped: bool = False) -> tvm.IRModule:
    """main(a, b, c) = c - b by one kernel, whatever is asked for around it."""
    params = [relax.Var(name, relax.TensorType([4, 8], "float32")) for name in "abc"]
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            first = builder.emit(relax.op.reshape(params[1], (4, 8))) if reshaped else params[1]
            value = builder.emit_te(lambda x, y: te.compute((4, 8), lambda i, j: x[i, j] - y[i, j]), params[2], first)
            if extra:
                value = builder.emit(relax.op.add(value, params[0]))
            result = builder.emit_output(value)
        builder.emit_func_output(result)
    return builder.get()


def test_the_arguments_of_a_module_with_one_kernel() -> None:
    module = a_module()
    found = kernel_calls(module)
    assert found is not None
    (call,) = found
    assert (call.values, call.shape, call.dtype) == ((2, 1), (4, 8), "float32")
    assert isinstance(module[call.name], tvm.tirx.PrimFunc)
    assert kernel_calls(a_module(extra=True)) is None
    assert kernel_calls(a_module(reshaped=True)) is None


SMALL = {
    "families": {
        "mine": {
            "rows": [
                {"name": f"{op}", "op": op, "M": 70, "N": 64, "K": 96, "dtype": dtype}
                for op, dtype in zip(OPS, ["bf16", "f16"] * len(OPS), strict=False)
            ]
            + [{"name": "k_64", "op": "layer_norm", "M": 16, "N": 64, "K": 64}]
            + [{"name": "odd_k", "op": "layer_norm", "M": 16, "N": 64, "K": 36}]
        }
    }
}


@pytest.fixture
def suite_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(SMALL))
    return path


def test_every_op_is_right_on_the_cpu_and_what_is_refused_says_why(suite_file: Path, tmp_path: Path) -> None:
    seen: list[str] = []
    path = tmp_path / "out.json"
    report = run_suite(
        None,
        suite_file,
        target="llvm",
        seeds=2,
        timed=False,
        isolate=False,
        json_path=path,
        progress=lambda row: seen.append(row.name),
    )
    assert seen == [row.name for row in report.rows] == [*OPS, "k_64", "odd_k"]
    for row in report.rows[:-1]:
        assert row.failure is None, row.failure
        assert row.refusal is None, row.refusal
        assert row.passed, row.seeds
        assert row.plan
        assert len(row.seeds) == 2
        assert row.ours_us is None
    refused = report.rows[-1]
    assert not refused.fused
    assert refused.refusal is not None
    assert "36" in refused.refusal["text"]
    assert [row.name for row in BenchReport.read(path).rows] == seen


def test_a_row_in_a_real_child(suite_file: Path) -> None:
    report = run_suite("mine", suite_file, ["rms_norm", "odd_k"], target="llvm", seeds=1, timed=False)
    good, refused = report.rows
    assert good.passed, good.failure
    assert (refused.passed, refused.failure) == (None, None)
    assert refused.refusal is not None


def test_check_row_reports_errors_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("ptxas fatal")

    monkeypatch.setattr("tvm_comfuse.bench.checks.compile_row", broken)
    check = check_row(ROW, [0], "llvm")
    assert check.failure == "RuntimeError: ptxas fatal"
    assert check.passed is False


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"target": "llvm"}, TargetError, "CUDA target to time"),
        ({"target": "mars"}, TargetError, "mars"),
        ({"target": "llvm", "timed": False, "inductor": "best"}, SuiteError, "best"),
        ({"target": "llvm", "timed": False, "others": ["cublas"]}, SuiteError, "cublas"),
        ({"target": "llvm", "timed": False, "suite": "none"}, SuiteError, "none"),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        run_suite(**options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_timing_is_refused() -> None:
    with pytest.raises(TargetError, match="GPU"):
        run_suite("ragged", target="h200")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_gpu_tests_are_collected_and_say_why_they_are_skipped() -> None:
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-q", "-rs", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PyTorch finds no CUDA GPU" in done.stdout
    assert " skipped" in done.stdout.splitlines()[-1]
