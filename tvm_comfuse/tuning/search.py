"""The search: proposes, builds, measures and records, all at the same time."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tvm.s_tir.meta_schedule.utils import shash2hex
from tvm.target import Target

from tvm_comfuse.schedules.apply import plan_of
from tvm_comfuse.schedules.device import Device
from tvm_comfuse.target import is_cuda
from tvm_comfuse.tuning.build import Built
from tvm_comfuse.tuning.builder import Builder
from tvm_comfuse.tuning.interrupt import noting_interrupts
from tvm_comfuse.tuning.log import Log
from tvm_comfuse.tuning.measurer import Measured
from tvm_comfuse.tuning.metaschedule import meta_schedule as ms
from tvm_comfuse.tuning.metaschedule import tune_context
from tvm_comfuse.tuning.model import PlanModel
from tvm_comfuse.tuning.progress import Candidate, Progress
from tvm_comfuse.tuning.record import Record, Store, stock_record
from tvm_comfuse.tuning.rules import space_generator
from tvm_comfuse.tuning.runner import Runner
from tvm_comfuse.tuning.space import Space
from tvm_comfuse.tuning.strategy import Choice, RankedSearch, candidate_for, promising
from tvm_comfuse.tuning.task import Task

#: candidates proposed at a time: the model learns between batches
BATCH = 8
#: batches of a task on their way: while one is measured the next is built
BATCHES_IN_FLIGHT = 2
#: seconds after which a search without news looks at the clock
_TICK = 0.5


@dataclass
class Settings:
    """What a user may set.

    trials          candidates in all, also those that fail
    time_budget     seconds, None without a limit
    early_stopping  candidates of a task in a row that do not improve it, None to go on
    """

    trials: int = 64
    time_budget: float | None = None
    early_stopping: int | None = None
    seed: int = 0


@dataclass(eq=False)
class Search:
    """One search over tasks.  `run` returns at its end and may be interrupted: everything found out is kept by then.

    on_change    called after every event, for a display
    interrupted  ends the search at the next event once it is set
    choose       which of the ranked plans are measured next
    """

    target: Target
    device: Device
    store: Store
    builder: Builder
    runner: Runner
    model: PlanModel
    settings: Settings
    log: Log
    on_change: Callable[[Search], None] = lambda search: None
    interrupted: threading.Event = field(default_factory=threading.Event)
    choose: Choice = promising
    progress: list[Progress] = field(default_factory=list)
    #: what stopped it: trials, time, space or interrupt
    stopped: str = ""

    def __post_init__(self) -> None:
        self._futures: dict[Future[Any], Callable[[Any], None]] = {}
        self._database = ms.database.MemoryDatabase()
        self._chance = random.Random(self.settings.seed)
        self._start = time.monotonic()

    @property
    def trials(self) -> int:
        """Candidates measured or failed so far."""
        return sum(progress.trials for progress in self.progress)

    @property
    def proposed(self) -> int:
        """Trials, and the candidates on their way: no more than the settings' trials are begun."""
        return sum(progress.proposed for progress in self.progress)

    @property
    def seconds_left(self) -> float | None:
        """Of the time budget; None without one."""
        budget = self.settings.time_budget
        return None if budget is None else max(0.0, budget - (time.monotonic() - self._start))

    def run(self, tasks: Sequence[Task]) -> None:
        """Searches until trials, time or plans are used up.

        SIGINT ends it at the next event.  A second one is a KeyboardInterrupt, which ends it at once and is not raised
        either.
        """
        with noting_interrupts(self.interrupted):
            self._run(tasks)

    def _run(self, tasks: Sequence[Task]) -> None:
        try:
            # every task gets some, and few trials are not spent on one task
            size = max(1, min(BATCH, self.settings.trials // (2 * max(1, len(tasks)))))
            for task in tasks:
                if not self.interrupted.is_set():
                    self.progress.append(self._prepare(task, size))
            self.on_change(self)
            while not self._is_over():
                self._propose()
                if not self._futures:
                    self.stopped = self.stopped or ("trials" if self.proposed >= self.settings.trials else "space")
                    break
                done, _ = wait(list(self._futures), timeout=_TICK, return_when=FIRST_COMPLETED)
                for future in done:
                    self._futures.pop(future)(future.result())
                self.on_change(self)
        except KeyboardInterrupt:
            self.stopped = "interrupt"
        for future in self._futures:
            future.cancel()
        for progress in self.progress:
            self._release(progress)

    # --- what is known already ----------------------------------------------------------------------------------------

    def _prepare(self, task: Task, size: int) -> Progress:
        """Starts the strategy of a task with the records and failures of earlier searches."""
        space = Space.of(task.spec, self.device)
        assert isinstance(space, Space)  # tasks_of takes no others
        strategy = RankedSearch(self.device, self.model, self._chance.randrange(2**31), self.choose)
        context = tune_context(
            task.workload,
            target=self.target,
            space_generator=space_generator(self.device),
            search_strategy=strategy,
            task_name=task.name,
            num_threads=1,
            rand_state=self.settings.seed + 1,
        )
        progress = Progress(task, space, context, strategy)
        records = [r for r in self.store.query(task.workload, self.target) if r.rows == task.rows]
        for record in records:
            self._database.commit_tuning_record(stock_record(self._database, record))
        self._relearn(progress, records)
        context.pre_tuning(self.settings.trials, size, context.generate_design_space(), self._database, None)
        strategy.exclude(self.log.failed_plans(task.key, str(self.target)))
        progress.best = min(records, key=lambda record: record.us, default=None)
        progress.split.us = next((r.split_us for r in records if r.split_us is not None), None)
        default = next((record for record in records if record.plan == progress.default), None)
        if default is not None:
            progress.default_us = progress.baseline_us = default.us
            self._submit_reference(progress)
        return progress

    def _relearn(self, progress: Progress, records: Sequence[Record]) -> None:
        """Teaches the model what the database has of a task, if a saved model has not brought it along."""
        known = [record for record in records if record.plan in progress.space.legal]
        if known and shash2hex(progress.context.mod) not in self.model.data:
            measured = [candidate_for(progress.context.mod, progress.space, record.plan) for record in known]
            results = [ms.runner.RunnerResult(list(record.seconds), None) for record in known]
            self.model.update(progress.context, measured, results)

    def _submit_reference(self, progress: Progress) -> None:
        """Builds the default plan once more, of which there is a record but no library."""
        measure = candidate_for(progress.context.mod, progress.space, progress.default)

        def built(result: Built) -> None:
            self._set_reference(progress, result.library)

        self._futures[self.builder.submit(self._function(progress, measure))] = built

    # --- candidates ---------------------------------------------------------------------------------------------------

    def _is_over(self) -> bool:
        if self.interrupted.is_set():
            self.stopped = "interrupt"
        if self.seconds_left == 0.0:
            self.stopped = self.stopped or "time"
        return bool(self.stopped)

    def _propose(self) -> None:
        """Batches until enough is on its way to keep every builder busy."""
        while self.proposed < self.settings.trials:
            if sum(progress.in_flight for progress in self.progress) >= max(BATCH, self.builder.parallel) + BATCH:
                return
            ready = [p for p in self.progress if not p.finished and len(p.batches) < BATCHES_IN_FLIGHT]
            if not ready:
                return
            # the one that costs a model most, the less the more has been tried: each gets trials in proportion
            chosen = max(ready, key=lambda p: (p.proposed == 0, len(p.task.matmuls) * p.us / max(1, p.proposed)))
            self._propose_for(chosen)

    def _propose_for(self, progress: Progress) -> None:
        found = progress.context.generate_measure_candidates()
        if not found:
            progress.finished = True
            return
        batch = [Candidate(plan_of(measure.sch.mod["main"]), measure) for measure in found]
        batch = batch[: self.settings.trials - self.proposed]
        if progress.proposed == 0 and progress.baseline_us is None and batch[0].plan != progress.default:
            progress.reference = ""  # the default plan failed in an earlier search
        first = progress.proposed == 0
        if first:
            self.runner.prepare(progress.task)
        progress.proposed += len(batch)
        progress.batches.append(batch)
        for candidate in batch:
            future = self.builder.submit(self._function(progress, candidate.measure))
            self._futures[future] = partial(self._on_built, progress, candidate)
            if first and candidate is batch[0]:
                self._begin_split(progress)

    def _function(self, progress: Progress, measure: Any) -> Any:
        """What is built of a candidate: on a CPU plans change nothing, and the canonical function runs."""
        return measure.sch.mod["main"] if is_cuda(self.target) else progress.task.func

    def _on_built(self, progress: Progress, candidate: Candidate, built: Built) -> None:
        candidate.built = built
        default = candidate.plan == progress.default
        if built.reason:
            self._failed(progress, candidate, built.reason, built.failure)
            if default:
                self._set_reference(progress, "")
        elif progress.reference is None and not default:
            progress.waiting.append(candidate)
        else:
            self._measure(progress, candidate)

    def _set_reference(self, progress: Progress, library: str) -> None:
        progress.reference = library
        self._measure_split(progress)
        waiting, progress.waiting = progress.waiting, []
        for candidate in waiting:
            self._measure(progress, candidate)

    def _measure(self, progress: Progress, candidate: Candidate) -> None:
        future = self.runner.submit(progress.task, candidate.built.library, progress.reference or "")
        self._futures[future] = partial(self._on_measured, progress, candidate)

    def _on_measured(self, progress: Progress, candidate: Candidate, measured: Measured) -> None:
        default = candidate.plan == progress.default
        if measured.reason:
            self._failed(progress, candidate, measured.reason, measured.failure)
        else:
            scale = progress.scale(measured)
            candidate.seconds = tuple(us * scale * 1e-6 for us in measured.us)
            progress.held.append(partial(self._succeeded, progress, candidate, measured, scale))
            if not progress.split.is_due:
                self._release(progress)
        if default and progress.reference is None:
            if not measured.reason:
                progress.default_us = progress.baseline_us = sorted(measured.us)[len(measured.us) // 2]
            self._set_reference(progress, "" if measured.reason else candidate.built.library)
        if candidate.built.library != progress.reference:
            self.builder.discard(candidate.built.library)

    # --- the split form -----------------------------------------------------------------------------------------------

    def _begin_split(self, progress: Progress) -> None:
        """Builds the split form, unless there is none or its time is known."""
        if progress.task.unfused is None or progress.split.us is not None:
            return
        progress.split.is_due = True

        def built(result: Built) -> None:
            progress.split.built = result
            self._measure_split(progress)

        self._futures[self.builder.submit(progress.task.unfused.module)] = built

    def _measure_split(self, progress: Progress) -> None:
        """Measures it once, beside the default plan, as soon as both are built."""
        unfused, built = progress.task.unfused, progress.split.built
        if unfused is None or built is None or progress.reference is None or not progress.split.is_due:
            return
        if built.reason:
            self._on_split(progress, Measured(reason=built.reason, failure=built.failure))
            return
        future = self.runner.submit(progress.task, built.library, progress.reference, chained=True)
        self._futures[future] = partial(self._on_split, progress)

    def _on_split(self, progress: Progress, measured: Measured) -> None:
        task, split, unfused = progress.task, progress.split, progress.task.unfused
        assert unfused is not None
        assert split.built is not None
        split.failure = measured.reason
        if not measured.reason:
            split.us = sorted(measured.us)[len(measured.us) // 2] * progress.scale(measured)
        self.builder.discard(split.built.library)
        plans = {"gemm": unfused.gemm.to_dict(), "rows": unfused.rows.to_dict()}
        what = {"us": split.us, "error": measured.error, "reason": measured.reason, "failure": measured.failure}
        self.log.write("split", task=task.key, name=task.name, target=str(self.target), plans=plans, **what)
        self._release(progress)

    def _release(self, progress: Progress) -> None:
        """Makes records of what was held until the split form's time was known, or until the end."""
        progress.split.is_due = False
        held, progress.held = progress.held, []
        for record in held:
            record()

    # --- results ------------------------------------------------------------------------------------------------------

    def _failed(self, progress: Progress, candidate: Candidate, reason: str, failure: str) -> None:
        candidate.reason, candidate.failure = reason, failure
        progress.failures[reason] += 1
        progress.since_best += 1
        self._note("failed", progress, candidate, reason=reason, failure=failure)
        self._finish_batches(progress)

    def _succeeded(self, progress: Progress, candidate: Candidate, measured: Measured, scale: float) -> None:
        assert measured.error is not None
        assert measured.allowed is not None
        candidate.reason = ""
        record = Record(
            workload=progress.task.workload,
            trace=candidate.measure.sch.trace,
            plan=candidate.plan,
            seconds=candidate.seconds,
            target=self.target,
            rows=progress.task.rows,
            error=measured.error,
            allowed=measured.allowed,
            device_name=self.runner.device_name,
            split_us=progress.split.us,
        )
        self.store.commit(record)
        progress.measured += 1
        self._database.commit_tuning_record(stock_record(self._database, record))
        progress.since_best += 1
        if progress.best is None or record.us < progress.best.us:
            progress.best, progress.since_best = record, 0
        where = {"server": measured.server} if measured.server else {}
        self._note("measured", progress, candidate, us=record.us, error=record.error, clock=scale, **where)
        self._finish_batches(progress)

    def _finish_batches(self, progress: Progress) -> None:
        """Teaches the model every batch that is through."""
        for batch in [batch for batch in progress.batches if all(c.reason is not None for c in batch)]:
            progress.batches.remove(batch)
            measured = [candidate.measure for candidate in batch]
            results = [ms.runner.RunnerResult(list(c.seconds) or None, c.failure or None) for c in batch]
            progress.context.notify_runner_results(measured, results)
            self.model.update(progress.context, measured, results)
        patience = self.settings.early_stopping
        if patience is not None and progress.since_best >= patience:
            progress.finished = True

    def _note(self, event: str, progress: Progress, candidate: Candidate, **values: Any) -> None:
        task = progress.task
        self.log.write(
            event,
            task=task.key,
            name=task.name,
            shape=list(task.shape),
            target=str(self.target),
            plan=candidate.plan.to_dict(),
            registers=candidate.built.registers,
            spills=candidate.built.spills,
            **values,
        )
