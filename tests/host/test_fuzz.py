"""Fuzzing: 200 examples, the same every time; what a failure leaves behind; what campaigns have found, by kind."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tvm_comfuse
from tvm_comfuse.build import to_module
from tvm_comfuse.fusion import fuse
from tvm_comfuse.refusal import Refusal
from tvm_comfuse.schedules.device import H200
from tvm_comfuse.target import parse_target
from tvm_comfuse.tir_passes.lower import is_cluster, lower
from tvm_comfuse.verify.faults import FAULTS
from tvm_comfuse.verify.fuzz import Case, FuzzError, Outcome, run_case, script_of
from tvm_comfuse.verify.fuzz import case as steps
from tvm_comfuse.verify.fuzz.campaign import CI, campaign
from tvm_comfuse.verify.fuzz.case import Effort
from tvm_comfuse.verify.fuzz.models import Model, Result, Step
from tvm_comfuse.verify.fuzz.plans import Choice
from tvm_comfuse.verify.fuzz.strategies import Example
from tvm_comfuse.verify.interpreter import Program
from tvm_comfuse.verify.static import check

ROOT = Path(__file__).resolve().parents[2]
FAILURES = ROOT / "tests" / "fuzz_failures"
EXAMPLES, SEED = 200, 7
#: what the examples must have met, and how often at least
MET = {
    "discovery": 200,
    "static": 200,
    "interpreter": 60,
    "llvm": 40,
    "module": 5,
    "cooperative": 60,
    "pingpong": 30,
    "memory": 10,
    "exchange none": 10,
    "exchange warp": 20,
    "exchange cta": 3,
    "exchange cluster": 10,
    "exchange grid": 10,
    "bfloat16": 50,
    "float16": 50,
    "w NK": 50,
    "w KN": 50,
    "symbolic": 40,
    "ragged N": 30,
    "multicast": 20,
    "shared A": 10,
    "resident W": 20,
    "deferred": 10,
    "quads": 25,
    "narrow tile": 5,
    "tiles in turn": 8,
    "fast math": 30,
    "dependent launch": 40,
    "packed tail": 2,
    "more MMA groups": 10,
    "tma operand": 10,
    "tma store": 40,
    "stages 3": 10,
    "stages 5": 8,
    "results 3": 10,
    "several launches": 10,
}


def test_examples() -> None:
    summary = campaign(EXAMPLES, SEED, CI, save=FAILURES)
    assert not summary.failures, str(summary)
    assert summary.examples >= EXAMPLES
    met = summary.steps + summary.kinds
    assert {name: met[name] for name, least in MET.items() if met[name] < least} == {}


# --- what campaigns have found ----------------------------------------------------------------------------------------

TILE = Step("operand", operand="tile")
AGAIN = Step("operand", value=1, other=3, operand="tile", again=True)
HALF, WIDE = Result(dtype="bfloat16"), Result(dtype="float32")
FOUND: dict[str, tuple[tuple[Step, ...], tuple[Result, ...]]] = {
    # discovery carries a value that two results of the last stage need; the reader of canonical functions refused it
    "carried_in_the_last_stage": ((Step("tanh"),), (HALF, WIDE)),
    # the second result of a stage read an operand from the tile that the first result had taken: wrong numbers
    "operand_read_by_two_results": ((TILE, AGAIN), (HALF, replace(HALF, value=1))),
    # the same with the second reader in the pass that makes a row value
    "operand_read_by_a_result_and_a_reduction": (
        (TILE, AGAIN, Step("max"), Step("with_row", value=2)),
        (HALF, replace(HALF, value=2)),
    ),
    # results that do not need their stage's carried value are ready first, but were sent last: a hang
    "a_result_ready_before_the_carried_value": (
        (Step("max"), Step("tanh"), Step("with_row"), Step("row_operand", operand="tile")),
        (replace(HALF, value=1), Result(1, dtype="float16"), HALF),
    ),
}


@pytest.mark.parametrize("layout", [0, 1], ids=["cooperative", "pingpong"])
@pytest.mark.parametrize("name", FOUND)
def test_found(name: str, layout: int) -> None:
    model = Model(*FOUND[name])
    outcome = run(Example(model, Choice(layout=layout, units=3, parts=2), seed=0, slow=None, launches=1))
    assert outcome.case is not None
    assert "tma" in outcome.case.plan.store
    assert not outcome.stops


@pytest.mark.parametrize("parts", [1, 2], ids=["cta", "cluster"])
def test_found_a_warp_group_without_columns_had_weight_in_a_mean(parts: int) -> None:
    """Two groups side by side, N a multiple of their tile but not of the CTA's columns: the last group is behind N."""
    half = Choice(layout=2, parts=parts, missing_columns=8)
    outcome = run(Example(Model((Step("layer_norm"),), (HALF,)), half, seed=0, slow=None, launches=1))
    assert outcome.case is not None
    assert outcome.spec is not None
    plan = outcome.case.plan
    assert outcome.spec.n % plan.cta_columns == plan.tile_n == 64
    assert plan.exchange == ("cta" if parts == 1 else "cluster")


def run(example: Example) -> Outcome:
    """An example that must not be rejected."""
    outcome = run_case(*example.case(), Effort(interpreter=1 << 30))
    assert not outcome.rejected
    assert {"interpreter", "llvm", "module"} <= set(outcome.seconds)
    return outcome


class Nothing(torch.nn.Module):
    """TVM simplifies the difference to a constant: a result of it, and a row reduction that reads nothing."""

    def __init__(self, reduced: bool):
        super().__init__()
        self.linear, self.reduced = torch.nn.Linear(64, 128, bias=False, dtype=torch.bfloat16), reduced

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y + (y - y).mean(-1, keepdim=True) if self.reduced else (y - y) * 0.5


def test_found_what_becomes_a_constant() -> None:
    x = torch.randn(16, 64, dtype=torch.bfloat16)
    model = Nothing(True).eval()
    (matmul,) = tvm_comfuse.explain(model, "h200", example_args=(x,)).matmuls
    assert not matmul.fused
    assert "constant" in str(matmul.reason)
    with torch.no_grad():
        found = tvm_comfuse.compile(model, "llvm", example_args=(x,)).run(x)
        torch.testing.assert_close(found, model(x), atol=0.02, rtol=0.02)
    # for a CPU TVM fails at the store of a constant bfloat16, so the kernel alone
    fused, _ = fuse(to_module(Nothing(False).eval(), (x,)), parse_target("h200"))
    (func,) = (func for _, func in fused.functions_items() if is_cluster(func))
    kernel = lower(func, "zeros")
    assert check(kernel, H200) == []
    shapes = [tuple(int(extent) for extent in param.shape) for param in func.params[:2]]
    (out,) = Program(kernel).run([np.ones(shape, "bfloat16") for shape in shapes]).outputs.values()
    assert not out.any()


QUADS = Choice(quads=True, stores=7, operands=7)


@pytest.mark.parametrize("units", [2, 3])
def test_found_two_blocks_of_rows_shared_the_words_of_eight_neighbours(units: int) -> None:
    """tile_m 128 with w_order quads: the stores of one block of 64 rows had words of the other."""
    example = Example(Model((Step("operand"),), (HALF,)), replace(QUADS, tile=4, units=units), 0, None, 1)
    plan = run(example).case.plan  # type: ignore[union-attr]
    assert (plan.tile_m, plan.w_order) == (128, "quads")


@pytest.mark.parametrize("steps", [("layer_norm", "softmax"), ("softmax", "layer_norm")])
def test_found_a_round_with_two_pairs_in_a_deferred_kernel(steps: tuple[str, str]) -> None:
    """The second reduction of one pair had the offset that parking took from the other one."""
    both = Model(
        (Step(steps[0]), Step(steps[1], value=1), Step("sum", value=2), Step("earlier", value=0, other=1)),
        (HALF, replace(HALF, value=1)),
    )
    choice = Choice(defer=True, parts=2, units=3, stores=7, operands=7)
    outcome = run(Example(both, choice, seed=0, slow=None, launches=2))
    assert outcome.case is not None
    assert outcome.case.plan.defer  # type: ignore[union-attr]


def test_found_tanh_of_small_numbers_on_llvm() -> None:
    """TVM makes of it (1 - t) / (1 + t), t = exp(-2 x): right to 1e-7 of 1, not of x.  The kernel's own is held to float32."""
    # twice multiplied by tanh of its mean, which is 1 / 64 and then less than 1 / 4096
    steps = (Step("softmax"), Step("mean", other=1), Step("mean", other=1))
    # a difference raises
    outcome = run(Example(Model(steps, (WIDE,), wide=True), Choice(), seed=0, slow=None, launches=1))
    assert outcome.case is not None


# --- what a failure leaves behind -------------------------------------------------------------------------------------

NORM = Example(Model((Step("layer_norm"),), (HALF,)), Choice(parts=2, units=2), seed=0, slow=None, launches=2)


def replayed(failure: FuzzError, folder: Path) -> tuple[int, str]:
    """Exit code and output of a failure's script, run far from the checkout."""
    path = folder / "failure.py"
    path.write_text(script_of(failure))
    done = subprocess.run(
        [sys.executable, str(path)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def test_a_replay_fails_as_the_example_did(tmp_path: Path) -> None:
    given, choose = NORM.case()
    plan = run_case(given, choose, CI).case.plan  # type: ignore[union-attr]
    with pytest.raises(FuzzError) as raised:
        run_case(replace(given, plan=replace(plan, ctas=plan.ctas + 1)))
    assert raised.value.kind == "schedule-refused"
    code, text = replayed(raised.value, tmp_path)
    assert code == 1
    assert text.startswith("fails: schedule-refused: ctas must be a multiple")


def test_a_fault_of_a_kernel_is_a_failure_and_its_replay_has_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lower = steps.lower
    monkeypatch.setattr(steps, "lower", lambda func, name: FAULTS["quad-missing"].apply(lower(func, name)))
    given, choose = NORM.case()
    with pytest.raises(FuzzError) as raised:
        run_case(given, choose)
    failure = raised.value
    assert failure.kind == "interpreter-numbers"
    assert failure.case.plan is not None
    assert failure.case.launches == NORM.launches
    # the fault is not in the script's process
    assert replayed(failure, tmp_path) == (0, "passes\n")


def test_an_exception_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise IndexError("planted")

    monkeypatch.setattr(steps, "check", broken)
    with pytest.raises(FuzzError, match="IndexError: planted") as raised:
        run_case(*NORM.case())
    assert raised.value.kind == "static-raises"
    assert isinstance(raised.value.__cause__, IndexError)


def test_a_failure_is_shrunk_and_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clusters with a row maximum are refused: the smallest model has just that and one result of it."""

    def planted(spec: Any) -> list[Refusal]:
        return [Refusal("planted", "no maxima")] if any(each.op == "max" for each in spec.reductions) else []

    monkeypatch.setattr(steps, "supported", planted)
    folder = tmp_path / "failures"
    summary = campaign(25, 3, Effort(interpreter=0, llvm=1 << 20, module=1 << 20), save=folder)
    (failure,), (path,) = summary.failures, summary.files
    assert failure.kind == "schedule-unsupported"
    assert path == folder / "schedule_unsupported.py"
    assert path.read_text() == script_of(failure)
    names = operators(failure.case)
    assert len(names - {"relax.permute_dims", "relax.astype"}) <= 5
    assert names & {"relax.max", "relax.nn.softmax", "relax.nn.log_softmax"}
    assert "planted" in str(summary)


def operators(case: Case) -> set[str]:
    """Relax operators of a case's model."""
    bindings = [binding for block in case.module["main"].body.blocks for binding in block.bindings]
    return {str(binding.value.op.name) for binding in bindings if hasattr(binding.value, "op")}
