"""From the words of a stamp buffer to spans, and from nested spans to what a thread does at each time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tvm_comfuse.tir_passes.emit.stamps import ANCHOR_PLACES, MMA, StampLayout, role_of

Array = np.ndarray
#: what a lane does outside of its spans: before the first, behind the last, and between them
START, END, OTHER = "start", "end", "other"
OUTSIDE = (START, END, OTHER)
_WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class Span:
    """One stretch of a lane's time, in cycles since its CTA's kernel entry.  number: which of a kind in the step."""

    lane: str
    kind: str
    number: int
    step: int
    begin: int
    end: int


@dataclass(frozen=True)
class CtaTimeline:
    """One CTA.

    begin_ns, end_ns  the GPU's nanoseconds behind the prologue and at the end; they count in steps of up to a microsecond
    cycles            from kernel entry to the end of the kernel, of its SM's clock
    cycle_ns          nanoseconds of a cycle, as the median of all CTAs
    """

    cta: int
    begin_ns: int
    end_ns: int
    cycles: int
    cycle_ns: float
    spans: tuple[Span, ...]


def decode(words: Array, layout: StampLayout) -> list[CtaTimeline]:
    """The timeline of every CTA that ran.

    words  uint32 or int32 of layout.shape; 0 where nothing was stamped
    A span without an end is left out.  The 32-bit clock may wrap once.
    """
    unsigned = np.ascontiguousarray(words).view(np.uint32).reshape(layout.shape)
    found = [_cta(number, of_cta.astype(np.int64), layout) for number, of_cta in enumerate(unsigned) if of_cta[0, 0, 1]]
    cycle_ns = float(np.median([each.cycle_ns for each in found])) if found else 0.0
    return [replace(each, cycle_ns=cycle_ns) for each in found]


def _cta(number: int, words: Array, layout: StampLayout) -> CtaTimeline:
    entry, clock, low, high = (int(word) for word in words[0, 0, :ANCHOR_PLACES])
    _, last_clock, last_low, last_high = (int(word) for word in words[0, 0, ANCHOR_PLACES : 2 * ANCHOR_PLACES])
    begin_ns, end_ns = low | high << 32, last_low | last_high << 32
    cycle_ns = (end_ns - begin_ns) / max(last_clock - clock & _WORD, 1)
    spans = [span for lane in range(1, len(layout.lanes)) for span in _spans(words[lane], lane, entry, layout)]
    return CtaTimeline(number, begin_ns, end_ns, last_clock - entry & _WORD, cycle_ns, tuple(spans))


def _spans(words: Array, lane: int, entry: int, layout: StampLayout) -> Iterator[Span]:
    name = layout.lanes[lane]
    role, group = role_of(name)
    stride = layout.stride if role == MMA else 1
    for site in (site for site in layout.sites if site.role == role):
        for at in range(site.extent):
            place = site.place + 2 * at
            for row in np.flatnonzero((words[:, place] != 0) & (words[:, place + 1] != 0)):
                begin, end = (int(words[row, place + side]) - entry & _WORD for side in (0, 1))
                yield Span(name, site.kind, site.number + at, int(row) * stride + group % stride, begin, end)


@dataclass(frozen=True)
class Segment:
    """What a lane does from `begin` to `end`, in cycles: its innermost span, or one of OUTSIDE (of step -1)."""

    lane: str
    kind: str
    step: int
    begin: int
    end: int

    @property
    def cycles(self) -> int:
        """How long it is."""
        return self.end - self.begin


def segments(timeline: CtaTimeline) -> list[Segment]:
    """The whole time of each lane that has spans, without gaps, in order."""
    lanes = dict.fromkeys(span.lane for span in timeline.spans)
    return [
        segment
        for lane in lanes
        for segment in _flatten(lane, [s for s in timeline.spans if s.lane == lane], timeline.cycles)
    ]


def _flatten(lane: str, spans: Iterable[Span], until: int) -> Iterator[Segment]:
    """Spans of one thread nest: at each time the one that began last is what the thread does."""
    now, gap = 0, START
    stack: list[Span] = []

    def reach(time: int) -> Iterator[Segment]:
        nonlocal now
        if time > now:
            kind, step = (stack[-1].kind, stack[-1].step) if stack else (gap, -1)
            yield Segment(lane, kind, step, now, time)
            now = time

    for span in sorted(spans, key=lambda span: (span.begin, -span.end)):
        while stack and stack[-1].end <= span.begin:
            yield from reach(stack[-1].end)
            stack.pop()
        yield from reach(span.begin)
        stack.append(span)
        gap = OTHER
    while stack:
        yield from reach(stack[-1].end)
        stack.pop()
    gap = END
    yield from reach(until)


def to_dict(timeline: CtaTimeline) -> dict[str, Any]:
    """Plain JSON values; a span is a list of its fields."""
    spans = [[s.lane, s.kind, s.number, s.step, s.begin, s.end] for s in timeline.spans]
    return {**vars(timeline), "spans": spans}


def from_dict(values: dict[str, Any]) -> CtaTimeline:
    """The inverse of to_dict.  Raises KeyError, TypeError or ValueError for other values."""
    return CtaTimeline(**{**values, "spans": tuple(Span(*span) for span in values["spans"])})


__all__ = ["OUTSIDE", "CtaTimeline", "Segment", "Span", "decode", "from_dict", "segments", "to_dict"]
