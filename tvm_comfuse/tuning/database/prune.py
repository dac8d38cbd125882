"""Which records of a database are worth keeping."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tvm_comfuse.tuning.database.record import Record


@dataclass(frozen=True)
class Removal:
    """A record that is not kept, and why."""

    record: Record
    why: str


def removals(records: Iterable[Record], keep: int | None = None, *, stale: bool = False) -> list[Removal]:
    """The records that are not kept, in their order.

    keep   how many of each workload and bucket, the fastest ones; None for all that are believed
    stale  whether records of other versions go
    """
    records = list(records)
    current = [record for record in records if not (stale and not record.binding.is_current)]
    believed = [record for record in current if not record.doubt]
    slower: set[int] = set()
    if keep is not None:
        for group in grouped(believed, _workload_and_bucket):
            slower.update(id(record) for record in sorted(group, key=lambda record: record.seconds)[keep:])
    remaining = {id(record) for record in current}
    found = []
    for record in records:
        if id(record) not in remaining:
            found.append(Removal(record, "of other versions"))
        elif record.doubt:
            found.append(Removal(record, f"not believed: {record.doubt}"))
        elif id(record) in slower:
            found.append(Removal(record, f"not among the {keep} fastest: {record.seconds * 1e6:.1f} us"))
    return found


def grouped(records: Iterable[Record], key: Callable[[Record], Any]) -> list[list[Record]]:
    """Records with equal keys together, in order."""
    groups: dict[Any, list[Record]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return list(groups.values())


def _workload_and_bucket(record: Record) -> tuple[str, str, int]:
    assert record.evidence is not None  # only asked of believed records
    return record.binding.folder, record.entry.workload, record.evidence.rows
