"""Does every record of a database still hold?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm.target import Target

from tvm_comfuse.errors import ComfuseError
from tvm_comfuse.schedules.analysis import analyze
from tvm_comfuse.schedules.apply import has_plan, plan_of
from tvm_comfuse.schedules.device import Device, device_of
from tvm_comfuse.schedules.legality import legality
from tvm_comfuse.tuning.database.database import Database
from tvm_comfuse.tuning.database.record import Record, Shape
from tvm_comfuse.verify.static import check as static_check

#: what `verify` asks of a record, in this order; the first that fails is the record's problem
QUESTIONS = ("believed", "replays", "legal", "lowers", "answers")


@dataclass(frozen=True)
class Problem:
    """A record that does not hold.

    question  the one of QUESTIONS that failed
    text      how
    """

    record: Record
    question: str
    text: str

    def __str__(self) -> str:
        key = self.record.entry.key[:12]
        return f"{self.record.binding.folder} {key}: not {self.question}: {self.text}"


def verify(database: Database, progress: Callable[[Record, str], None] = lambda _record, _text: None) -> list[Problem]:
    """Every record that does not hold; [] if all do.  Needs no GPU.

    A record holds if it is believed, its trace replays to its plan, the plan is legal on its device, the function lowers to
    a kernel that passes the static checks, and a query for its function is answered by it or a faster one.  Records of
    other versions must be believed and replay; no kernel of theirs can be made here.

    progress  called with each record and its problem, "" if it holds
    """
    problems = []
    for record in database.records():
        found = next(_problems(database, record), None)
        if found is not None:
            problems.append(found)
        progress(record, found.text if found else "")
    return problems


def _problems(database: Database, record: Record) -> Iterator[Problem]:
    if record.doubt:
        yield Problem(record, "believed", record.doubt)
        return
    try:
        func, target = record.replay(), Target(dict(record.entry.payload[2]))
    except (ComfuseError, ValueError, RuntimeError) as error:
        yield Problem(record, "replays", str(error))
        return
    replayed = plan_of(func) if has_plan(func) else None
    if replayed != record.plan:
        yield Problem(record, "replays", f"its trace makes the plan {replayed}")
        return
    if not record.binding.is_current:
        return
    device = device_of(target)
    if device is not None:
        yield from _kernel_problems(record, func, device)
    yield from _query_problems(database, record, target)


def _kernel_problems(record: Record, func: Any, device: Device) -> Iterator[Problem]:
    from tvm_comfuse.tir_passes.lower import lower

    assert record.plan is not None  # a replayed record of a device has one
    spec = analyze(func)
    refusals = legality(record.plan, spec, device)
    if refusals:
        yield Problem(record, "legal", "; ".join(map(str, refusals)))
        return
    assert record.evidence is not None
    if Shape.of(spec) != record.evidence.shape:
        yield Problem(record, "legal", f"its evidence speaks of another shape, {record.evidence.shape}")
        return
    try:
        findings = static_check(lower(func, "main"), device)
    except (ComfuseError, ValueError, RuntimeError) as error:
        yield Problem(record, "lowers", str(error))
        return
    if findings:
        yield Problem(record, "lowers", "; ".join(map(str, findings)))


def _query_problems(database: Database, record: Record, target: Target) -> Iterator[Problem]:
    assert record.evidence is not None
    answer = database.query(record.function, target, record.evidence.rows)
    if answer is None:
        yield Problem(record, "answers", "no record answers a query for its function")
    elif answer.seconds > record.seconds:
        yield Problem(record, "answers", f"a slower record answers for it: {answer}")
    elif not tvm_ffi.structural_equal(answer.module, record.module):
        yield Problem(record, "answers", f"a record of another function answers for it: {answer}")
