"""``tvm_comfuse.tune``: from a model to measured plans."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm
from tvm.target import Target

from tvm_comfuse.errors import OutputError, TargetError
from tvm_comfuse.refusal import Refusal
from tvm_comfuse.schedules.device import H200, device_of
from tvm_comfuse.schedules.plan import Plan
from tvm_comfuse.target import is_cuda, name_of, parse_target
from tvm_comfuse.tuning.builder import Builder
from tvm_comfuse.tuning.database import Database
from tvm_comfuse.tuning.interrupt import noting_interrupts
from tvm_comfuse.tuning.log import NAME as LOG_NAME
from tvm_comfuse.tuning.log import Log
from tvm_comfuse.tuning.model import PlanModel
from tvm_comfuse.tuning.record import DatabaseStore, MemoryStore, Store
from tvm_comfuse.tuning.runner import CHILD, DEFAULT_LIMITS, Runner
from tvm_comfuse.tuning.search import Search, Settings
from tvm_comfuse.tuning.task import tasks_of
from tvm_comfuse.worker import Limits

#: the file of a records folder besides the database and the log
MODEL_NAME = "cost_model.json"
#: candidates of a task: enough to come within 2 % of the best of all its plans (tests/host/test_tuning_search.py)
TRIALS = 64
#: seconds to wait for a tracker
_TRACKER_S = 5.0


@dataclass(frozen=True)
class TunedTask:
    """What came of one task.

    matmuls     names of the matmuls whose clusters it is
    shape       [M, N, K] of the measurements
    plan, us    the best plan and its time in microseconds, None if no candidate passed
    default_us  the time of the plan without tuning, None if it was not measured
    product_us  the time of the bare product by cuBLAS, None if unknown
    trials      candidates of this search
    failures    how many of them failed, by reason
    """

    matmuls: tuple[str, ...]
    shape: tuple[int, int, int]
    plan: Plan | None
    us: float | None
    default_us: float | None
    product_us: float | None
    trials: int
    failures: dict[str, int]

    @property
    def speedup(self) -> float | None:
        """The default plan's time over the best one's."""
        return self.default_us / self.us if self.default_us and self.us else None

    def to_dict(self) -> dict[str, Any]:
        """A dictionary of plain JSON values."""
        plan = self.plan.to_dict() if self.plan else None
        return {**vars(self), "matmuls": list(self.matmuls), "shape": list(self.shape), "plan": plan}


@dataclass(frozen=True)
class TuneResult:
    """What came of a search; `plans` is what ``tvm_comfuse.compile`` takes.

    stopped   why it ended: trials, time, space (every plan was tried), or interrupt
    refusals  clusters without a legal plan
    records   the folder with the records, None without one
    """

    target: str
    tasks: tuple[TunedTask, ...]
    stopped: str
    refusals: tuple[Refusal, ...] = ()
    records: Path | None = None

    @property
    def plans(self) -> dict[str, Plan]:
        """The best plan of every matmul that has one."""
        return {name: task.plan for task in self.tasks if task.plan is not None for name in task.matmuls}

    def to_dict(self) -> dict[str, Any]:
        """A dictionary of plain JSON values."""
        return {
            "target": self.target,
            "stopped": self.stopped,
            "records": str(self.records) if self.records else None,
            "tasks": [task.to_dict() for task in self.tasks],
            "refusals": [refusal.to_json() for refusal in self.refusals],
        }


def tune(
    model: Any,
    target: str | dict[str, Any] | Target = "cuda",
    *,
    trials: int | None = None,
    time_budget: float | None = None,
    records: str | Path | None = None,
    example_args: tuple[Any, ...] | None = None,
    early_stopping: int | None = None,
    rows: int | None = None,
    parallel: int | None = None,
    limits: Limits | None = None,
    seed: int = 0,
    store: Store | None = None,
    tracker: tuple[str, int] | None = None,
    key: str = "",
    workers: int = 1,
    on_change: Callable[[Search], None] = lambda search: None,
) -> TuneResult:
    """Measures plans for every cluster of a model and keeps those whose numbers are right.

    model, target, example_args  as for ``tvm_comfuse.compile``; a GPU target needs that GPU, target llvm times the CPU's
                                 kernels, in which plans change nothing: it is there to try the way
    trials          candidates in all, also those that fail; TRIALS for each task if left out
    time_budget     seconds
    records         a folder for a tuning database, with log and cost model; a search continues where the last one ended
    early_stopping  a task ends after so many candidates in a row that do not improve it
    rows            M of the measurements where M is symbolic
    parallel        processes that build
    limits          seconds that a process may take to start, to build and to launch
    store           where records go, instead of the database in the folder
    tracker, key    host and port of a TVM RPC tracker, and the key of its servers: measure there, see tuning.remote
    workers         servers to measure on at the same time
    on_change       called with the search after every event

    SIGINT, at whatever moment, ends the search, and the result is what was found until then; a second one that comes
    outside the search is a KeyboardInterrupt.  Raises ModelError, TargetError, and OutputError or DatabaseError for a
    folder that cannot be written or holds something else.
    """
    from tvm_comfuse.build import to_module

    parsed = parse_target(target)
    device = device_of(parsed) if is_cuda(parsed) else H200
    if device is None:
        raise TargetError("a Hopper GPU or llvm", name_of(parsed), "use the target h200, h100 or llvm")
    if is_cuda(parsed) and tracker is None and not tvm.cuda(0).exist:
        raise TargetError("a GPU to measure on", "none", "tune on a machine with one, or try the way on llvm")
    folder = Path(records) if records is not None else None
    kept = store if store is not None else _store(folder)
    interrupted = threading.Event()
    with noting_interrupts(interrupted):
        tasks, refusals = tasks_of(to_module(model, example_args), device, rows)
        count = trials if trials is not None else TRIALS * len(tasks)
        settings = Settings(count, time_budget, early_stopping, seed)
        cost_model = PlanModel(device)
        if folder is not None and (folder / MODEL_NAME).is_file():
            cost_model.read(folder / MODEL_NAME)
        commands = [CHILD] if tracker is None else [_stand_in(tracker, key)] * workers
        runner = Runner(parsed, limits or DEFAULT_LIMITS, commands, remote=tracker is not None)
        with Builder(parsed, parallel, limits) as builder, runner:
            log = Log(folder)
            search = Search(
                parsed, device, kept, builder, runner, cost_model, settings, log, on_change, interrupted=interrupted
            )
            log.write("start", target=str(parsed), tasks=[task.name for task in tasks], trials=count)
            search.run(tasks)
            log.write("end", stopped=search.stopped, trials=search.trials)
            result = _result(search, refusals, folder)
        if folder is not None:
            cost_model.write(folder / MODEL_NAME)
    return result


def _stand_in(tracker: tuple[str, int], key: str) -> tuple[str, ...]:
    """The command of a process that measures elsewhere.  Raises TargetError if there is no tracker."""
    host, port = tracker
    try:
        # TVM's own way of connecting tries for a minute
        socket.create_connection(tracker, timeout=_TRACKER_S).close()
    except OSError as error:
        hint = "start one: python -m tvm.exec.rpc_tracker --host 0.0.0.0 --port 9190"
        raise TargetError("an RPC tracker", f"none at {host}:{port} ({error})", hint) from error
    return (sys.executable, "-m", "tvm_comfuse.tuning.remote", host, str(port), key)


def _store(folder: Path | None) -> Store:
    """The database of a folder, or memory."""
    if folder is None:
        return MemoryStore()
    try:
        database = Database.open(folder)
        (folder / LOG_NAME).touch()
    except OSError as error:
        raise OutputError("a folder for tuning records", f"{folder}: {error}", "choose another place") from error
    return DatabaseStore(database)


def _result(search: Search, refusals: list[Refusal], folder: Path | None) -> TuneResult:
    tasks = tuple(
        TunedTask(
            matmuls=tuple(progress.task.matmuls),
            shape=progress.task.shape,
            plan=progress.best.plan if progress.best else None,
            us=progress.best.us if progress.best else None,
            default_us=progress.default_us,
            product_us=search.runner.products.get(progress.task.key),
            trials=progress.trials,
            failures=dict(progress.failures),
        )
        for progress in search.progress
    )
    return TuneResult(name_of(search.target), tasks, search.stopped, tuple(refusals), folder)
