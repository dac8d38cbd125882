"""The tuning database: records by device and versions, each folder a stock MetaSchedule database."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Container, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.schedule import Trace
from tvm.target import Target
from tvm.tirx import PrimFunc

from tvm_comfuse.schedules.analysis import analyze
from tvm_comfuse.schedules.device import device_of
from tvm_comfuse.schedules.legality import legality
from tvm_comfuse.schedules.plan import Plan
from tvm_comfuse.tuning.database.binding import Binding, current_versions
from tvm_comfuse.tuning.database.files import DatabaseError, file_errors, replace_file
from tvm_comfuse.tuning.database.prune import Removal, grouped, removals
from tvm_comfuse.tuning.database.record import Accuracy, Evidence, Record, Shape, plan_text
from tvm_comfuse.tuning.database.store import RECORDS, WORKLOADS, Entry, Store, compact, workload_line, write_stock
from tvm_comfuse.tuning.database.workload import arguments, is_workload, same_workload, trace_of, workload_module

#: at the top of a database, so that no other folder is taken for one
MARKER = "comfuse_database.json"
FORMAT = 1
#: characters of a file that a message quotes
_SHOWN = 60


class Database:
    """Tuning records in a folder, read and written by any number of processes at a time.

    Use `open`.  Every question is answered from what the files say at that moment.
    """

    def __init__(self, path: Path, *, read_only: bool = False):
        self.path = path
        self.read_only = read_only
        self._stores: dict[str, Store] = {}
        self._read: dict[str, tuple[Any, list[Record]]] = {}

    @staticmethod
    def open(path: str | Path, *, create: bool = True, read_only: bool = False) -> Database:
        """The database at a path; a new one if there is nothing and `create` says so.

        read_only  take no lock, write nothing, repair nothing: for whoever only asks
        Torn lines of a killed writer are repaired at the first look at their folder, with a TornLineWarning, where this
        process may write.  Raises DatabaseError for a folder that is something else or that permissions do not allow.
        """
        path = Path(path)
        if not Database.check(path, create=create and not read_only):
            with file_errors(f"a folder for a tuning database at {path}", "choose another place"):
                path.mkdir(parents=True, exist_ok=True)
            replace_file(path / MARKER, [json.dumps({"format": FORMAT})])
        return Database(path, read_only=read_only)

    @staticmethod
    def check(path: str | Path, *, create: bool = True) -> bool:
        """Whether there is a database; makes none.  Raises DatabaseError where `open` would not take or make one."""
        path = Path(path)
        with file_errors(f"to look for a tuning database at {path}"):
            if not (path / MARKER).exists():
                _check_new(path, create)
                return False
        _check_format(path / MARKER)
        return True

    # --- reading ------------------------------------------------------------------------------------------------------

    def bindings(self) -> list[Binding]:
        """Of all folders there are, in order of their names."""
        with file_errors(f"to look at the folders of {self.path}"):
            return [Binding.of_folder(folder.name) for folder in sorted(self.path.iterdir()) if _has_records(folder)]

    def records(self, target: Target | None = None) -> list[Record]:
        """Records for a target and the versions of this process, or all there are; also those not believed."""
        bindings = [Binding.of(target)] if target is not None else self.bindings()
        return [record for binding in bindings for record in self._records(binding)]

    def query(self, func: PrimFunc, target: Target, rows: int | None = None) -> Record | None:
        """The fastest believed record of this very function (up to names) on this device; None without one.

        func  canonical, not scheduled
        rows  where M is symbolic, the number of rows to be good at: of the records' buckets the nearest is taken;
              the largest one if None

        If another record of the same rows has the time of the split form and the fastest one has not, it is added to that.
        """
        near = self.answers(Shape.of(analyze(func)), target)
        wanted = workload_module(func)
        # compared, not hashed: TVM's structural hash was seen to differ for equal expressions
        lines = {line for line in {record.entry.workload for record in near} if is_workload(line, wanted)}
        bucket = in_bucket([record for record in near if record.entry.workload in lines], rows)
        best = fastest(bucket)
        if best is None or best.both_us is not None:
            return best
        split_us = next((record.both_us[1] for record in bucket if record.both_us is not None), None)
        return best if split_us is None else best.with_split(split_us)

    def answers(self, shape: Shape, target: Target) -> list[Record]:
        """Believed records for a target of clusters with this shape.  They may still differ in constants."""
        return [record for record in self.believed(target) if _evidence(record).shape == shape]

    def believed(self, target: Target) -> list[Record]:
        """All records that may answer questions for a target."""
        return [record for record in self._records(Binding.of(target)) if not record.doubt]

    def directory(self, target: Target) -> Path:
        """The folder of a target's records: what MetaScheduleApplyDatabase takes as its work_dir."""
        return self.path / Binding.of(target).folder

    def to_stock(self, target: Target) -> Any:
        """A MetaSchedule database in memory with the believed records for a target, for ``with target, database:``.

        Raises DatabaseError if a record cannot be read.
        """
        database = ms.database.MemoryDatabase()
        for record in self.believed(target):
            workload = database.commit_workload(record.module)
            database.commit_tuning_record(record.stock(workload))
        return database

    # --- writing ------------------------------------------------------------------------------------------------------

    def commit(
        self,
        func: PrimFunc,
        schedule: Plan | Trace,
        run_secs: Sequence[float],
        target: Target,
        *,
        accuracy: Accuracy,
        rows: int | None = None,
        versions: Mapping[str, str] | None = None,
        time: datetime | None = None,
        device_name: str = "",
        commit: str = "",
        label: str = "",
        split_us: float | None = None,
    ) -> Record:
        """Add a measured schedule of a function; when this returns, it is on the disk.

        func      canonical, not scheduled
        schedule  the plan, or the trace of a schedule of the function that ends with a plan
        run_secs  seconds of a call, one or more measurements
        rows      of the measured call; needed where M is symbolic
        versions  those that made the kernel, if not those of this process
        The rest goes into the Evidence.  Raises DatabaseError for a record that is not to be believed: wrong results,
        no time, a plan that is not legal on the device; LoweringError if func is not canonical.
        """
        self._check_writable()
        spec = analyze(func)
        if accuracy.passed is False:
            found = f"error {accuracy.error:.3g}, allowed {accuracy.allowed:.3g}"
            raise DatabaseError("a schedule whose results were found right", found, "do not keep it")
        rows = spec.m if rows is None else rows
        if rows is None:
            raise DatabaseError("the measured rows of a function with a symbolic M", "none", "pass rows=")
        module = workload_module(func)
        stock = ms.database.TuningRecord(
            trace_of(module, schedule),
            ms.database.Workload(module),
            [float(value) for value in run_secs],
            target,
            arguments(module["main"], rows),
        )
        versions = dict(versions or current_versions())
        binding = Binding.of(target, versions)
        payload = stock.as_json()
        evidence = Evidence(
            device=binding.device,
            shape=Shape.of(spec),
            rows=rows,
            plan=_plan_of_payload(payload),
            accuracy=accuracy,
            versions=versions,
            time=(time or datetime.now(timezone.utc)).isoformat(timespec="seconds"),
            device_name=device_name,
            commit=commit,
            label=label,
            split_us=split_us,
        )
        entry = Entry(workload_line(compact(list(stock.workload.as_json()))), payload, "", evidence.to_dict())
        record = Record(binding, entry)
        self._check_record(record, spec, target)
        return self._write(record)

    def merge(self, source: Database) -> tuple[int, int]:
        """Copy the records of another database; returns how many were new, and how many were left out.

        Left out are records that are not believed: copying would make them look as if they had been measured here.
        """
        self._check_writable()
        known = {record.entry.key for record in self.records()}
        added = refused = 0
        for record in source.records():
            if record.doubt:
                refused += 1
            # an equal workload that is there may have other names, and then the record another key
            elif record.entry.key not in known and self._write(record, known).entry.key not in known:
                added += 1
        return added, refused

    def removals(self, keep: int | None = None, *, stale: bool = False) -> list[Removal]:
        """The records that `prune` with the same arguments drops, and why.  Raises DatabaseError."""
        _check_keep(keep)
        return removals(self.records(), keep, stale=stale)

    def bad_lines(self) -> int:
        """How many lines are no records or no evidence; `prune` drops them.  Raises DatabaseError."""
        return sum(len(self._store(binding).bad_lines()) for binding in self.bindings())

    def prune(self, keep: int | None = None, *, stale: bool = False) -> int:
        """Drop records that are not believed, and lines that are none; returns how many records were dropped.

        keep   drop also what is slower than this many records of the same workload and bucket
        stale  remove the folders of other versions altogether
        Raises DatabaseError.
        """
        self._check_writable()
        _check_keep(keep)
        dropped = 0
        for binding in self.bindings():
            if stale and not binding.is_current:
                dropped += len(self._records(binding))
                shutil.rmtree(self.path / binding.folder)
                self._stores.pop(binding.folder, None)
                continue
            dropped += self._store(binding).keep(_kept(binding, keep))
        return dropped

    def export(self, target: Target, folder: str | Path, keep: int = 1) -> int:
        """Write a stock database of the `keep` fastest believed records of each workload; returns their number.

        Of a function with a symbolic M only the largest bucket is written: a stock reader compares times alone, and
        fewer rows take less.  Raises DatabaseError if there is no such record, and if the folder has or is part of a
        database already or cannot be written.
        """
        _check_outside(Path(folder))
        chosen: list[Record] = []
        for group in grouped(self.believed(target), lambda record: record.entry.workload):
            chosen += sorted(in_bucket(group, None), key=lambda record: record.seconds)[:keep]
        if not chosen:
            needed = f"records for {Binding.of(target).folder} in {self.path}"
            raise DatabaseError(needed, self._contents(), "another --target, or tune for this one first")
        write_stock(Path(folder), [record.entry for record in chosen])
        return len(chosen)

    def _contents(self) -> str:
        """How many believed records there are for which devices and versions, for people."""
        counts = {b.folder: sum(not record.doubt for record in self._records(b)) for b in self.bindings()}
        return ", ".join(f"{count} for {name}" for name, count in counts.items() if count) or "none for any target"

    # --- parts --------------------------------------------------------------------------------------------------------

    def _write(self, record: Record, known: Container[str] = ()) -> Record:
        entry, evidence, store = record.entry, record.entry.evidence, self._store(record.binding)
        assert evidence is not None  # what is believed has some
        return Record(record.binding, store.commit(entry.workload, entry.payload, evidence, same_workload, known))

    def _check_record(self, record: Record, spec: Any, target: Target) -> None:
        """Raises DatabaseError for a record that would not be believed or whose plan is not legal."""
        device = device_of(target)
        if device is not None:
            if record.plan is None:
                raise DatabaseError(f"a schedule with a plan for {device.name}", "none", "use apply_plan")
            refusals = legality(record.plan, spec, device)
            if refusals:
                raise DatabaseError(f"a plan that is legal on {device.name}", str(refusals[0]), "do not keep it")
        if record.doubt:
            raise DatabaseError("a record that can be believed", record.doubt, "measure it again")

    def _check_writable(self) -> None:
        if self.read_only:
            raise DatabaseError("a database to write to", f"{self.path}, opened to read", "open another one")

    def _store(self, binding: Binding) -> Store:
        if binding.folder not in self._stores:
            self._stores[binding.folder] = Store(self.path / binding.folder, read_only=self.read_only)
        return self._stores[binding.folder]

    def _records(self, binding: Binding) -> list[Record]:
        """The records of a folder; parsed again only after a change."""
        if not (self.path / binding.folder).is_dir():
            return []
        store = self._store(binding)
        state, records = self._read.get(binding.folder, (None, []))
        if state is None or state != store.state():
            # the state from before: what is written meanwhile is read the next time
            state = store.state()
            records = [Record(binding, entry) for entry in store.entries()]
            self._read[binding.folder] = state, records
        return records


def in_bucket(records: list[Record], rows: int | None) -> list[Record]:
    """The records whose measured rows are nearest to `rows`, by their ratio; of the most rows if None."""
    if not records:
        return []
    buckets = sorted({_evidence(record).rows for record in records}, reverse=True)
    best = buckets[0] if rows is None else min(buckets, key=lambda bucket: abs(math.log(bucket / rows)))
    return [record for record in records if _evidence(record).rows == best]


def fastest(records: list[Record]) -> Record | None:
    """The record with the smallest time; of equal ones the oldest."""
    return min(records, key=lambda record: record.seconds, default=None)


def _kept(binding: Binding, keep: int | None) -> Callable[[list[Entry]], list[Entry]]:
    def choose(entries: list[Entry]) -> list[Entry]:
        gone = {id(each.record.entry) for each in removals((Record(binding, entry) for entry in entries), keep)}
        return [entry for entry in entries if id(entry) not in gone]

    return choose


def _check_keep(keep: int | None) -> None:
    if keep is not None and keep < 1:
        raise DatabaseError("at least one record to keep of each workload", str(keep), "delete the folder instead")


def _plan_of_payload(payload: Any) -> Plan | None:
    text = plan_text(payload[0])
    return None if text is None else Plan.from_json(text)


def _evidence(record: Record) -> Evidence:
    assert record.evidence is not None  # only asked of believed records
    return record.evidence


def _has_records(folder: Path) -> bool:
    return folder.is_dir() and ((folder / WORKLOADS).exists() or (folder / RECORDS).exists())


def _check_outside(folder: Path) -> None:
    """Raises DatabaseError for a folder that is, or lies in, a tuning database: readers would take it for a part of it."""
    place = folder.resolve()
    for each in (place, *place.parents):
        if os.path.exists(each / MARKER):
            raise DatabaseError(
                "a folder outside of any tuning database", f"{folder} in {each}", "export to a new folder"
            )


def _check_new(path: Path, create: bool) -> None:
    """Raises DatabaseError unless a database may be made at a path."""
    if (path / WORKLOADS).exists() or (path / RECORDS).exists():
        if path.parent.joinpath(MARKER).exists():
            raise DatabaseError("a tuning database", f"{path}, one folder of it", f"open {path.parent}")
        found = f"a database of stock MetaSchedule at {path}, whose records name no versions and no checked results"
        raise DatabaseError("a tuning database of tvm_comfuse", found, "tune again; stock TVM still reads it")
    needed = "a tuning database or an empty folder" if create else "an existing tuning database"
    # another process may be making the same database
    if path.exists() and (not path.is_dir() or any(not each.name.startswith(MARKER) for each in path.iterdir())):
        raise DatabaseError(needed, f"something else at {path}", "check the path")
    if not create:
        found = f"an empty folder at {path}" if path.exists() else f"nothing at {path}"
        raise DatabaseError(needed, found, "check the path; `comfuse tune --tuning-records` makes one")


def _check_format(marker: Path) -> None:
    try:
        text = marker.read_text()
    except (OSError, ValueError) as error:
        raise DatabaseError(f"a readable {marker}", str(error), "restore the file") from error
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, dict) or "format" not in values:
        needed = f"{json.dumps({'format': FORMAT})} in {marker}"
        raise DatabaseError(
            needed, repr(text.strip()[:_SHOWN]), "restore the file; it says which format the records have"
        )
    if values["format"] != FORMAT:
        found = f"format {values['format']} at {marker}"
        raise DatabaseError(f"a database of format {FORMAT}", found, "use its tvm_comfuse")
