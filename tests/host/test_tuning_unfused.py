"""The split form of a task: that its kernels compute what the fused one does, and when its time is taken."""

from __future__ import annotations

import json
import threading
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import tvm
from split_examples import REDUCING
from tuning_examples import TARGET, InstantBuilder, MadeUpRunner, done, made_up, search
from tvm import relax
from typer.testing import CliRunner

import tvm_comfuse
from tvm_comfuse.bench.ops import OPS
from tvm_comfuse.cli.main import app
from tvm_comfuse.cli.tune import table
from tvm_comfuse.forms import FUSED, MEASURED, SPLIT
from tvm_comfuse.frontend import from_relax
from tvm_comfuse.given_plans import GivenPlans
from tvm_comfuse.schedules.device import H200
from tvm_comfuse.schedules.plan import Plan
from tvm_comfuse.target import parse_target
from tvm_comfuse.tuning.api import TunedTask, TuneResult, split_of
from tvm_comfuse.tuning.build import Built, build
from tvm_comfuse.tuning.chain import Chain
from tvm_comfuse.tuning.log import Log
from tvm_comfuse.tuning.measurer import Measured, Measurer
from tvm_comfuse.tuning.record import MemoryStore
from tvm_comfuse.tuning.search import Search
from tvm_comfuse.tuning.task import Task, tasks_of

LLVM = parse_target("llvm")


def task_of(module: tvm.IRModule, target: Any = TARGET, rows: int | None = None) -> Task:
    (task,), _ = tasks_of(from_relax(module), H200, rows, lambda cluster: split_of(target, H200, rows, cluster))
    return task


def several_results(m: Any, n: int, k: int) -> tvm.IRModule:
    """The sum is a result and what the rows function reads; its maximum and its norm come out as well."""
    builder = relax.BlockBuilder()
    x, w, r = (
        relax.Var(name, relax.TensorType(s, "float16")) for name, s in (("x", (m, k)), ("w", (k, n)), ("r", (m, n)))
    )
    with builder.function("main", [x, w, r]):
        with builder.dataflow():
            total = builder.emit_output(builder.emit(relax.op.add(r, builder.emit(relax.op.matmul(x, w)))))
            most = builder.emit_output(relax.op.max(total, axis=[1], keepdims=True))
            norm = builder.emit_output(relax.op.nn.softmax(total))
        builder.emit_func_output(relax.Tuple([norm, total, most]))
    return builder.finalize()


@pytest.mark.parametrize("name", [*REDUCING, "several results", "symbolic rows"])
def test_the_two_kernels_compute_what_the_fused_one_does(name: str, tmp_path: Path) -> None:
    rows = 40 if name == "symbolic rows" else None
    if name in REDUCING:
        module = OPS[name].relax_module(48, 128, 64)
    else:
        module = several_results(tvm.tirx.Var("m", "int64") if rows else 48, 128, 64)
    task = task_of(module, LLVM, rows)
    assert task.unfused is not None
    built = build(task.unfused.module, LLVM, tmp_path / "two.so")
    assert built.reason == "", built.failure
    chain = Chain.from_dict(json.loads(json.dumps(task.unfused.chain.to_dict())))
    assert chain == task.unfused.chain
    measured = Measurer(task.func, task.rows, LLVM, chain=chain).measure(built.library, chained=True)
    assert measured.reason == "", measured.failure
    assert measured.us


def test_kernels_with_their_operands_in_another_order_are_wrong(tmp_path: Path) -> None:
    task = task_of(OPS["layer_norm"].relax_module(48, 128, 64), LLVM)
    assert task.unfused is not None
    built, chain = build(task.unfused.module, LLVM, tmp_path / "two.so"), task.unfused.chain
    gemm, (name, (value, gamma, beta, out)) = chain.kernels
    other = replace(chain, kernels=(gemm, (name, (value, beta, gamma, out))))
    measured = Measurer(task.func, task.rows, LLVM, chain=other).measure(built.library, chained=True)
    assert measured.reason == "wrong"


def test_a_result_that_is_passed_on_is_no_second_tensor() -> None:
    task = task_of(several_results(48, 128, 64))
    assert task.unfused is not None
    (_, gemm), (_, rows) = task.unfused.chain.kernels
    parameters = [str(param.name) for param in task.func.params]
    assert max(*gemm, *rows) == len(parameters) - 1
    assert rows[0] == gemm[-1]


def test_products_without_a_row_reduction_have_none() -> None:
    assert task_of(OPS["bias_gelu"].relax_module(48, 128, 64)).unfused is None


# --- the search -------------------------------------------------------------------------------------------------------


class SplitBuilder(InstantBuilder):
    """Its library of a split form is the word."""

    def __init__(self, reason: str = ""):
        super().__init__()
        self.reason = reason

    def submit(self, func: Any) -> Future[Built]:
        if isinstance(func, tvm.IRModule):
            return done(Built(reason=self.reason, failure=self.reason) if self.reason else Built(SPLIT))
        return super().submit(func)


class SplitRunner(MadeUpRunner):
    """The split form takes 30 us where the reference takes 20; `clock` slows both down.

    splits  references of its measurements
    """

    def __init__(self, clock: float = 1.0, reason: str = ""):
        super().__init__(lambda plan, number: self.time(plan) * clock)
        self.clock, self.reason = clock, reason
        self.splits: list[str] = []
        self.time: Any = None

    def submit(
        self, what: Task, library: str, reference: str = "", check: bool = True, chained: bool = False
    ) -> Future[Measured]:
        self.time = self.time or made_up(what.spec, 1)
        assert chained == (library == SPLIT)
        if not chained:
            return super().submit(what, library, reference, check)
        self.splits.append(reference)
        if self.reason:
            return done(Measured(reason=self.reason, failure=self.reason))
        other = self.us(Plan.from_json(reference), 0) if reference else None
        return done(Measured((30.0 * self.clock,), other, error=1e-3, allowed=2e-3))


def norm() -> Task:
    return task_of(OPS["layer_norm"].relax_module(1024, 256, 256))


def run(runner: SplitRunner, store: MemoryStore | None = None, builder: Any = None, **options: Any) -> Search:
    found = search(builder or SplitBuilder(), runner, store, trials=8, **options)
    found.run([norm()])
    return found


def test_it_is_timed_once_beside_the_default_plan_and_every_record_has_it(tmp_path: Path) -> None:
    runner, store = SplitRunner(), MemoryStore()
    found = run(runner, store)
    (progress,) = found.progress
    assert runner.splits == [progress.default.to_json()]
    assert progress.trials == progress.measured == 8
    records = store.query(progress.task.workload, TARGET)
    assert [record.split_us for record in records] == [pytest.approx(30.0)] * 8
    # another day, another clock: what is known is not measured again
    again = run(later := SplitRunner(1.25), store)
    assert later.splits == []
    assert again.progress[0].split.us == pytest.approx(30.0)
    assert len(store.query(progress.task.workload, TARGET)) == 16
    # where the records have none, it is corrected for the clock
    other = MemoryStore()
    first = search(InstantBuilder(), SplitRunner(), other, trials=8)
    first.run([Task(progress.task.workload, 1024, ["mm"])])
    assert {record.split_us for record in other.query(progress.task.workload, TARGET)} == {None}
    corrected = run(SplitRunner(1.25), other)
    assert corrected.progress[0].split.us == pytest.approx(30.0)


@pytest.mark.parametrize(
    ("builder", "runner"), [(SplitBuilder("compile"), SplitRunner()), (SplitBuilder(), SplitRunner(reason="wrong"))]
)
def test_without_a_time_it_stops_nothing(builder: SplitBuilder, runner: SplitRunner, tmp_path: Path) -> None:
    found = run(runner, builder=builder, folder=tmp_path)
    (progress,) = found.progress
    assert (progress.measured, progress.split.us) == (8, None)
    assert progress.split.failure == (builder.reason or runner.reason)
    (event,) = [event for event in Log(tmp_path).events() if event["event"] == "split"]
    assert event["reason"] == progress.split.failure
    column = next(column for column in table(found).columns if column.header == "unfused us")
    assert list(column.cells) == [progress.split.failure]


def test_an_interrupt_keeps_what_waited_for_it() -> None:
    """The split form is still being built when the default plan has its time."""
    interrupted, store = threading.Event(), MemoryStore()

    class Slow(SplitBuilder):
        def submit(self, func: Any) -> Future[Built]:
            return Future() if isinstance(func, tvm.IRModule) else super().submit(func)

    found = search(Slow(), SplitRunner(), store, trials=8)
    found.on_change = lambda search: interrupted.set() if search.progress and search.progress[0].held else None
    found.interrupted = interrupted
    found.run([norm()])
    assert found.stopped == "interrupt"
    (progress,) = found.progress
    records = store.query(progress.task.workload, TARGET)
    assert len(records) == progress.measured > 0
    assert {record.split_us for record in records} == {None}


def test_the_faster_form_is_what_a_result_gives(tmp_path: Path) -> None:
    plan = norm_plan()
    tasks = [
        TunedTask((name,), (1024, 256, 256), plan, us, 25.0, split_us, 10.0, 8, {})
        for name, us, split_us in (("a", 20.0, 21.0), ("b", 20.0, 19.0), ("c", 20.0, None), ("d", None, 19.0))
    ]
    assert [task.form for task in tasks] == [FUSED, SPLIT, FUSED, FUSED]
    result = TuneResult("h200", tuple(tasks[:3]), "trials")
    assert result.plans == {"a": plan, "b": SPLIT, "c": plan}
    given = GivenPlans.of(json.loads(json.dumps(result.to_dict())))
    assert given.splits == {"b"}
    assert set(given.plans) == {"a", "c"}


@pytest.mark.parametrize(("split_us", "said"), [(19.0, True), (21.0, False)])
def test_the_command_says_where_two_kernels_win(monkeypatch: pytest.MonkeyPatch, split_us: float, said: bool) -> None:
    task = TunedTask(("a", "b"), (1024, 256, 256), norm_plan(), 20.0, 25.0, split_us, 10.0, 8, {})
    monkeypatch.setattr(
        "tvm_comfuse.tuning.api.tune", lambda *_, **__: TuneResult("h200", (task,), "trials", records=Path("r"))
    )
    shown = CliRunner().invoke(app, ["tune", "model.py:build"])
    assert shown.exit_code == 0, shown.output
    assert ("a, b: two kernels take less time and are what compile takes" in shown.output) == said


def norm_plan() -> Plan:
    from tvm_comfuse.schedules.choose import default_plan

    plan = default_plan(norm().spec, H200)
    assert isinstance(plan, Plan)
    return plan


def test_a_search_on_a_cpu_times_both_forms(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.LayerNorm(128)).to(torch.bfloat16).eval()
    x = torch.randn(96, 64, dtype=torch.bfloat16)
    options: dict[str, Any] = {"example_args": (x,), "trials": 2, "records": tmp_path, "parallel": 1}
    (task,) = tvm_comfuse.tune(model, "llvm", **options).tasks
    assert task.us is not None
    assert task.split_us is not None
    (matmul,) = tvm_comfuse.explain(model, "llvm", example_args=(x,), tuning_records=tmp_path).matmuls
    assert matmul.forms is not None
    assert (matmul.forms.basis, matmul.forms.chosen) == (MEASURED, task.form)
    assert matmul.forms.split_us == pytest.approx(task.split_us)
    assert matmul.forms.fused_us == pytest.approx(task.us)
