"""A plan measured on one shape, made legal for another."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tvm_comfuse.schedules.choose import persistent_ctas, scopes
from tvm_comfuse.schedules.co_residency import row_length
from tvm_comfuse.schedules.cost import estimate, rows_of
from tvm_comfuse.schedules.device import Device
from tvm_comfuse.schedules.footprint import row_parts
from tvm_comfuse.schedules.legality import legality, supported
from tvm_comfuse.schedules.plan import Plan
from tvm_comfuse.schedules.spec import ClusterSpec
from tvm_comfuse.schedules.walk import in_turn
from tvm_comfuse.tuning.database.record import Record, Shape

#: a shape further away than this factor says less than the cost model (not calibrated)
REACH = 4.0
#: A transferred plan is not taken where, against the plan that the cost model prefers, it is this much slower than on the
#: shape it was measured on: the record speaks for too different a shape.  The model's errors on one shape are up to
#: about half of that (benchmarks/results/h200/layouts.json).
MOST_SLOWDOWN = 1.25


@dataclass(frozen=True)
class Transfer:
    """A plan for a cluster and the record it was made of.

    changed  fields of the plan that had to be other than in the record
    """

    plan: Plan
    record: Record
    changed: tuple[str, ...]

    def __str__(self) -> str:
        assert self.record.evidence is not None
        shape = self.record.evidence.shape
        near = f"{self.record.evidence.rows if shape.m is None else shape.m} x {shape.n} x {shape.k}"
        changed = f", {', '.join(self.changed)} adapted" if self.changed else ""
        return f"nearest: {near}, {self.record}{changed}"


def nearest(
    records: Sequence[Record],
    spec: ClusterSpec,
    device: Device,
    preferred: Plan | None,
    rows: int | None = None,
    reach: float = math.inf,
) -> Transfer | None:
    """The plan of the nearest record of a cluster with the same structure; None if no record has one that is legal.

    Shapes with equal N and K come first, then the distance is that of
    (log M, log N, log K).  Of one shape the fastest
    record counts.

    records    believed ones of the device
    preferred  what the cost model would take, None to transfer without asking it
    rows       where M is symbolic, the number of rows to be good at; the cost model's nominal number if None
    reach      the most by which M, N or K may differ, as a factor
    """
    if supported(spec) or any(row_length(spec, device)):
        return None
    structure = Shape.of(spec).structure
    here = (rows or rows_of(spec), spec.n, spec.k)
    fastest: dict[tuple[int, int, int], Record] = {}
    for record in sorted(records, key=lambda each: each.seconds):
        if record.plan is not None and _shape(record).structure == structure:
            fastest.setdefault(_extents(record), record)
    near = [there for there in fastest if all(1 / reach <= a / b <= reach for a, b in zip(there, here, strict=True))]
    for extents in sorted(near, key=lambda there: _distance(there, here)):
        record = fastest[extents]
        assert record.plan is not None
        plan = adapted(record.plan, spec, device)
        if plan is None or _suits_worse(record, plan, preferred, spec, device):
            continue
        return Transfer(plan, record, tuple(k for k, value in vars(plan).items() if value != getattr(record.plan, k)))
    return None


def adapted(plan: Plan, spec: ClusterSpec, device: Device) -> Plan | None:
    """The plan with scope, cluster, depth and grid as another cluster needs them; None if it cannot be made legal."""
    columns = plan.cta_columns
    for scope in _scopes(plan, spec):
        parts = math.ceil(spec.n / columns) if scope == "cluster" else 1
        for depth in range(plan.pipeline_depth, 1, -1):
            made = replace(plan, exchange=scope, cluster_n=parts, pipeline_depth=depth)
            if not in_turn(made) and row_parts(made, spec) * made.cluster_m > device.sms:
                break
            made = replace(made, ctas=persistent_ctas(made, spec, device))
            if not legality(made, spec, device):
                return made
    return None


def _scopes(plan: Plan, spec: ClusterSpec) -> Iterator[str]:
    """Scopes that reach a whole row, that of the plan first."""
    possible = scopes(spec, plan.cta_columns, plan.groups_n, plan.cluster_m)
    yield from sorted(possible, key=lambda scope: scope != plan.exchange)


def _suits_worse(record: Record, plan: Plan, preferred: Plan | None, spec: ClusterSpec, device: Device) -> bool:
    """Whether the plan loses against the preferred one, by MOST_SLOWDOWN, what it had not lost on its own shape.

    Ratios of estimates on both shapes are compared, so that what the cost model does not know of a plan, and the
    measurement did, drops out.
    """
    if preferred is None:
        return False
    rows, n, k = _extents(record)
    there = replace(spec, m=rows, n=n, k=k)
    rival = adapted(preferred, there, device)
    assert record.plan is not None
    before = _ratio(record.plan, rival, there, device) if rival is not None else 1.0
    return _ratio(plan, preferred, spec, device) > MOST_SLOWDOWN * max(1.0, before)


def _ratio(plan: Plan, rival: Plan, spec: ClusterSpec, device: Device) -> float:
    return estimate(plan, spec, device).total / estimate(rival, spec, device).total


def _shape(record: Record) -> Shape:
    assert record.evidence is not None  # only asked of believed records
    return record.evidence.shape


def _extents(record: Record) -> tuple[int, int, int]:
    assert record.evidence is not None
    shape = record.evidence.shape
    return record.evidence.rows, shape.n, shape.k


def _distance(there: tuple[int, int, int], here: tuple[int, int, int]) -> tuple[bool, float]:
    """Whether N or K differ, then the distance in log space."""
    logs = [math.log(a / b) for a, b in zip(there, here, strict=True)]
    return there[1:] != here[1:], math.hypot(*logs)
