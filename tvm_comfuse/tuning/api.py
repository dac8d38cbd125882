"""``tvm_comfuse.tune``: from a model to measured plans."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import tvm
from tvm.target import Target

from tvm_comfuse.errors import OutputError, TargetError
from tvm_comfuse.forms import FUSED, SPLIT, make_split
from tvm_comfuse.refusal import Refusal
from tvm_comfuse.relay_patterns.cluster import Cluster
from tvm_comfuse.relay_patterns.discover import in_dataflow, searches
from tvm_comfuse.schedules.device import H200, Device, device_of
from tvm_comfuse.schedules.plan import Plan
from tvm_comfuse.target import is_cuda, name_of, parse_target
from tvm_comfuse.tuning.arguments import TuneError, check_records, check_servers, optional, seconds, whole
from tvm_comfuse.tuning.builder import Builder
from tvm_comfuse.tuning.database import Database, best_plan, pretuned
from tvm_comfuse.tuning.interrupt import noting_interrupts
from tvm_comfuse.tuning.log import NAME as LOG_NAME
from tvm_comfuse.tuning.log import Log
from tvm_comfuse.tuning.model import PlanModel
from tvm_comfuse.tuning.record import DatabaseStore, MemoryStore, Store
from tvm_comfuse.tuning.runner import CHILD, DEFAULT_LIMITS, Runner
from tvm_comfuse.tuning.search import Search, Settings
from tvm_comfuse.tuning.task import Task, tasks_of
from tvm_comfuse.tuning.tracker import stand_in
from tvm_comfuse.tuning.unfused import Unfused, unfused
from tvm_comfuse.worker import Limits

#: the file of a records folder besides the database and the log
MODEL_NAME = "cost_model.json"
#: candidates of a task: enough to come within 2 % of the best of all its plans (tests/host/test_tuning_search.py)
TRIALS = 64


@dataclass(frozen=True)
class TunedTask:
    """What came of one task.

    matmuls     names of the matmuls whose clusters it is
    shape       [M, N, K] of the measurements
    plan, us    the best plan and its time in microseconds, None if no candidate passed
    default_us  the time of the plan without tuning, None if it was not measured
    split_us    the time of the split form, two kernels; None if the cluster has none, or it failed
    product_us  the time of the bare product by cuBLAS, None if unknown
    trials      candidates of this search that were measured or failed
    failures    how many of them failed, by reason
    """

    matmuls: tuple[str, ...]
    shape: tuple[int, int, int]
    plan: Plan | None
    us: float | None
    default_us: float | None
    split_us: float | None
    product_us: float | None
    trials: int
    failures: dict[str, int]

    @property
    def speedup(self) -> float | None:
        """The default plan's time over the best one's."""
        return self.default_us / self.us if self.default_us and self.us else None

    @property
    def form(self) -> str:
        """Which form takes less time, ``fused`` or ``split``; as far as known the fused one."""
        split = self.us is not None and self.split_us is not None and self.split_us < self.us
        return SPLIT if split else FUSED

    def to_dict(self) -> dict[str, Any]:
        """A dictionary of plain JSON values."""
        values = {**vars(self), "matmuls": list(self.matmuls), "shape": list(self.shape)}
        return values | {"plan": self.plan.to_dict() if self.plan else None, "form": self.form}


@dataclass(frozen=True)
class TuneResult:
    """What came of a search; `plans` is what ``tvm_comfuse.compile`` takes.

    stopped   why it ended: trials, time, space (every plan was tried), interrupt, or nothing (there is no task)
    refusals  clusters without a legal plan
    records   the folder with the records, None without one and where there was nothing to tune
    note      why there was nothing to tune, or ""
    """

    target: str
    tasks: tuple[TunedTask, ...]
    stopped: str
    refusals: tuple[Refusal, ...] = ()
    records: Path | None = None
    note: str = ""

    @property
    def plans(self) -> dict[str, Plan | str]:
        """The best plan of every matmul that has one; the word ``split`` where the split form takes less time."""
        best = {name: task for task in self.tasks if task.plan is not None for name in task.matmuls}
        return {name: task.plan if task.form == FUSED else SPLIT for name, task in best.items()}  # type: ignore[misc]

    def to_dict(self) -> dict[str, Any]:
        """A dictionary of plain JSON values."""
        return {
            "target": self.target,
            "stopped": self.stopped,
            "records": str(self.records) if self.records else None,
            "tasks": [task.to_dict() for task in self.tasks],
            "refusals": [refusal.to_json() for refusal in self.refusals],
            "note": self.note,
        }


def tune(
    model: Any,
    target: str | dict[str, Any] | Target = "cuda",
    *,
    trials: int | None = None,
    time_budget: float | str | None = None,
    records: str | os.PathLike[str] | None = None,
    example_args: tuple[Any, ...] | None = None,
    early_stopping: int | None = None,
    rows: int | None = None,
    parallel: int | None = None,
    limits: Limits | None = None,
    seed: int = 0,
    store: Store | None = None,
    tracker: tuple[str, int] | None = None,
    key: str = "",
    workers: int | None = None,
    on_change: Callable[[Search], None] = lambda search: None,
) -> TuneResult:
    """Measures plans for every cluster of a model and keeps those whose numbers are right.

    model, target, example_args  as for ``tvm_comfuse.compile``; a GPU target needs that GPU, target llvm times the CPU's
                                 kernels, in which plans change nothing: it is there to try the way
    trials          candidates in all, also those that fail; TRIALS for each task if left out
    time_budget     seconds, or text such as "10m"; it begins when the tasks are known and ends with the last measurement
    records         a folder for a tuning database, with log and cost model; a search continues where the last one ended
    early_stopping  a task ends after so many candidates in a row that do not improve it
    rows            M of the measurements where M is symbolic
    parallel        processes that build
    limits          seconds that a process may take to start, to build and to launch
    store           where records go, instead of the database in the folder
    tracker, key    host and port of a TVM RPC tracker, and the key of its servers: measure there, see tuning.remote
    workers         servers to measure on at the same time, 1 if left out
    on_change       called with the search after every event

    SIGINT, at whatever moment, ends the search, and the result is what was found until then; a second one that comes
    outside the search is a KeyboardInterrupt.  Raises TuneError for an argument that cannot be used, ModelError,
    TargetError, and OutputError or DatabaseError for a folder that cannot be written or holds something else.
    """
    from tvm_comfuse.build import to_module

    budget = None if time_budget is None else seconds(time_budget)
    seed = whole("seed", seed, 0)
    trials, early_stopping = optional("trials", trials), optional("early_stopping", early_stopping)
    rows, parallel, workers = optional("rows", rows), optional("parallel", parallel), optional("workers", workers)
    check_records(records)
    check_servers(tracker, key, workers)
    parsed, device = _device(target, tracker)
    folder = Path(records) if records is not None else None
    if folder is not None and store is None:
        _check_folder(folder)
    interrupted = threading.Event()
    with noting_interrupts(interrupted):
        commands = [CHILD] if tracker is None else [stand_in(tracker, key)] * (workers or 1)
        mod = to_module(model, example_args)
        tasks, refusals = tasks_of(mod, device, rows, partial(split_of, parsed, device, rows))
        if not tasks:
            stopped = "interrupt" if interrupted.is_set() else "nothing"
            return TuneResult(name_of(parsed), (), stopped, tuple(refusals), note=_nothing(mod, refusals))
        _check_rows(rows, tasks)
        # folders are made now and not before: there is something to keep in them
        kept = store if store is not None else _store(folder)
        settings = Settings(trials or TRIALS * len(tasks), budget, early_stopping, seed)
        cost_model = PlanModel(device)
        runner = Runner(parsed, limits or DEFAULT_LIMITS, commands, remote=tracker is not None)
        with Builder(parsed, parallel, limits) as builder, runner:
            search = Search(
                parsed, device, kept, builder, runner, cost_model, settings, Log(folder), on_change, interrupted
            )
            _run(search, tasks, folder)
            return _result(search, refusals, folder)


def split_of(target: Target, device: Device, rows: int | None, cluster: Cluster) -> Unfused | None:
    """The split form of a cluster, with the plans that it would be compiled with."""
    if cluster.kind != "gemm_reduce":
        return None
    own = pretuned()
    gpu = target if is_cuda(target) else parse_target(H200.name)
    split = make_split(cluster, device, lambda func: best_plan(func, gpu, [own] if own is not None else [], rows)[0])
    return None if isinstance(split, Refusal) else unfused(cluster, split, target)


def _run(search: Search, tasks: list[Task], folder: Path | None) -> None:
    """The search between what earlier ones left in a folder and what it leaves itself."""
    if folder is not None:
        search.model.resume(folder / MODEL_NAME)
    names = [task.name for task in tasks]
    search.log.write("start", target=str(search.target), tasks=names, trials=search.settings.trials)
    search.run(tasks)
    search.log.write("end", stopped=search.stopped, trials=search.trials)
    if folder is not None:
        search.model.keep(folder / MODEL_NAME)


def _device(target: Any, tracker: tuple[str, int] | None) -> tuple[Target, Device]:
    """The target and the device whose plans are tried.  Raises TargetError, also where it cannot be measured on."""
    parsed = parse_target(target)
    device = device_of(parsed) if is_cuda(parsed) else H200
    if device is None:
        raise TargetError("a Hopper GPU or llvm", name_of(parsed), "use the target h200, h100 or llvm")
    if is_cuda(parsed) and tracker is None and not tvm.cuda(0).exist:
        raise TargetError("a GPU to measure on", "none", "tune on a machine with one, or try the way on llvm")
    return parsed, device


def _check_rows(rows: int | None, tasks: list[Task]) -> None:
    """Raises TuneError for rows that no task would take."""
    if rows is not None and all(task.spec.m is not None for task in tasks):
        found = f"M = {', '.join(sorted({str(task.spec.m) for task in tasks}))}"
        raise TuneError("a model with a symbolic M to measure with other rows", found, "leave rows out")


def _nothing(mod: tvm.IRModule, refusals: list[Refusal]) -> str:
    """Why there is no task."""
    if refusals:
        return "nothing to tune: no cluster of the model has a legal plan"
    matmuls = [matmul for found in searches(in_dataflow(mod)).values() for matmul in found.discovery.matmuls]
    reasons = "; ".join(f"{matmul.name}: {matmul.refusals[0]}" for matmul in matmuls if matmul.refusals)
    return f"nothing to tune: nothing of the model is fused ({reasons or 'it has no matmul'})"


def _check_folder(folder: Path) -> None:
    """Raises OutputError or DatabaseError unless records can be kept in a folder; makes nothing."""
    place = next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))
    if not os.path.isdir(place):
        raise OutputError("a folder for tuning records", f"{place}, which is none", "choose another place")
    for path in (place, *(path for path in (folder / LOG_NAME,) if os.path.exists(path))):
        if not os.access(path, os.W_OK):
            raise OutputError("a folder for tuning records", f"{path}: no permission to write", "choose another place")
    Database.check(folder)


def _store(folder: Path | None) -> Store:
    """The database of a folder, or memory."""
    if folder is None:
        return MemoryStore()
    database = Database.open(folder)
    Log(folder).create()
    return DatabaseStore(database)


def _result(search: Search, refusals: list[Refusal], folder: Path | None) -> TuneResult:
    tasks = tuple(
        TunedTask(
            matmuls=tuple(progress.task.matmuls),
            shape=progress.task.shape,
            plan=progress.best.plan if progress.best else None,
            us=progress.best.us if progress.best else None,
            default_us=progress.default_us,
            split_us=progress.split.us,
            product_us=search.runner.products.get(progress.task.key),
            trials=progress.trials,
            failures=dict(progress.failures),
        )
        for progress in search.progress
    )
    return TuneResult(name_of(search.target), tasks, search.stopped, tuple(refusals), folder)
