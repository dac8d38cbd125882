"""Runs actors and asynchronous copies in a seeded random order."""

from __future__ import annotations

import random
import traceback
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm_comfuse.verify.interpreter.barriers import Waitable
from tvm_comfuse.verify.interpreter.report import HaltError, Report

#: how the file names of generated code begin
GENERATED = "<warp group"


@dataclass(eq=False)
class Event:
    """An asynchronous copy on its way; label e.g. ``cta0.load``."""

    label: str
    run: Callable[[], None]


class Scheduler:
    """Picks who goes on.  slow: actors and copies whose label has it as one of its dotted parts go on only when nobody else
    can: ``cta1``, ``wg2``, ``w0``, ``load``, ``store``; several parts (``cta1.wg2``) must all be there."""

    def __init__(self, seed: int, slow: str | None, report: Report, max_steps: int):
        self.random = random.Random(seed)
        self.slow_parts = frozenset(slow.split(".")) if slow else frozenset()
        self.report, self.max_steps = report, max_steps
        self.actors: list[Any] = []
        self.runnable: list[Any] = []
        #: actors of clusters that find no free SM yet, cluster by cluster
        self.queued: list[list[Any]] = []
        self.events: list[Event] = []
        #: launches that wait for the mailboxes in global memory
        self.turn = Waitable("the mailboxes", self)
        self.steps = 0
        self.digest = 0

    def start(self, clusters: list[list[Any]], resident: int) -> None:
        """Makes the actors of each cluster known; the first `resident` clusters begin."""
        self.actors = [actor for cluster in clusters for actor in cluster]
        self.runnable = [actor for cluster in clusters[:resident] for actor in cluster]
        self.queued = clusters[resident:]

    def admit(self) -> None:
        """A cluster has left; the next one begins."""
        if self.queued:
            self.runnable.extend(self.queued.pop(0))

    def wake(self, waitable: Any) -> None:
        """Everybody who waits for it looks again."""
        self.runnable.extend(waitable.waiters)
        waitable.waiters.clear()

    def run(self) -> bool:
        """Until everybody is done (True), nobody can go on, or a finding ends the run."""
        try:
            while self.runnable or self.events:
                if self.steps >= self.max_steps:
                    self.report.fatal("step-limit", "scheduler", f"not done after {self.steps} steps", steps=self.steps)
                self.steps += 1
                self._step(self._pick())
            if all(actor.done for actor in self.actors):
                return True
            self._deadlock()
        except HaltError:
            pass
        return False

    def _pick(self) -> Any:
        runnable, events = self.runnable, self.events
        if self.slow_parts:
            quick: list[Any] = [x for x in runnable if not self._is_slow(x.label)]
            quick += [x for x in events if not self._is_slow(x.label)]
            if quick:
                return self.random.choice(quick)
        number = self.random.randrange(len(runnable) + len(events))
        return runnable[number] if number < len(runnable) else events[number - len(runnable)]

    def _is_slow(self, label: str) -> bool:
        return self.slow_parts.issubset(label.split("."))

    def _step(self, chosen: Any) -> None:
        self.digest = zlib.crc32(chosen.label.encode(), self.digest)
        if isinstance(chosen, Event):
            self.events.remove(chosen)
            chosen.run()
            return
        try:
            waitable = next(chosen.code)
        except StopIteration:
            self.runnable.remove(chosen)
            chosen.finish()
            return
        except IndexError as error:
            self._bad_index(chosen, error)
            return
        if waitable is not None:
            self.runnable.remove(chosen)
            waitable.waiters.append(chosen)

    def _bad_index(self, actor: Any, error: IndexError) -> None:
        """Generated code itself indexes nothing but registers."""
        frames = traceback.extract_tb(error.__traceback__)
        if not frames[-1].filename.startswith(GENERATED):
            raise error
        self.report.fatal(
            "register-bounds", actor.label, f"an index of registers out of bounds: {frames[-1].line or error}"
        )

    def _deadlock(self) -> None:
        waiting = {id(actor) for cluster in self.queued for actor in cluster}
        stuck = [actor for actor in self.actors if not actor.done and id(actor) not in waiting]
        lines = [f"{actor.label} waits {actor.waiting()}" for actor in stuck]
        shown = "; ".join(lines[:12]) + (f"; and {len(lines) - 12} more" if len(lines) > 12 else "")
        if self.queued:
            shown = f"{len(self.queued)} clusters find no free SM; {shown}"
        names = [actor.label for actor in stuck]
        self.report.add("deadlock", names[0], f"nobody can go on: {shown}", stuck=names)
