"""The file of a profile, JSON.

    {"device", "date", "commit", "versions": {...}, "name", "shape": [M, N, K], "plan": {...},
     "us", "us_instrumented": microseconds of a call of the kernel without and with stamps, under the same load,
     "spilled": bytes that a thread of the instrumented kernel spills: it is not the kernel without stamps then,
     "left_out": spans that found no place among the stamps,
     "timelines": [{"cta", "begin_ns", "end_ns", "cycles", "cycle_ns",
                    "spans": [[lane, kind, number, step, begin, end], ...]}, ...],
     "summary": see summary.Summary, "ncu": {"metrics": [...]} | {"failure": text} | null}

Begin and end are cycles since the CTA's kernel entry.  The summary is of all CTAs, timelines are of a few.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvm_comfuse.errors import ComfuseError
from tvm_comfuse.profile import timeline
from tvm_comfuse.profile.summary import Summary
from tvm_comfuse.profile.timeline import CtaTimeline

#: CTAs whose stamps are kept: the first, one of the middle, the last
KEPT_CTAS = 3


class ProfileError(ComfuseError, ValueError):
    """What is asked for cannot be profiled, or a file is no profile."""


@dataclass(frozen=True)
class Profile:
    """Fields as in the module's text."""

    device: str
    date: str
    commit: str
    versions: dict[str, str]
    name: str
    shape: tuple[int, int, int]
    plan: dict[str, Any]
    us: float | None
    us_instrumented: float | None
    spilled: int
    left_out: int
    timelines: tuple[CtaTimeline, ...]
    summary: Summary
    ncu: dict[str, Any] | None = None

    @property
    def cost(self) -> float | None:
        """Cycles that the stamps add to a call; None if it was not timed."""
        if self.us is None or self.us_instrumented is None:
            return None
        return (self.us_instrumented - self.us) * 1e3 / self.timelines[0].cycle_ns

    def to_dict(self) -> dict[str, Any]:
        """A dictionary of plain JSON values."""
        plain = {key: value for key, value in vars(self).items() if key not in ("timelines", "summary")}
        return {
            **plain,
            "shape": list(self.shape),
            "timelines": [timeline.to_dict(each) for each in self.timelines],
            "summary": self.summary.to_dict(),
        }

    def write(self, path: Path) -> None:
        """Writes the JSON, one line a top-level field or so.  Raises OSError."""
        lines = [f"{json.dumps(key)}: {json.dumps(_finite(value))}" for key, value in self.to_dict().items()]
        path.write_text("{" + ",\n ".join(lines) + "}\n", encoding="utf-8")

    @staticmethod
    def read(path: Path) -> Profile:
        """The inverse of write.  Raises ProfileError for a file that is no profile."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            values["summary"] = Summary.from_dict(values["summary"])
            values["timelines"] = tuple(timeline.from_dict(each) for each in values["timelines"])
            return Profile(**{**values, "shape": tuple(values["shape"])})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            found = f"{type(error).__name__}: {error}"
            raise ProfileError(
                f"a profile at {path}", found, "make it with `comfuse profile ROW --json FILE`"
            ) from error


def kept(timelines: Sequence[CtaTimeline]) -> tuple[CtaTimeline, ...]:
    """A few of all CTAs' timelines, the first one among them: no CTA does more steps than that."""
    last = len(timelines) - 1
    places = sorted({round(last * at / (KEPT_CTAS - 1)) for at in range(KEPT_CTAS)})
    return tuple(timelines[place] for place in places)


def _finite(value: Any) -> Any:
    """NaN and infinities, which JSON does not have, become null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
