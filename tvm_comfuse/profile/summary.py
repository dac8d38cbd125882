"""Timelines of all CTAs added up: cycles of each role by what it does."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tvm_comfuse.profile.timeline import OUTSIDE, CtaTimeline, Segment, segments
from tvm_comfuse.tir_passes.emit.stamps import MMA, WAITS, role_of


@dataclass(frozen=True)
class RoleSummary:
    """One role, as the mean over its threads in all CTAs, in cycles.

    kinds    by kind, over the whole kernel
    steps    the same of each step, as the mean over the threads that did it
    busy, waiting, outside  fractions of the time from kernel entry to end; outside: before the first span, behind the last
                            one and between spans
    """

    kinds: dict[str, float]
    steps: tuple[dict[str, float], ...]
    busy: float
    waiting: float
    outside: float


@dataclass(frozen=True)
class Summary:
    """All CTAs of a launch.

    roles        by name
    kinds, ctas  cycles of each CTA's MMA warp groups (their mean), by kind
    cycles       from entry to end of a CTA, the mean
    begins_ns    when each CTA began, behind the first one
    whole_ns     from the first CTA's begin to the last one's end
    """

    roles: dict[str, RoleSummary]
    kinds: tuple[str, ...]
    ctas: tuple[tuple[float, ...], ...]
    cycles: float
    begins_ns: tuple[int, ...]
    whole_ns: int

    def to_dict(self) -> dict[str, Any]:
        """A dictionary of plain JSON values, cycles rounded to whole ones."""
        return _rounded(asdict(self))

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Summary:
        """The inverse of to_dict.  Raises KeyError, TypeError or AttributeError for other values."""
        roles = {name: RoleSummary(**{**role, "steps": tuple(role["steps"])}) for name, role in values["roles"].items()}
        tuples = {name: tuple(values[name]) for name in ("kinds", "begins_ns")}
        return Summary(**{**values, **tuples, "roles": roles, "ctas": tuple(map(tuple, values["ctas"]))})


def summarize(timelines: Sequence[CtaTimeline]) -> Summary:
    """Of all CTAs of a launch.  Raises ValueError for none."""
    if not timelines:
        raise ValueError("no timeline")
    flat = [segments(timeline) for timeline in timelines]
    roles = dict.fromkeys(_role(segment.lane) for cta in flat for segment in cta)
    summaries = {role: _of_role([[s for s in cta if _role(s.lane) == role] for cta in flat]) for role in roles}
    kinds = tuple(summaries[MMA].kinds) if MMA in summaries else ()
    ctas = tuple(_by_kind([s for s in cta if _role(s.lane) == MMA], kinds) for cta in flat)
    first = min(timeline.begin_ns for timeline in timelines)
    return Summary(
        summaries,
        kinds,
        ctas,
        cycles=sum(timeline.cycles for timeline in timelines) / len(timelines),
        begins_ns=tuple(timeline.begin_ns - first for timeline in timelines),
        whole_ns=max(timeline.end_ns for timeline in timelines) - first,
    )


def share_of(kinds: dict[str, float]) -> dict[str, float]:
    """Each kind's fraction of their sum."""
    total = sum(kinds.values()) or 1.0
    return {kind: cycles / total for kind, cycles in kinds.items()}


def _role(lane: str) -> str:
    return role_of(lane)[0]


def _of_role(ctas: Sequence[Sequence[Segment]]) -> RoleSummary:
    lanes = sum(len({segment.lane for segment in cta}) for cta in ctas)
    every = [segment for cta in ctas for segment in cta]
    total = _added((s.kind, s.cycles) for s in every)
    kinds = {kind: cycles / lanes for kind, cycles in total.items()}
    shares = share_of(kinds)
    waiting = sum(share for kind, share in shares.items() if kind in WAITS)
    outside = sum(share for kind, share in shares.items() if kind in OUTSIDE)
    return RoleSummary(kinds, _steps(ctas), 1.0 - waiting - outside, waiting, outside)


def _steps(ctas: Sequence[Sequence[Segment]]) -> tuple[dict[str, float], ...]:
    cycles: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    lanes: dict[int, set[tuple[int, str]]] = defaultdict(set)
    for number, cta in enumerate(ctas):
        for segment in (s for s in cta if s.step >= 0):
            cycles[segment.step][segment.kind] += segment.cycles
            lanes[segment.step].add((number, segment.lane))
    return tuple({kind: c / len(lanes[step]) for kind, c in cycles[step].items()} for step in sorted(cycles))


def _by_kind(found: Sequence[Segment], kinds: Sequence[str]) -> tuple[float, ...]:
    lanes, total = len({segment.lane for segment in found}) or 1, _added((s.kind, s.cycles) for s in found)
    return tuple(total.get(kind, 0.0) / lanes for kind in kinds)


def _added(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    total: dict[str, float] = defaultdict(float)
    for kind, cycles in pairs:
        total[kind] += cycles
    return dict(total)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    if isinstance(value, float):
        return round(value, 4) if abs(value) <= 1 else round(value, 1)
    return value
