"""A tuning record with its evidence, and when it is believed."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from tvm_comfuse.errors import PlanError
from tvm_comfuse.schedules.plan import Plan
from tvm_comfuse.schedules.spec import ClusterSpec
from tvm_comfuse.tuning.database.binding import Binding, names_device
from tvm_comfuse.tuning.database.files import DatabaseError
from tvm_comfuse.tuning.database.store import CACHED_WORKLOADS, Entry

if TYPE_CHECKING:
    import tvm

PLAN = "comfuse.plan"
#: digits of the hash of a structure
_DIGITS = 16


@dataclass(frozen=True)
class Accuracy:
    """How a record's kernel was found to be right.

    error    relative error against float64, the worst of all seeds
    allowed  what it may be, for half precision twice the error of eager PyTorch
    seeds    runs compared
    """

    error: float
    allowed: float
    seeds: int = 1

    @property
    def passed(self) -> bool:
        """False also for NaN on either side."""
        return self.error <= self.allowed and self.seeds > 0


@dataclass(frozen=True)
class Shape:
    """What is compared of two clusters besides their plan.

    m          rows, None if symbolic
    structure  hash of everything of a cluster's spec but M, N and K
    """

    m: int | None
    n: int
    k: int
    structure: str

    @staticmethod
    def of(spec: ClusterSpec) -> Shape:
        """The shape of a cluster."""
        return Shape(spec.m, spec.n, spec.k, structure_of(spec))

    def __str__(self) -> str:
        return f"{'M' if self.m is None else self.m} x {self.n} x {self.k}"


def structure_of(spec: ClusterSpec) -> str:
    """A hash of what decides a cluster's plan besides its size: dtypes, layouts, operands, stages, reductions."""
    values = asdict(spec)
    for size in "mnk":
        del values[size]
    if not spec.wide_product:
        del values["wide_product"]  # as in records from before there was such a thing
    for operand in values["operands"]:
        del operand["name"]  # from the model; says nothing
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:_DIGITS]


@dataclass(frozen=True)
class Evidence:
    """What a stock record has no place for.

    device       of the folder, see Binding
    shape        of the cluster
    rows         rows of the measured call; of a symbolic M the bucket the record speaks for
    plan         None for records of devices that have no plans
    versions     those of the process that measured
    time         when, ISO 8601
    device_name  as the driver calls the device, "" if not known
    commit       of the measured source, "" if not known
    label        for people, e.g. the row of a suite
    split_us     microseconds of the cluster's split form on the same device, None if it was not measured
    """

    device: str
    shape: Shape
    rows: int
    plan: Plan | None
    accuracy: Accuracy
    versions: dict[str, str]
    time: str
    device_name: str = ""
    commit: str = ""
    label: str = ""
    split_us: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """A dictionary of plain JSON values; ``split_us`` is there only if it is known."""
        values = {**asdict(self), "plan": self.plan.to_dict() if self.plan else None}
        if self.split_us is None:
            del values["split_us"]
        return values

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Evidence:
        """The inverse of to_dict; other keys are ignored.  Raises DatabaseError."""
        try:
            known = {name: values[name] for name in Evidence.__dataclass_fields__ if name in values}
            known["shape"], known["accuracy"] = Shape(**known["shape"]), Accuracy(**known["accuracy"])
            known["plan"] = Plan.from_dict(known["plan"]) if known["plan"] else None
            return Evidence(**known)
        except (KeyError, TypeError, PlanError) as error:
            found = f"{type(error).__name__}: {error}"
            raise DatabaseError("the evidence of a tuning record", found, "`comfuse db prune` drops it") from error


@dataclass(frozen=True)
class Record:
    """One measured schedule.

    binding  of the folder it stands in
    entry    as stored
    """

    binding: Binding
    entry: Entry

    @cached_property
    def evidence(self) -> Evidence | None:
        """None if there is none or it cannot be read."""
        if self.entry.evidence is None:
            return None
        try:
            return Evidence.from_dict(self.entry.evidence)
        except DatabaseError:
            return None

    @cached_property
    def seconds(self) -> float:
        """Median time of a call, which one outlier does not move; infinite if it was not timed."""
        times = self.entry.payload[1]
        good = isinstance(times, list) and times and all(_is_time(value) for value in times)
        return float(statistics.median(times)) if good else math.inf

    @property
    def both_us(self) -> tuple[float, float] | None:
        """Microseconds of the record's kernel and of the cluster's split form; None if that was not measured."""
        split = self.evidence.split_us if self.evidence else None
        return (self.seconds * 1e6, split) if split is not None and _is_time(split) else None

    def with_split(self, split_us: float) -> Record:
        """The record with a time of the split form that another one of the same rows has."""
        evidence = {**(self.entry.evidence or {}), "split_us": split_us}
        return Record(self.binding, replace(self.entry, evidence=evidence))

    @cached_property
    def plan(self) -> Plan | None:
        """The plan that the record's trace writes on the function; None if it writes none."""
        text = plan_text(self.entry.payload[0])
        try:
            return None if text is None else Plan.from_json(text)
        except PlanError:
            return None

    @cached_property
    def doubt(self) -> str:
        """Why the record is not believed, or ""."""
        if not self.entry.workload:
            return "its workload is not there"
        evidence = self.evidence
        if evidence is None:
            return "no evidence: the record, its workload or its evidence was written or changed by another program"
        if Binding.from_versions(evidence.device, evidence.versions) != self.binding:
            return f"it is of {evidence.device}, {evidence.versions}, and stands in the folder of another"
        if not names_device(json.dumps(self.entry.payload[2]), self.binding.device):
            return f"its target is not {self.binding.device}"
        if not evidence.accuracy.passed:
            return f"its error {evidence.accuracy.error:.3g} is above {evidence.accuracy.allowed:.3g}"
        if not math.isfinite(self.seconds):
            return "it was not timed"
        if self.plan != evidence.plan:
            return "its trace has another plan than its evidence"
        return ""

    @property
    def is_current(self) -> bool:
        """Whether it is believed and of the versions of this process."""
        return not self.doubt and self.binding.is_current

    @cached_property
    def module(self) -> tvm.IRModule:
        """The workload: a module with the function before scheduling as "main".  Raises DatabaseError."""
        return self.workload().mod

    def workload(self) -> Any:
        """As MetaSchedule's Workload.  Raises DatabaseError if it cannot be read."""
        return workload_of(self.entry.workload)

    @property
    def function(self) -> Any:
        """The function before scheduling."""
        return self.module["main"]

    def stock(self, workload: Any = None) -> Any:
        """As MetaSchedule's TuningRecord, of a workload that is equal to its own.  Raises DatabaseError."""
        from tvm.s_tir import meta_schedule as ms

        try:
            return ms.database.TuningRecord.from_json(self.entry.payload, workload or self.workload())
        except (RuntimeError, ValueError, TypeError) as error:
            raise _unreadable("a tuning record", error) from error

    def replay(self) -> Any:
        """The function scheduled by the record's trace.  Raises DatabaseError."""
        from tvm import s_tir

        record = self.stock()
        schedule = s_tir.Schedule(self.module, debug_mask="all")
        try:
            record.trace.apply_to_schedule(schedule, remove_postproc=False)
        except (RuntimeError, ValueError, TypeError) as error:
            raise _unreadable("a trace that can be replayed", error) from error
        return schedule.mod["main"]

    def __str__(self) -> str:
        """Where a plan comes from, e.g. ``tuned on sm_90a-h200 at 2026-11-29T19:16:17+00:00, 61.2 us``.

        Of a symbolic M it says for how many rows.
        """
        evidence = self.evidence
        where = (evidence.device_name or evidence.device) if evidence else self.binding.device
        when = f" at {evidence.time}" if evidence else ""
        rows = f" for {evidence.rows} rows" if evidence and evidence.shape.m is None else ""
        return f"tuned on {where}{when}, {self.seconds * 1e6:.1f} us{rows}"


def plan_text(trace: Any) -> str | None:
    """The JSON of the plan in the JSON of a trace; None without one."""
    try:
        for kind, inputs, attributes, _ in trace[0]:
            if kind == "Annotate" and attributes == [PLAN]:
                return str(inputs[1])[1:-1]  # TVM writes a text in quotes of its own
    except (TypeError, ValueError, IndexError, KeyError):
        return None
    return None


@lru_cache(maxsize=CACHED_WORKLOADS)
def workload_of(line: str) -> Any:
    """MetaSchedule's Workload of a line.  Raises DatabaseError if it cannot be read."""
    from tvm.s_tir import meta_schedule as ms

    try:
        return ms.database.Workload.from_json(json.loads(line))
    except (RuntimeError, ValueError, TypeError) as error:
        raise _unreadable("a workload", error) from error


def _unreadable(what: str, error: Exception) -> DatabaseError:
    text = str(error).strip().splitlines()
    return DatabaseError(what, text[-1] if text else type(error).__name__, "`comfuse db verify` names the records")


def _is_time(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < UNTIMED_SECONDS


#: MetaSchedule writes 1e10 seconds for a schedule that failed
UNTIMED_SECONDS = 1e9
