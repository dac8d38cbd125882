"""A builder and a runner that build and measure no plan twice, for searches that are compared with one another."""

from __future__ import annotations

import math
from concurrent.futures import Future
from typing import Any, Protocol

from tvm_comfuse.schedules.apply import plan_of
from tvm_comfuse.schedules.plan import Plan
from tvm_comfuse.tuning.build import Built
from tvm_comfuse.tuning.log import PASSING
from tvm_comfuse.tuning.measurer import Measured
from tvm_comfuse.tuning.plan_times import PlanTime, RowTimes
from tvm_comfuse.tuning.task import Task

#: in front of the "library" of a plan whose time is known
_KNOWN = "known "


class Builds(Protocol):
    """What a search asks of a builder."""

    parallel: int

    def submit(self, func: Any) -> Future[Built]:
        """Starts to build a function."""

    def discard(self, library: str) -> None:
        """Removes a library."""


class Runs(Protocol):
    """What a search asks of a runner."""

    @property
    def products(self) -> dict[str, float]:
        """Microseconds of the bare product by the key of its task."""

    @property
    def device_name(self) -> str:
        """As the driver calls the device."""

    def prepare(self, task: Task) -> None:
        """Has a task's inputs made."""

    def submit(self, task: Task, library: str, reference: str = "", check: bool = True) -> Future[Measured]:
        """Measures a library."""


class RememberingBuilder:
    """Builds what `times` does not know, and the default plan unless nothing is left to measure beside it.

    fresh  plans that were built
    """

    def __init__(self, times: RowTimes, builder: Builds):
        self.parallel, self.fresh = builder.parallel, 0
        self._times, self._builder = times, builder
        self._started: dict[Plan, Future[Built]] = {}

    def submit(self, func: Any) -> Future[Built]:
        """A build, or what is known of the plan instead of one."""
        plan = plan_of(func)
        known = self._times.plans.get(plan)
        if plan in self._started:
            return self._started[plan]
        if known is not None and (self._times.whole or plan != self._times.default):
            library = "" if known.reason else _KNOWN + plan.to_json()
            return _done(Built(library, known.reason, known.failure, known.registers))
        self.fresh += 1
        future = self._started[plan] = self._builder.submit(func)
        future.add_done_callback(lambda future: self._keep_failure(plan, future))
        return future

    def discard(self, library: str) -> None:
        """Removes a library unless it is the default plan's."""
        default = self._started.get(self._times.default)
        if not library.startswith(_KNOWN) and (default is None or default.result().library != library):
            self._builder.discard(library)

    def built(self, library: str) -> tuple[Plan, Built]:
        """Whose library it is."""
        done = ((plan, future.result()) for plan, future in self._started.items() if future.done())
        return next((plan, result) for plan, result in done if result.library == library)

    def _keep_failure(self, plan: Plan, future: Future[Built]) -> None:
        if not future.cancelled() and future.result().reason not in ("", *PASSING):
            self._times.plans[plan] = PlanTime(reason=future.result().reason, failure=future.result().failure)


class RememberingRunner:
    """Measures what `times` does not know and keeps it there."""

    def __init__(self, times: RowTimes, builder: RememberingBuilder, runner: Runs):
        self._times, self._builder, self._runner = times, builder, runner

    @property
    def products(self) -> dict[str, float]:
        """The runner's."""
        return self._runner.products

    @property
    def device_name(self) -> str:
        """The runner's."""
        return self._runner.device_name

    def prepare(self, task: Task) -> None:
        """The runner's, if there is anything to measure."""
        if not self._times.whole:
            self._runner.prepare(task)

    def submit(self, task: Task, library: str, reference: str = "", check: bool = True) -> Future[Measured]:
        """A measurement, or the one that is known."""
        if library.startswith(_KNOWN):
            return _done(_measured(self._times.plans[Plan.from_json(library.removeprefix(_KNOWN))]))
        plan, built = self._builder.built(library)
        if plan == self._times.default and self._times.baseline_us is not None:
            return _done(_measured(self._times.plans[plan]))
        future = self._runner.submit(task, library, reference, check)
        future.add_done_callback(lambda future: self._keep(plan, built, future))
        return future

    def _keep(self, plan: Plan, built: Built, future: Future[Measured]) -> None:
        if not future.cancelled() and future.result().reason not in PASSING:
            self._times.plans[plan] = plan_time(future.result(), built)


def plan_time(measured: Measured, built: Built) -> PlanTime:
    """What a measurement says of a plan."""
    us = sorted(measured.us)[len(measured.us) // 2] if measured.us else None
    return PlanTime(
        us, measured.reference_us, measured.error, measured.allowed, built.registers, measured.reason, measured.failure
    )


def _measured(known: PlanTime) -> Measured:
    us = (known.us,) if known.us is not None else ()
    # of a sweep only the fastest plans were compared: for a search the others have passed with an unknown error
    error, allowed = (math.nan if value is None else value for value in (known.error, known.allowed))
    return Measured(us, known.reference_us, known.reason, known.failure, error, allowed)


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
