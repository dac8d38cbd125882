"""Every legal plan of a row, measured: what a search is compared with.

First each plan is built and timed without a look at its numbers, in a random order, so that a sweep that was stopped is a
fair sample.  Then the fastest ones are built again, compared with float64 and timed several times, in turns.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from functools import partial
from typing import Any

from tvm import s_tir

from tvm_comfuse.bench.timing import median
from tvm_comfuse.schedules.apply import apply_plan
from tvm_comfuse.schedules.plan import Plan
from tvm_comfuse.tuning.build import Built
from tvm_comfuse.tuning.measurer import Measured
from tvm_comfuse.tuning.plan_times import PlanTime, RowTimes
from tvm_comfuse.tuning.remembering import Builds, Runs, plan_time
from tvm_comfuse.tuning.task import Task

#: share of the plans that is looked at again, and the fewest of them
FINALISTS, FEWEST_FINALISTS = 0.05, 8
#: times that a finalist is measured
ROUNDS = 3
#: share of the time budget that the finalists get at least
_FINAL_SHARE = 0.15
#: builds on their way for each process that builds
_AHEAD = 2
#: seconds between looks at the clock, and between writes of what is known
_TICK, _KEEP_EVERY = 0.5, 10.0


class Sweep:
    """A sweep of one row; what `times` has already is not measured again.

    keep         called now and then, to write `times` to disk
    interrupted  ends it once it is set
    """

    def __init__(
        self,
        task: Task,
        times: RowTimes,
        builder: Builds,
        runner: Runs,
        keep: Callable[[], None] = lambda: None,
        interrupted: threading.Event | None = None,
    ):
        self._task, self._times = task, times
        self._builder, self._runner, self._keep = builder, runner, keep
        self._interrupted = interrupted or threading.Event()
        self._start = self._kept = time.monotonic()
        self._reference = ""

    def run(self, plans: Iterable[Plan], budget: float | None = None, seed: int = 0) -> None:
        """Measures plans until `budget` seconds are over, and leaves a summary in `times.sweep`."""
        plans = list(plans)
        end = math.inf if budget is None else self._start + budget
        self._runner.prepare(self._task)
        rest = [plan for plan in plans if plan not in self._times.plans and plan != self._times.default]
        random.Random(seed).shuffle(rest)
        default = self._builder.submit(self._function(self._times.default))
        # the processes that build start while the first plan is measured
        started = [(plan, self._builder.submit(self._function(plan))) for plan in rest[: self._builder.parallel]]
        self._measure_default(default.result())
        self._through(started, rest[len(started) :], end - (0.0 if budget is None else budget * _FINAL_SHARE))
        timed_s = time.monotonic() - self._start
        finalists = self._finalists(len(plans))
        self._finals(finalists, end)
        before = self._times.sweep or {"seconds": 0.0, "timing_seconds": 0.0}
        best = self._times.best
        self._times.sweep = {
            "complete": all(plan in self._times.plans for plan in plans),
            "plans": sum(plan in self._times.plans for plan in plans),
            "failed": sum(bool(self._times.plans[plan].reason) for plan in plans if plan in self._times.plans),
            "finalists": len(finalists),
            "builders": self._builder.parallel,
            "timing_seconds": round(before["timing_seconds"] + timed_s, 1),
            "seconds": round(before["seconds"] + time.monotonic() - self._start, 1),
            "best": None if best is None else best.to_dict(),
            "best_us": None if best is None else self._times.us(best),
            "default_us": self._times.baseline_us,
        }
        self._keep()

    # --- each plan once -----------------------------------------------------------------------------------------------

    def _measure_default(self, built: Built) -> None:
        plan, known = self._times.default, self._times.plans.get(self._times.default)
        if built.reason:
            self._times.plans[plan] = PlanTime(reason=built.reason, failure=built.failure)
            return
        if known is None or known.us is None:
            self._times.plans[plan] = plan_time(self._runner.submit(self._task, built.library).result(), built)
        if not self._times.plans[plan].reason:
            self._reference = built.library

    def _through(self, started: Sequence[tuple[Plan, Future[Built]]], plans: Sequence[Plan], end: float) -> None:
        """Builds and times plans until the end, first those whose builds have started."""
        left, under_way = list(reversed(plans)), dict[Future[Any], Callable[[Any], None]]()

        def built(plan: Plan, result: Built) -> None:
            if result.reason:
                self._times.plans[plan] = PlanTime(reason=result.reason, failure=result.failure)
                return
            future = self._runner.submit(self._task, result.library, self._reference, check=False)
            under_way[future] = partial(measured, plan, result)

        def measured(plan: Plan, result: Built, values: Measured) -> None:
            self._times.plans[plan] = plan_time(values, result)
            self._builder.discard(result.library)

        for plan, future in started:
            under_way[future] = partial(built, plan)
        while not self._is_over(end):
            while left and len(under_way) < _AHEAD * self._builder.parallel:
                plan = left.pop()
                under_way[self._builder.submit(self._function(plan))] = partial(built, plan)
            if not under_way:
                break
            done, _ = wait(list(under_way), timeout=_TICK, return_when=FIRST_COMPLETED)
            for future in done:
                under_way.pop(future)(future.result())
        for future in under_way:
            future.cancel()

    # --- the fastest ones again -----------------------------------------------------------------------------------------

    def _finalists(self, count: int) -> list[Plan]:
        """The fastest plans of which some were not compared yet."""
        first = self._times.ranked()[: max(FEWEST_FINALISTS, math.ceil(count * FINALISTS))]
        return [plan for plan in first if self._times.plans[plan].error is None]

    def _finals(self, finalists: Sequence[Plan], end: float) -> None:
        """Compares and times finalists in turns.  Those that are not through by the end stay as they were."""
        builds = {plan: self._builder.submit(self._function(plan)) for plan in finalists}
        found: dict[Plan, list[tuple[Measured, Built]]] = {}
        for turn in range(ROUNDS):
            for plan, future in builds.items():
                failed = any(measured.reason for measured, _ in found.get(plan, []))
                if failed or self._is_over(end):
                    continue
                built = future.result()
                if not built.reason:
                    check = self._runner.submit(self._task, built.library, self._reference, check=turn == 0)
                    found.setdefault(plan, []).append((check.result(), built))
        for plan, results in found.items():
            self._times.plans[plan] = _together([plan_time(*result) for result in results])
        for future in builds.values():
            if not future.cancel():
                self._builder.discard(future.result().library)

    def _is_over(self, end: float) -> bool:
        if time.monotonic() - self._kept > _KEEP_EVERY:
            self._kept = time.monotonic()
            self._keep()
        return self._interrupted.is_set() or time.monotonic() > end

    def _function(self, plan: Plan) -> Any:
        return _scheduled(self._task, plan)


def begin_with(plan: Plan, task: Task, times: RowTimes, builder: Builds, runner: Runs) -> bool:
    """Makes a plan the one that the times of a row are scaled by, see RowTimes.rebase; measures it beside the one before if its
    time is not known.  False if one of them fails."""
    if plan == times.default or times.rebase(plan):
        return True
    new, old = [builder.submit(_scheduled(task, each)) for each in (plan, times.default)]
    built, reference = new.result(), old.result()
    if not built.reason and not reference.reason:
        times.plans[plan] = plan_time(runner.submit(task, built.library, reference.library).result(), built)
    return times.rebase(plan)


def _scheduled(task: Task, plan: Plan) -> Any:
    # not apply.schedule, which asks legality once more and checks every step
    sch = s_tir.Schedule(task.workload)
    apply_plan(sch, plan)
    return sch.mod["main"]


def _together(turns: Sequence[PlanTime]) -> PlanTime:
    """Of several measurements the median one beside the default plan; the first one has compared the numbers."""
    failed = next((turn for turn in turns if turn.reason), None)
    if failed is not None:
        return failed
    ratios = {turn.us / (turn.reference_us or 1.0): turn for turn in turns if turn.us is not None}
    middle = ratios[median(list(ratios))]
    return replace(middle, error=turns[0].error, allowed=turns[0].allowed)
