"""Sweeps, contests and their file, on made-up times."""

from __future__ import annotations

import importlib.util
import json
import random
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tuning_examples import TARGET, InstantBuilder, MadeUpRunner, made_up, space_of, task

from tvm_comfuse.bench.report import ReportError
from tvm_comfuse.bench.suites import Row
from tvm_comfuse.schedules.device import H200
from tvm_comfuse.schedules.plan import Plan
from tvm_comfuse.tuning.contest import contest
from tvm_comfuse.tuning.database import Database
from tvm_comfuse.tuning.plan_times import PlanTime, PlanTimes, RowTimes
from tvm_comfuse.tuning.sweep import FEWEST_FINALISTS, ROUNDS, Sweep, begin_with

WHAT = task("layer_norm", 1024, 256, 256)
ROW = Row("small", "norm", "layer_norm", 1024, 256, 256)
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def plans(count: int) -> list[Plan]:
    default = row_times().default
    return [default, *(plan for plan in space_of(WHAT).legal if plan != default)][:count]


def row_times() -> RowTimes:
    from tvm_comfuse.schedules.choose import default_plan

    default = default_plan(WHAT.spec, H200)
    assert isinstance(default, Plan)
    return RowTimes(ROW, len(space_of(WHAT).legal), default)


class Measured(MadeUpRunner):
    """Notes which plans were compared."""

    def __init__(self, *options: Any) -> None:
        super().__init__(*options)
        self.checked: list[Plan] = []

    def submit(self, what: Any, library: str, reference: str = "", check: bool = True) -> Any:
        self.checked += [Plan.from_json(library)] * check
        return super().submit(what, library, reference, check)


def test_times_stay_of_use_when_another_plan_becomes_the_default() -> None:
    times = row_times()
    old, new, drifted, failed, unknown = plans(5)
    times.plans = {
        old: PlanTime(us=100.0),
        new: PlanTime(us=99.0, reference_us=110.0),
        drifted: PlanTime(us=120.0, reference_us=125.0),
        failed: PlanTime(reason="wrong"),
    }
    before = {plan: times.us(plan) for plan in times.plans}
    assert before[new] == pytest.approx(90.0)
    assert times.rebase(new)
    assert (times.default, times.baseline_us) == (new, before[new])
    assert [times.us(plan) for plan in before] == pytest.approx(list(before.values()))
    assert not times.rebase(failed)
    assert not times.rebase(unknown)
    assert times.default == new


def test_a_new_default_plan_is_measured_beside_the_one_before() -> None:
    us, times, builder = made_up(WHAT.spec, 1), row_times(), InstantBuilder()
    old, new, other, failing = plans(4)
    runner = MadeUpRunner(lambda plan, _: us(plan) * 1.25)
    times.plans = {old: PlanTime(us=us(old)), other: PlanTime(us=us(other), reference_us=us(old))}
    assert begin_with(new, WHAT, times, builder, runner)
    assert (runner.measured, runner.references) == ([new], [old.to_json()])
    assert times.default == new
    assert [times.us(plan) for plan in (old, new, other)] == pytest.approx([us(plan) for plan in (old, new, other)])
    assert begin_with(other, WHAT, times, builder, runner)
    assert len(runner.measured) == 1
    assert not begin_with(failing, WHAT, times, InstantBuilder({failing: "compile"}), runner)
    assert times.default == other


def test_a_sweep_times_every_plan_and_looks_at_the_fastest_again() -> None:
    us, times, every = made_up(WHAT.spec, 1), row_times(), plans(100)
    wrong = min(every[1:], key=us)
    builder = InstantBuilder({every[5]: "verify"})
    # the clock slows down by a third; the fastest plan computes something else, as a look at its numbers shows
    runner = Measured(lambda plan, number: us(plan) * (1 + number / 600), {})
    checked_submit = runner.submit

    def submit(what: Any, library: str, reference: str = "", check: bool = True) -> Any:
        runner.failing = {wrong: "wrong"} if check else {}
        return checked_submit(what, library, reference, check)

    runner.submit = submit  # type: ignore[method-assign]
    Sweep(WHAT, times, builder, runner).run(every)
    assert times.sweep is not None
    assert times.sweep["complete"]
    assert times.sweep["plans"] == 100
    assert times.sweep["failed"] == 2
    assert {plan: time.reason for plan, time in times.plans.items() if time.reason} == {
        every[5]: "verify",
        wrong: "wrong",
    }
    assert 1 <= times.sweep["finalists"] <= FEWEST_FINALISTS
    best = times.best
    assert best == min((plan for plan in every if plan not in (wrong, every[5])), key=us)
    assert times.us(best) == pytest.approx(us(best) * (1 + 1 / 600), rel=1e-6)
    finalist = min((plan for plan in every[1:] if plan not in (wrong, every[5])), key=us)
    assert runner.measured.count(finalist) == 1 + ROUNDS
    assert runner.checked.count(finalist) == 1


def test_a_sweep_that_was_stopped_goes_on(tmp_path: Path) -> None:
    us, times, every = made_up(WHAT.spec, 1), row_times(), plans(60)
    stop = threading.Event()

    def stopping(plan: Plan, number: int) -> float:
        if number == 20:
            stop.set()
        return us(plan)

    Sweep(WHAT, times, InstantBuilder(), MadeUpRunner(stopping), interrupted=stop).run(every)
    known = len(times.plans)
    assert 10 <= known < 60
    assert not (times.sweep or {})["complete"]
    file = PlanTimes.new()
    file.rows[ROW.label] = times
    file.write(tmp_path / "times.json")
    again = PlanTimes.read(tmp_path / "times.json").rows[ROW.label]
    assert list(again.plans) == list(times.plans)
    assert [again.us(plan) for plan in again.plans] == pytest.approx([times.us(plan) for plan in again.plans], rel=1e-5)
    runner = MadeUpRunner(lambda plan, _: us(plan))
    Sweep(WHAT, again, InstantBuilder(), runner).run(every)
    assert (again.sweep or {})["complete"]
    assert len(set(runner.measured) - set(again.ranked()[:FEWEST_FINALISTS])) <= 60 - known
    assert again.best == min(every, key=us)


def test_a_contest_measures_no_plan_twice_and_takes_what_a_sweep_knows() -> None:
    us, times = made_up(WHAT.spec, 1), row_times()
    builder, runner = InstantBuilder(), MadeUpRunner(lambda plan, _: us(plan))
    entries = [
        contest(kind, WHAT, TARGET, H200, times, builder, runner, 24, seed)
        for kind, seed in (("ranked", 0), ("random", 0), ("random", 1))
    ]
    others = [plan for plan in runner.measured if plan != times.default]
    assert len(set(others)) == len(others)
    assert runner.measured.count(times.default) == 1
    assert entries[0]["built"] == 24
    for entry in entries:
        assert list(entry["best"]) == ["8", "16"]
        assert entry["best"]["8"] >= entry["best"]["16"] >= entry["best_us"]
        assert entry["best_us"] == pytest.approx(us(Plan.from_dict(entry["best_plan"])))
    assert times.searches == entries
    # of a whole sweep, in which not all were compared
    times.plans = {plan: PlanTime(us(plan)) for plan in space_of(WHAT).legal} | times.plans
    measured = len(runner.measured)
    free = contest("ranked", WHAT, TARGET, H200, times, builder, runner, 64, 7)
    assert len(runner.measured) == measured
    assert free["built"] == 0
    assert free["best"]["64"] == free["best_us"]


def script_at(path: Path) -> ModuleType:
    found = importlib.util.spec_from_file_location(f"benchmarks_{path.stem}", path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/search.py, which builds and measures nothing."""
    module = script_at(BENCHMARKS / "search.py")

    def us(plan: Plan, _: int) -> float:
        return random.Random(plan.to_json()).uniform(10.0, 20.0)

    class Builder(InstantBuilder):
        def __init__(self, *_: Any) -> None:
            super().__init__()

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: Any) -> None:
            """Nothing runs."""

    class Runner(MadeUpRunner):
        def __init__(self, *_: Any) -> None:
            super().__init__(us)

        __enter__, __exit__ = Builder.__enter__, Builder.__exit__

    monkeypatch.setattr(module, "Builder", Builder)
    monkeypatch.setattr(module, "Runner", Runner)
    return module


def test_the_script_fills_a_file_and_prints_it(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suite = tmp_path / "suites.json"
    ops, sizes = {"norm": "layer_norm", "other": "rms_norm"}, {"M": 64, "N": 64, "K": 64}
    rows = [{"name": name, "op": op, **sizes} for name, op in ops.items()]
    suite.write_text(json.dumps({"families": {"small": {"rows": rows}}}))
    common = ["--json", str(tmp_path / "search.json"), "--suite-file", str(suite)]
    assert script.main([*common, "--exhaustive", "norm", "--time-budget", "2s"]) == 0
    assert "is the best of" in capsys.readouterr().out
    assert script.main([*common, "--compare", "small", "--side-by-side", "2", "--trials", "16"]) == 0
    first = capsys.readouterr().out
    assert "of 2 rows" in first.splitlines()[-1]
    file = PlanTimes.read(tmp_path / "search.json")
    assert {label: len(times.searches) for label, times in file.rows.items()} == {"small/norm": 2, "small/other": 2}
    times = file.rows["small/norm"]
    assert times.sweep is not None
    assert script.share_of_best(times, times.searches[0]) is None  # the sweep was stopped
    times.sweep["complete"] = True
    assert 0 < script.share_of_best(times, times.searches[0]) <= 1
    # the same again has nothing to do
    before = (tmp_path / "search.json").read_text()
    assert script.main([*common, "--compare", "small", "--trials", "16"]) == 0
    assert (tmp_path / "search.json").read_text() == before
    assert capsys.readouterr().out == first
    assert script.main([*common, "--compare", "none"]) == 1
    assert "rows out of" in capsys.readouterr().err


def test_a_file_of_something_else_is_an_error(script: ModuleType, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "file.json"
    for text in ("{", "[]", '{"what": "steps"}'):
        path.write_text(text)
        with pytest.raises(ReportError, match="a file of plan times"):
            PlanTimes.read(path)
    file = PlanTimes.new()
    file.header["device"] = "another GPU"
    file.write(path)
    assert script.main(["--json", str(path), "--compare", "post_norm"]) == 1
    assert "another GPU" in capsys.readouterr().err


def test_rankings_of_a_file_or_a_folder_and_errors_for_anything_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranking = script_at(BENCHMARKS / "ranking.py")
    file, times, us = PlanTimes.new(), row_times(), made_up(WHAT.spec, 1)
    every = random.Random(0).sample(list(space_of(WHAT).legal), 40)
    times.plans = {plan: PlanTime(us(plan)) for plan in every}
    file.rows[ROW.label] = times
    file.write(tmp_path / "search.json")
    out = tmp_path / "ranking.json"
    assert ranking.main([str(tmp_path / "search.json"), "--most", "30", "--json", str(out)]) == 0
    assert "stock" in capsys.readouterr().out
    written = json.loads(out.read_text())
    assert written["device"] == file.header["device"]
    assert {line["model"] for line in written["rankings"]} == {"random", "estimate", "stock", "plan"}
    assert {line["candidates"] for line in written["rankings"]} == {15}
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("no JSON")
    for name in ("none", "empty", "text"):
        assert ranking.main([str(tmp_path / name)]) == 1
        assert "ranking: needed" in capsys.readouterr().err
    Database.open(tmp_path / "records")
    assert ranking.main([str(tmp_path / "records")]) == 1
    assert "measured plans" in capsys.readouterr().err
