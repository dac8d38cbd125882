"""One folder of a tuning database: workloads, tuning records, and the evidence for each record.

    database_workload.json        ["<hash>", "<module, base64>"] a line; as stock MetaSchedule writes and reads it
    database_tuning_record.json   [<line of its workload>, [trace, seconds, target, arguments]] a line; the same
    database_evidence.json        {"key": "<record>", ...} a line; what a stock record has no place for

A record's key is a hash of its workload and of everything it says.  A record whose key no line of the evidence names
was written by somebody else, or points at another workload than it was measured on: nothing is believed of it.
Everything here is text; what it means is the business of `database`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import warnings
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from tvm_comfuse.tuning.database.files import (
    DatabaseError,
    TornLineWarning,
    append_line,
    file_errors,
    locked,
    may_write,
    read_lines,
    repair,
    replace_file,
)

WORKLOADS = "database_workload.json"
RECORDS = "database_tuning_record.json"
EVIDENCE = "database_evidence.json"
FILES = (WORKLOADS, EVIDENCE, RECORDS)

#: of the number in front of a module's JSON
LENGTH_BYTES = 8
#: many records share a workload of tens of kilobytes
CACHED_WORKLOADS = 256
#: whether two workload lines are the same workload although their texts differ
Same = Callable[[str, str], bool]


@dataclass(frozen=True)
class Entry:
    """One tuning record as it is stored.

    workload  the line of its workload, "" if there is no such line
    payload   [trace, seconds, target, arguments], decoded JSON
    key       hash of workload and payload
    evidence  decoded line of the evidence with that key, None without one
    """

    workload: str = field(repr=False)
    payload: list[Any] = field(repr=False)
    key: str
    evidence: dict[str, Any] | None = field(repr=False)


class Store:
    """A folder.  Every method may be called from several processes at a time."""

    def __init__(self, folder: Path, *, read_only: bool = False):
        self.folder = folder
        self.read_only = read_only
        self._workloads = _Workloads(folder / WORKLOADS)

    def commit(
        self,
        workload: str,
        payload: list[Any],
        evidence: dict[str, Any],
        same: Same = lambda old, new: old == new,
        known: Container[str] = (),
    ) -> Entry:
        """Append a record with its evidence, and its workload unless it is there; returns what is stored.

        workload  a line of the workload file
        same      asked for lines with the same hash
        known     keys of records that are there already and are not appended again

        The record comes last, so that a writer killed at any point leaves at most a workload or evidence that no record
        needs.  Raises DatabaseError.
        """
        with self._lock():
            lines = self._workloads.refresh()
            numbers = self._workloads.with_hash_of(workload)
            index = next((number for number in numbers if same(lines[number], workload)), None)
            if index is None:
                append_line(self.folder / WORKLOADS, workload)
                index = len(lines)
            else:
                workload = lines[index]
            key = key_of(workload, payload)
            entry = Entry(workload, payload, key, {**evidence, "key": key})
            if key not in known:
                append_line(self.folder / EVIDENCE, _dump(entry.evidence))
                append_line(self.folder / RECORDS, _dump([index, payload]))
        return entry

    def entries(self) -> list[Entry]:
        """All records, oldest first.  Lines that are no records are left out with a TornLineWarning.

        A line without an end is repaired only where this process may write.  Elsewhere no lock is needed: writers append
        whole lines and replace whole files, in an order in which what a record names is there before it.
        """
        with self._lock() if self._may_write() else nullcontext():
            return [entry for entry, _ in self._read()]

    def keep(self, choose: Callable[[list[Entry]], list[Entry]]) -> int:
        """Drop the records that `choose` leaves out, and lines that are none; returns how many records were dropped.

        Workloads stay, as records name them by their line.  Raises DatabaseError.
        """
        with self._lock():
            pairs = self._read()
            wanted = {id(entry) for entry in choose([entry for entry, _ in pairs])}
            kept = [(entry, line) for entry, line in pairs if id(entry) in wanted]
            replace_file(self.folder / RECORDS, [line for _, line in kept])
            evidence = {entry.key: entry.evidence for entry, _ in kept if entry.evidence is not None}
            replace_file(self.folder / EVIDENCE, [_dump(values) for values in evidence.values()])
        return len(pairs) - len(kept)

    def bad_lines(self) -> list[str]:
        """Whole lines that are no records or no evidence, which `keep` drops.  Raises DatabaseError."""
        found = []
        for name, is_good in ((EVIDENCE, _is_evidence), (RECORDS, _is_record)):
            lines, _ = read_lines(self.folder / name)
            found += [line for line in lines if not is_good(_parsed(line))]
        return found

    def state(self) -> tuple[Any, ...]:
        """Changes whenever a file does."""
        with file_errors(f"to look at the files of {self.folder}"):
            found = [(self.folder / name).stat() for name in FILES if (self.folder / name).exists()]
        return tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in found)

    def _may_write(self) -> bool:
        return not self.read_only and may_write(self.folder, FILES)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """The lock, files repaired.  Raises DatabaseError where that cannot be."""
        with file_errors(f"a folder to write in at {self.folder}"):
            self.folder.mkdir(parents=True, exist_ok=True)
        if not may_write(self.folder, FILES):
            raise DatabaseError(f"a folder to write in at {self.folder}", "no permission", "check its permissions")
        with locked(self.folder):
            for name in FILES:
                with file_errors(f"to read {self.folder / name}, and to repair it"):
                    repair(self.folder / name)
            yield

    def _read(self) -> list[tuple[Entry, str]]:
        """Records with their lines."""
        # records before what they name: where there is no lock, that is then there
        record_lines, _ = read_lines(self.folder / RECORDS)
        evidence_lines, _ = read_lines(self.folder / EVIDENCE)
        workloads = self._workloads.refresh()
        evidence = {}
        for values in (_load(line, self.folder / EVIDENCE) for line in evidence_lines):
            if _is_evidence(values):
                evidence[values["key"]] = values
        pairs = []
        for line in record_lines:
            values = _load(line, self.folder / RECORDS)
            if not _is_record(values):
                continue
            index, payload = values
            workload = workloads[index] if 0 <= index < len(workloads) else ""
            key = key_of(workload, payload)
            pairs.append((Entry(workload, payload, key, evidence.get(key)), line))
        return pairs


class _Workloads:
    """The lines of a workload file; what was read once is not read again."""

    def __init__(self, path: Path):
        self.path = path
        self._lines: list[str] = []
        self._by_hash: dict[str, list[int]] = {}
        self._end, self._inode = 0, 0

    def refresh(self) -> list[str]:
        """The lines as they are now."""
        stat = self.path.stat() if self.path.exists() else None
        if stat is None or stat.st_ino != self._inode or stat.st_size < self._end:
            self._lines, self._by_hash, self._end = [], {}, 0
            self._inode = stat.st_ino if stat else 0
        new, self._end = read_lines(self.path, self._end)
        for line in new:
            self._by_hash.setdefault(hash_of(line), []).append(len(self._lines))
            self._lines.append(line)
        return self._lines

    def with_hash_of(self, workload: str) -> list[int]:
        """Numbers of the lines with the same hash as another."""
        return self._by_hash.get(hash_of(workload), [])


def hash_of(workload: str) -> str:
    """The module's hash in a workload line, as text; the whole line if it has none.  Raises nothing."""
    start = workload.find('"')
    end = workload.find('"', start + 1)
    return workload[start + 1 : end] if 0 <= start < end else workload


def key_of(workload: str, payload: list[Any]) -> str:
    """The key of a record, whatever file and line it stands in."""
    return hashlib.sha256(f"{_digest(workload)}\n{_dump(payload, sort_keys=True)}".encode()).hexdigest()


@lru_cache(maxsize=CACHED_WORKLOADS)
def _digest(workload: str) -> str:
    return hashlib.sha256(workload.encode()).hexdigest()


def workload_line(values: list[str]) -> str:
    """The line of a workload of [hash, module], as stock MetaSchedule writes it."""
    return _dump(values)


def compact(values: list[str]) -> list[str]:
    """[hash, module] with the module's JSON free of white space: half the size.

    TVM writes a module as base64 of the length in eight bytes, little-endian, and indented JSON.
    """
    name, module = values
    data = base64.b64decode(module)
    length = int.from_bytes(data[:LENGTH_BYTES], "little")
    text = json.dumps(json.loads(data[LENGTH_BYTES : LENGTH_BYTES + length]), separators=(",", ":")).encode()
    packed = len(text).to_bytes(LENGTH_BYTES, "little") + text + data[LENGTH_BYTES + length :]
    return [name, base64.b64encode(packed).decode()]


def write_stock(folder: Path, entries: list[Entry]) -> None:
    """A new stock database of these records, workloads first; no evidence.

    Raises DatabaseError if the folder has a database already or cannot be written.
    """
    with file_errors(f"a folder to write at {folder}", "export to a new folder in a place that you may write to"):
        for name in FILES:
            if (folder / name).exists():
                raise DatabaseError(f"a folder without {name}", str(folder), "export to a new folder")
        folder.mkdir(parents=True, exist_ok=True)
    workloads = list(dict.fromkeys(entry.workload for entry in entries))
    number = {line: index for index, line in enumerate(workloads)}
    replace_file(folder / WORKLOADS, workloads)
    replace_file(folder / RECORDS, [_dump([number[entry.workload], entry.payload]) for entry in entries])


def _is_record(values: Any) -> bool:
    return (
        isinstance(values, list)
        and len(values) == 2
        and type(values[0]) is int
        and isinstance(values[1], list)
        and len(values[1]) == 4
    )


def _is_evidence(values: Any) -> bool:
    return isinstance(values, dict) and isinstance(values.get("key"), str)


def _parsed(line: str) -> Any:
    """The value of a line of JSON; a ValueError, which is neither a record nor evidence, if it is not JSON."""
    try:
        return json.loads(line)
    except ValueError as error:
        return error


def _load(line: str, path: Path) -> Any:
    values = _parsed(line)
    if isinstance(values, ValueError):
        hint = "`comfuse db prune` without --keep removes it and no record that is believed"
        text = f"a line of {path} is not JSON and was left out; {hint}: {line[:60]!r}"
        warnings.warn(text, TornLineWarning, stacklevel=4)
    return values


def _dump(values: Any, *, sort_keys: bool = False) -> str:
    return json.dumps(values, separators=(",", ":"), sort_keys=sort_keys)
