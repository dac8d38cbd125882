"""The search against chance, at equal trials, on one row."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, cast

from tvm.target import Target

from tvm_comfuse.schedules.device import Device
from tvm_comfuse.tuning.builder import Builder
from tvm_comfuse.tuning.log import Log
from tvm_comfuse.tuning.model import PlanModel
from tvm_comfuse.tuning.plan_times import RowTimes
from tvm_comfuse.tuning.record import MemoryStore
from tvm_comfuse.tuning.remembering import Builds, RememberingBuilder, RememberingRunner, Runs
from tvm_comfuse.tuning.runner import Runner
from tvm_comfuse.tuning.search import Search, Settings
from tvm_comfuse.tuning.strategy import at_random, promising
from tvm_comfuse.tuning.task import Task

#: how the next plans are chosen; both begin with the default plan
CHOICES = {"ranked": promising, "random": at_random}
#: trials after which the best time is noted
MARKS = (8, 16, 32, 64)


class _Trials(Log):
    """The trials of a search in memory, in the order in which they ended."""

    def __init__(self) -> None:
        super().__init__(None)
        self.us: list[float | None] = []

    def write(self, event: str, **values: Any) -> None:
        """Notes a trial."""
        if event in ("measured", "failed"):
            self.us.append(values.get("us"))


def contest(
    kind: str,
    task: Task,
    target: Target,
    device: Device,
    times: RowTimes,
    builder: Builds,
    runner: Runs,
    trials: int,
    seed: int,
    budget: float | None = None,
    interrupted: threading.Event | None = None,
) -> dict[str, Any]:
    """Runs one search, adds it to ``times.searches`` unless it was cut short, and gives its entry:

    {"kind", "seed", "trials", "stopped", "seconds", "built": plans that no search or sweep had measured before,
     "best": {"8": us, ...}, "best_us", "best_plan", "default_us", "failed"}

    kind  ranked or random
    """
    remembering = RememberingBuilder(times, builder)
    log, start = _Trials(), time.monotonic()
    search = Search(
        target,
        device,
        MemoryStore(),
        cast(Builder, remembering),
        cast(Runner, RememberingRunner(times, remembering, runner)),
        PlanModel(device),
        Settings(trials, budget, None, seed),
        log,
        interrupted=interrupted or threading.Event(),
        choose=CHOICES[kind],
    )
    search.run([task])
    best = search.progress[0].best if search.progress else None
    entry = {
        "kind": kind,
        "seed": seed,
        "trials": trials,
        "stopped": search.stopped,
        "seconds": round(time.monotonic() - start, 1),
        "built": remembering.fresh,
        "best": {str(mark): best_of(log.us[:mark]) for mark in MARKS if mark <= len(log.us)},
        "best_us": None if best is None else best.us,
        "best_plan": None if best is None else best.plan.to_dict(),
        "default_us": times.baseline_us,
        "failed": sum(us is None for us in log.us),
    }
    if search.stopped in ("trials", "space"):
        times.searches.append(entry)
    return entry


def best_of(us: Sequence[float | None]) -> float | None:
    """The smallest time; None if there is none."""
    return min((value for value in us if value is not None), default=None)
