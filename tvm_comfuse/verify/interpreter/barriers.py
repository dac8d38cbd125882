"""Barriers: mbarriers with phases and bytes, named barriers, the cluster's barrier."""

from __future__ import annotations

from typing import Any

import numpy as np

from tvm_comfuse.verify.interpreter.report import Report

Array = np.ndarray
#: an mbarrier counts at most so many outstanding bytes, and so many arrivals
MOST_BYTES, MOST_ARRIVALS = 2**20 - 1, 2**20 - 1


class Waitable:
    """Something actors wait for."""

    def __init__(self, name: str, scheduler: Any):
        self.name, self.scheduler = name, scheduler
        self.waiters: list[Any] = []

    def wake(self) -> None:
        """Lets every waiter look again."""
        if self.waiters:
            self.scheduler.wake(self)


class Joined:
    """A vector under way and the one of the last complete phase, each with its fenced part."""

    def __init__(self, length: int):
        self.ready, self.pending = np.zeros((2, length), np.int32), np.zeros((2, length), np.int32)

    def add(self, vector: Array, fenced: Array) -> None:
        """Joins what one arriving warp knows."""
        np.maximum(self.pending[0], vector, out=self.pending[0])
        np.maximum(self.pending[1], fenced, out=self.pending[1])

    def complete(self) -> None:
        """The phase ends: who waited for it knows what all who arrived knew."""
        np.maximum(self.ready, self.pending, out=self.ready)
        self.pending[:] = 0


class MBarrier(Waitable):
    """An mbarrier object in shared memory."""

    def __init__(self, name: str, cta: int, component: int, length: int, scheduler: Any, report: Report):
        super().__init__(name, scheduler)
        self.cta, self.component, self.report = cta, component, report
        self.expected = self.pending = self.bytes = self.phase = 0
        self.joined = Joined(length)
        self.initialised: tuple[int, int] | None = None
        self.fenced = False
        self.carries_bytes = False
        self.passed_fresh: list[str] = []
        #: who waited for the last complete phase: (phase, label, components, clocks)
        self.waits: list[tuple[int, str, Array, Array]] = []

    @property
    def place(self) -> str:
        """Its name and CTA."""
        return f"cta {self.cta} {self.name}"

    def init(self, epoch: tuple[int, int], count: int) -> None:
        """mbarrier.init by the warp with this epoch."""
        if self.initialised is not None:
            self.report.add("barrier-init", self.place, "is initialised twice")
        if not 0 < count <= MOST_ARRIVALS:
            self.report.add(
                "barrier-init",
                self.place,
                f"an arrival count of {count}; 1 to {MOST_ARRIVALS} are allowed",
                count=count,
            )
        self.initialised = epoch
        self.expected = self.pending = count

    def arrive(self, who: str, count: int) -> None:
        """`count` arrivals."""
        if count > self.pending:
            text = f"{who} arrives {count} times on phase {self.phase}, which lacks {self.pending} of {self.expected} arrivals"
            self.report.fatal(
                "arrival-overflow", self.place, text, expected=self.expected, pending=self.pending, count=count
            )
        self.pending -= count
        self._settle()

    def expect(self, count: int) -> None:
        """Adds bytes that must land before the phase completes."""
        self._bytes(count)

    def land(self, phase: int, count: int) -> None:
        """Bytes of a load that was issued for `phase` have landed."""
        if phase != self.phase:
            text = (
                f"{count} bytes of a load issued for phase {phase} land in phase {self.phase}: it was not armed "
                f"with all bytes that are loaded in phase {phase}"
            )
            self.report.add("transaction-bytes", self.place, text, bytes=count, phase=phase, now=self.phase)
        self._bytes(-count)
        self._settle()

    def _bytes(self, count: int) -> None:
        self.carries_bytes = True
        for who in self.passed_fresh:
            text = f"{who} waited for a parity that passes before the first phase: it did not wait for the bytes"
            self.report.add("phase-aliasing", f"{who}, {self.place}", text, phase=0)
        self.passed_fresh.clear()
        self.bytes += count
        if abs(self.bytes) > MOST_BYTES:
            text = f"{self.bytes} outstanding bytes; at most {MOST_BYTES} can be counted"
            self.report.fatal("transaction-bytes", self.place, text, bytes=self.bytes)

    def _settle(self) -> None:
        if self.pending == 0 and self.bytes < 0:
            text = f"{-self.bytes} more bytes land in phase {self.phase} than all its arrivals announced: it never ends"
            self.report.add("transaction-bytes", self.place, text, bytes=self.bytes, phase=self.phase)
        if self.pending == 0 and self.bytes == 0 and self.expected:
            self.phase += 1
            self.pending = self.expected
            self.joined.complete()
            self.joined.ready[:, self.component] = self.phase
            self._check_waits()
            self.wake()

    def waited(self, who: str, components: Array, clocks: Array) -> None:
        """Somebody's wait was satisfied by the last complete phase."""
        self.waits.append((self.phase - 1, who, components, clocks))

    def _check_waits(self) -> None:
        """Whoever waited for phase p must have done so before phase p + 1 could end: else a late wait misses phase p, and
        would wait for phase p + 2."""
        for phase, who, components, clocks in self.waits:
            if phase == self.phase - 2 and (self.joined.ready[0][components] < clocks).any():
                text = (
                    f"phase {phase + 1} can end before {who} has waited for phase {phase}: had it come later, it would have "
                    f"missed that phase and waited for phase {phase + 2}"
                )
                self.report.add("missed-phase", f"{who}, {self.place}", text, phase=phase)
        self.waits = [wait for wait in self.waits if wait[0] >= self.phase - 1]

    def passes(self, parity: int) -> bool:
        """try_wait.parity: whether the phase of that parity is complete."""
        return self.phase % 2 != parity

    def state(self) -> str:
        """For a message about a deadlock."""
        return f"phase {self.phase} lacks {self.pending} of {self.expected} arrivals" + (
            f" and {self.bytes} bytes" if self.bytes else ""
        )


class CountedBarrier(Waitable):
    """A named barrier of a CTA, or the barrier of a cluster: a generation completes with `count` threads."""

    def __init__(self, name: str, length: int, scheduler: Any, report: Report):
        super().__init__(name, scheduler)
        self.report = report
        self.count = self.arrived = self.generation = 0
        self.joined = Joined(length)

    def arrive(self, who: str, threads: int, count: int) -> int:
        """Threads arrive at a barrier of `count` threads; returns the generation they belong to."""
        generation = self.generation
        if self.arrived == 0:
            self.count = count
        numbers = {"threads": threads, "arrived": self.arrived, "count": count, "first": self.count}
        if count != self.count:
            text = f"{who} arrives with a count of {count}; the first of this generation had {self.count}"
            self.report.fatal("barrier-count", self.name, text, **numbers)
        self.arrived += threads
        if self.arrived > self.count:
            text = f"{who} arrives with {threads} threads; {self.arrived} are more than the count of {self.count}"
            self.report.fatal("barrier-count", self.name, text, **numbers)
        if self.arrived == self.count:
            self.generation += 1
            self.arrived = 0
            self.joined.complete()
            self.wake()
        return generation

    def state(self) -> str:
        """For a message about a deadlock."""
        return f"{self.arrived} of {self.count} threads are there"
