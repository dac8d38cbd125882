"""What is kept of a measurement, and where."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import tvm
from tvm import s_tir
from tvm.target import Target

from tvm_comfuse.schedules.plan import Plan
from tvm_comfuse.tuning.metaschedule import meta_schedule as ms
from tvm_comfuse.tuning.rules import plan_in


@dataclass(frozen=True)
class Record:
    """One kernel that was measured and whose numbers were right.

    workload  the canonical function, see task.workload_of
    trace     from the workload to the scheduled function
    seconds   one entry a repetition, corrected for the drift of the device's clock
    rows      M of the measurement
    args      MetaSchedule's description of the arguments
    error     relative error against float64, and what it may be, of the worst output; NaN where it was not kept
    allowed
    """

    workload: tvm.IRModule
    trace: s_tir.schedule.Trace
    plan: Plan
    seconds: tuple[float, ...]
    target: Target
    rows: int
    args: tuple[Any, ...] = ()
    error: float = math.nan
    allowed: float = math.nan

    @property
    def us(self) -> float:
        """The (upper) median in microseconds."""
        return sorted(self.seconds)[len(self.seconds) // 2] * 1e6


class Store(Protocol):
    """Where records are kept.  Everything committed has passed its accuracy check."""

    def commit(self, record: Record) -> None:
        """Keeps a record, at once."""

    def query(self, workload: tvm.IRModule, target: Target) -> Sequence[Record]:
        """The records of a workload on a target, fastest first."""


class StockStore:
    """A Store in TVM's own tuning database: JSON files in a folder, or memory without one.

    ``relax.transform.MetaScheduleApplyDatabase`` and everything else of TVM that takes a database can use it.
    """

    def __init__(self, folder: str | Path | None = None):
        if folder is None:
            self.database = ms.database.MemoryDatabase()
        else:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.database = ms.database.JSONDatabase(work_dir=str(folder))

    def commit(self, record: Record) -> None:
        """Keeps a record; with a folder it is on disk when this returns."""
        self.database.commit_tuning_record(stock_record(self.database, record))

    def query(self, workload: tvm.IRModule, target: Target) -> list[Record]:
        """The records of a workload on a target, fastest first."""
        if not self.database.has_workload(workload):
            return []
        found = self.database.get_top_k(self.database.commit_workload(workload), len(self.database))
        records = (_record(entry) for entry in found)
        return [record for record in records if record is not None and str(record.target) == str(target)]

    def records(self) -> list[Record]:
        """All records."""
        found = (_record(entry) for entry in self.database.get_all_tuning_records())
        return [record for record in found if record is not None]


def _record(entry: Any) -> Record | None:
    """A record of TVM's; None if it is of another design space."""
    plan = plan_in(entry.trace)
    if plan is None or not entry.args_info:
        return None
    seconds = tuple(float(value) for value in entry.run_secs)
    rows = int(entry.args_info[0].shape[0])
    return Record(entry.workload.mod, entry.trace, plan, seconds, entry.target, rows, tuple(entry.args_info))


def stock_record(database: Any, record: Record) -> Any:
    """The same as a record of a TVM database."""
    workload = database.commit_workload(record.workload)
    return ms.database.TuningRecord(record.trace, workload, list(record.seconds), record.target, list(record.args))
