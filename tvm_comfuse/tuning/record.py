"""What is kept of a measurement, and where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import tvm
import tvm_ffi
from tvm import s_tir
from tvm.target import Target

from tvm_comfuse.schedules.analysis import analyze
from tvm_comfuse.schedules.plan import Plan
from tvm_comfuse.tuning.database import Accuracy, Database
from tvm_comfuse.tuning.database.record import Shape
from tvm_comfuse.tuning.database.workload import arguments, is_workload
from tvm_comfuse.tuning.metaschedule import meta_schedule as ms


@dataclass(frozen=True)
class Record:
    """One kernel that was measured and whose numbers were right.

    workload  the canonical function, see task.workload_of
    trace     from the workload to the scheduled function
    seconds   one entry a repetition, corrected for the drift of the device's clock
    rows      M of the measurement
    error     relative error against float64 of the output that is worst for what it may be, and what that may be
    allowed
    device_name  as the driver calls the device
    split_us     microseconds of the cluster's split form, corrected likewise; None if it was not measured
    """

    workload: tvm.IRModule
    trace: s_tir.schedule.Trace
    plan: Plan
    seconds: tuple[float, ...]
    target: Target
    rows: int
    error: float
    allowed: float
    device_name: str = ""
    split_us: float | None = None

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


class MemoryStore:
    """Records that end with the process."""

    def __init__(self) -> None:
        self._records: list[Record] = []

    def commit(self, record: Record) -> None:
        """Keeps a record."""
        self._records.append(record)

    def query(self, workload: tvm.IRModule, target: Target) -> list[Record]:
        """The records of a workload on a target, fastest first."""
        found = [r for r in self._records if str(r.target) == str(target)]
        found = [r for r in found if tvm_ffi.structural_equal(r.workload, workload)]
        return sorted(found, key=lambda record: record.us)


class DatabaseStore:
    """Records in a tuning database; one that was committed is on disk and answers for this device and these versions."""

    def __init__(self, database: Database):
        self.database = database

    def commit(self, record: Record) -> None:
        """Keeps a record.  Raises DatabaseError for one that the database does not believe."""
        self.database.commit(
            record.workload["main"],
            record.trace,
            record.seconds,
            record.target,
            accuracy=Accuracy(record.error, record.allowed),
            rows=record.rows,
            device_name=record.device_name,
            split_us=record.split_us,
        )

    def query(self, workload: tvm.IRModule, target: Target) -> list[Record]:
        """The records of a workload on a target, fastest first."""
        answers = self.database.answers(Shape.of(analyze(workload["main"])), target)
        # compared, not hashed: TVM's structural hash was seen to differ for equal expressions
        lines = {line for line in {entry.entry.workload for entry in answers} if is_workload(line, workload)}
        found = [_record(entry) for entry in answers if entry.entry.workload in lines]
        return sorted((r for r in found if r is not None), key=lambda record: record.us)

    def records(self, target: Target) -> list[Record]:
        """All records for a target that are believed."""
        return [r for entry in self.database.believed(target) if (r := _record(entry)) is not None]


def _record(entry: Any) -> Record | None:
    """A record of the database; None for one without a plan."""
    if entry.plan is None or entry.evidence is None:
        return None
    stock, evidence = entry.stock(), entry.evidence
    return Record(
        workload=entry.module,
        trace=stock.trace,
        plan=entry.plan,
        seconds=tuple(float(value) for value in stock.run_secs),
        target=stock.target,
        rows=evidence.rows,
        error=evidence.accuracy.error,
        allowed=evidence.accuracy.allowed,
        device_name=evidence.device_name,
        split_us=evidence.split_us,
    )


def stock_record(database: Any, record: Record) -> Any:
    """The same as a record of a TVM database."""
    workload = database.commit_workload(record.workload)
    args = arguments(record.workload["main"], record.rows)
    return ms.database.TuningRecord(record.trace, workload, list(record.seconds), record.target, args)
