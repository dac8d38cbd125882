"""Measured times of many plans of suite rows, and their JSON file.

    {"what": "plan times", "device", "date", "commit", "versions": {...}, "protocol", "fields": [names of a plan's fields],
     "rows": {"post_norm/bert_base_attn": {
         "row": {...}, "legal": 2063, "default": [a plan's values], "sweep": {...} | null, "searches": [{...}],
         "plans": [{"plan": [a plan's values], "us", "reference_us", "error", "allowed", "registers"},
                   {"plan": [...], "reason", "failure"}]}}}

There is one plan a line; what is not known of it is left out.  Numbers of plans have six digits, which is more than is known.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from tvm_comfuse.bench.report import ReportError, new_report
from tvm_comfuse.bench.suites import Row
from tvm_comfuse.bench.timing import TURN
from tvm_comfuse.errors import PlanError
from tvm_comfuse.schedules.plan import Plan

WHAT = "plan times"
FIELDS = tuple(f.name for f in fields(Plan))
_HEADER = ("device", "date", "commit", "versions", "protocol")

PROTOCOL = f"{TURN}; each time between two of the default plan, whose mean it is scaled by, on a board under load"


@dataclass(frozen=True)
class PlanTime:
    """What is known of one plan.

    us            microseconds of a call; None if it failed
    reference_us  of the default plan, measured in the same minute; None if it was not
    error, allowed  as in measurer.Measured; None if the numbers were not compared
    reason, failure  as in build.Built and measurer.Measured
    """

    us: float | None = None
    reference_us: float | None = None
    error: float | None = None
    allowed: float | None = None
    registers: int | None = None
    reason: str = ""
    failure: str = ""


@dataclass
class RowTimes:
    """The plans of one row.

    legal     plans there are
    default   the plan without tuning
    sweep     what sweep.sweep says of itself
    searches  one entry a search, see contest.contest
    """

    row: Row
    legal: int
    default: Plan
    plans: dict[Plan, PlanTime] = field(default_factory=dict)
    sweep: dict[str, Any] | None = None
    searches: list[dict[str, Any]] = field(default_factory=list)

    @property
    def baseline_us(self) -> float | None:
        """The default plan's time, which the clock's drift is taken out with."""
        known = self.plans.get(self.default)
        return known.us if known is not None else None

    @property
    def whole(self) -> bool:
        """Whether every plan is known."""
        return len(self.plans) >= self.legal

    def us(self, plan: Plan) -> float | None:
        """A plan's time at the clock of the default plan's; None if it failed or is not known."""
        known = self.plans.get(plan)
        if known is None or known.us is None:
            return None
        if not known.reference_us or not self.baseline_us:
            return known.us
        return known.us * self.baseline_us / known.reference_us

    def rebase(self, plan: Plan) -> bool:
        """Makes another plan the default, so that times stay of use when the cost model's choice changes; every plan keeps its
        `us`.  False, and nothing is done, if the plan's time is not known."""
        us, before = self.us(plan), self.baseline_us
        if us is None or before is None:
            return False
        for other, time in self.plans.items():
            reference = before if other == self.default else time.reference_us
            self.plans[other] = replace(time, reference_us=reference and reference * us / before)
        self.plans[plan] = replace(self.plans[plan], us=us, reference_us=None)
        self.default = plan
        return True

    def ranked(self) -> list[Plan]:
        """Plans with a time, fastest first."""
        timed = {plan: us for plan in list(self.plans) if (us := self.us(plan)) is not None}
        return sorted(timed, key=lambda plan: timed[plan])

    @property
    def best(self) -> Plan | None:
        """The fastest plan whose numbers were compared."""
        return next((plan for plan in self.ranked() if self.plans[plan].error is not None), None)

    def to_dict(self) -> dict[str, Any]:
        """A dictionary of plain JSON values."""
        entries = []
        for plan, time in list(self.plans.items()):  # a search may go on meanwhile
            known = {name: _short(value) for name, value in asdict(time).items() if value not in (None, "")}
            entries.append({"plan": _values(plan), **known})
        return {
            "row": asdict(self.row),
            "legal": self.legal,
            "default": _values(self.default),
            "sweep": self.sweep,
            "searches": self.searches,
            "plans": entries,
        }


@dataclass
class PlanTimes:
    """A file of measured plans: where and with what, and the rows by label."""

    header: dict[str, Any]
    rows: dict[str, RowTimes] = field(default_factory=dict)

    @staticmethod
    def new() -> PlanTimes:
        """One without rows, for this machine, now."""
        report = asdict(new_report(PROTOCOL))
        return PlanTimes({name: report[name] for name in _HEADER})

    @staticmethod
    def read(path: str | Path) -> PlanTimes:
        """The inverse of write; plans with fields that Plan has not now are left out.  Raises ReportError."""
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
            if values["what"] != WHAT:
                raise ValueError(f"it holds {values['what']}")
            header = {name: values[name] for name in _HEADER}
            rows = {label: _row(entry, values["fields"]) for label, entry in values["rows"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            hint = "make one with benchmarks/search.py"
            raise ReportError(f"a file of plan times at {path}", f"{type(error).__name__}: {error}", hint) from error
        return PlanTimes(header, rows)

    def write(self, path: str | Path) -> None:
        """Writes the JSON, so that a reader sees the old file or the whole new one.  Raises OSError."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        rows = ",\n".join(f"{json.dumps(label)}: {_lines(row.to_dict())}" for label, row in self.rows.items())
        head = json.dumps({"what": WHAT, **self.header, "fields": FIELDS})[:-1]
        part = target.with_name(target.name + ".part")
        part.write_text(f'{head},\n"rows": {{\n{rows}\n}}}}\n', encoding="utf-8")
        part.replace(target)


def _lines(row: dict[str, Any]) -> str:
    """JSON of a row with one plan a line."""
    plans = ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in row.pop("plans"))
    return f'{json.dumps(row)[:-1]}, "plans": [\n{plans}\n]}}'


def _short(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _values(plan: Plan) -> list[Any]:
    return list(plan.to_dict().values())


def _row(entry: dict[str, Any], names: Sequence[str]) -> RowTimes:
    plans = {}
    for known in entry["plans"]:
        try:
            plan = _plan(known.pop("plan"), names)
        except PlanError:
            continue
        plans[plan] = PlanTime(**known)
    row, default = Row(**entry["row"]), _plan(entry["default"], names)
    return RowTimes(row, entry["legal"], default, plans, entry["sweep"], entry["searches"])


def _plan(values: Sequence[Any], names: Sequence[str]) -> Plan:
    return Plan.from_dict(dict(zip(names, values, strict=True)))
