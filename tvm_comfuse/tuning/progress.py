"""How far a search has come with each task."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tvm_comfuse.schedules.cost import estimate
from tvm_comfuse.schedules.device import Device
from tvm_comfuse.schedules.plan import Plan
from tvm_comfuse.tuning.build import Built
from tvm_comfuse.tuning.measurer import Measured
from tvm_comfuse.tuning.record import Record
from tvm_comfuse.tuning.space import Space
from tvm_comfuse.tuning.task import Task


@dataclass(eq=False)
class Candidate:
    """One trial: the plan, MetaSchedule's candidate of it, and what became of it (reason: "" or a word; None until known)."""

    plan: Plan
    measure: Any
    built: Built = field(default_factory=Built)
    seconds: tuple[float, ...] = ()
    reason: str | None = None
    failure: str = ""


@dataclass(eq=False)
class SplitTime:
    """The split form's time.

    us       microseconds; None until it is known, and without a split form
    is_due   whether it will be known soon
    built    its library, None until it is built
    failure  in a word why it has no time
    """

    us: float | None = None
    is_due: bool = False
    built: Built | None = None
    failure: str = ""


@dataclass(eq=False)
class Progress:
    """One task.

    context, strategy  MetaSchedule's
    best               the fastest record, also of an earlier search
    default_us         the default plan's time
    proposed           candidates that were begun in this search, also those still on their way at its end
    measured           those that became a record
    since_best         candidates measured since `best`
    failures           candidates that failed, by reason
    reference          library of the default plan: "" if it failed, None until it is built and measured
    baseline_us        its time in the first search: what all others are corrected to
    waiting            candidates that are built and wait for the reference
    batches            candidates on their way, batch by batch
    split              what became of the split form
    held               what makes a record of each candidate that was measured before that was known
    """

    task: Task
    space: Space
    context: Any
    strategy: Any
    best: Record | None = None
    default_us: float | None = None
    proposed: int = 0
    measured: int = 0
    since_best: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    finished: bool = False
    reference: str | None = None
    baseline_us: float | None = None
    waiting: list[Candidate] = field(default_factory=list)
    batches: list[list[Candidate]] = field(default_factory=list)
    split: SplitTime = field(default_factory=SplitTime)
    held: list[Callable[[], None]] = field(default_factory=list)

    @property
    def default(self) -> Plan:
        """The plan without tuning."""
        return self.space.default

    @property
    def trials(self) -> int:
        """Candidates that were measured or failed: what an interrupt leaves on its way is none."""
        return self.measured + self.failures.total()

    def scale(self, measured: Measured) -> float:
        """What takes the drift of the device's clock since the first search out of a measurement."""
        known = self.baseline_us is not None and measured.reference_us
        return self.baseline_us / measured.reference_us if known else 1.0  # type: ignore[operator]

    @property
    def us(self) -> float:
        """The best time, or the estimate of the default plan."""
        device: Device = self.space.device
        return self.best.us if self.best is not None else estimate(self.default, self.task.spec, device).total

    @property
    def in_flight(self) -> int:
        """Candidates on their way."""
        return sum(candidate.reason is None for batch in self.batches for candidate in batch)
