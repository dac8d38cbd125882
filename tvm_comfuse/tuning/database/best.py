"""The best plan that is known for a cluster."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from tvm.target import Target
from tvm.tirx import PrimFunc

from tvm_comfuse.refusal import Refusal
from tvm_comfuse.schedules.analysis import analyze
from tvm_comfuse.schedules.choose import default_plan
from tvm_comfuse.schedules.device import Device, device_of
from tvm_comfuse.schedules.legality import legality
from tvm_comfuse.schedules.plan import Plan
from tvm_comfuse.schedules.spec import ClusterSpec
from tvm_comfuse.tuning.database.database import Database
from tvm_comfuse.tuning.database.files import DatabaseError
from tvm_comfuse.tuning.database.record import Record, Shape
from tvm_comfuse.tuning.database.transfer import REACH, nearest

PRETUNED = Path(__file__).resolve().parents[1] / "pretuned"


@dataclass(frozen=True)
class PlanSource:
    """Where a plan comes from.

    kind    ``tuned``: measured on this very cluster; ``nearest``: made of the plan of another one; ``default``: the
            cost model's
    text    for people
    record  the record, None for the default
    """

    kind: str
    text: str
    record: Record | None = None

    def __str__(self) -> str:
        return self.text


DEFAULT = PlanSource("default", "default: no tuning record answers, the cost model's plan")


def best_plan(
    func: PrimFunc, target: Target, databases: Database | Sequence[Database], rows: int | None = None
) -> tuple[Plan | Refusal, PlanSource]:
    """The plan of the fastest record of a canonical function, else of the nearest one, else the cost model's.

    databases  asked in this order, all of them for the function itself before any for a near one
    rows       where M is symbolic, the number of rows to be good at; a static M is what it is
    The plan is legal; a Refusal says why no plan is, also for a target without plans.  Raises LoweringError if the
    function is not canonical, DatabaseError if a database cannot be read.
    """
    device = device_of(target)
    if device is None:
        return Refusal("device", "plans are for Hopper GPUs (sm_90a) only", {"target": str(target.kind)}), DEFAULT
    spec = analyze(func)
    rows = rows if spec.m is None else None
    sources = [databases] if isinstance(databases, Database) else list(databases)
    for database in sources:
        record = database.query(func, target, rows)
        if record is not None and record.plan is not None and not legality(record.plan, spec, device):
            return record.plan, PlanSource("tuned", str(record), record)
    preferred = default_plan(spec, device)
    return _near(sources, spec, target, device, preferred, rows) or (preferred, DEFAULT)


def _near(
    databases: list[Database],
    spec: ClusterSpec,
    target: Target,
    device: Device,
    preferred: Plan | Refusal,
    rows: int | None,
) -> tuple[Plan, PlanSource] | None:
    guard = preferred if isinstance(preferred, Plan) else None
    structure = Shape.of(spec).structure
    for database in databases:
        records = [r for r in database.believed(target) if r.evidence and r.evidence.shape.structure == structure]
        # whoever gives a database means its records to be used; the package's own are for what is like them
        reach = REACH if database.path == PRETUNED else math.inf
        found = nearest(records, spec, device, guard, rows, reach)
        if found is not None:
            return found.plan, PlanSource("nearest", str(found), found.record)
    return None


@lru_cache(maxsize=1)
def pretuned() -> Database | None:
    """The records that come with the package; None where it was installed without them."""
    try:
        return Database.open(PRETUNED, create=False, read_only=True)
    except DatabaseError:
        return None
