"""Checks of rows in a child process with time limits."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from types import TracebackType

from tvm_comfuse.bench.checks import RowCheck
from tvm_comfuse.bench.suites import Row
from tvm_comfuse.worker import Worker

CHILD = (sys.executable, "-m", "tvm_comfuse.bench.child")


@dataclass(frozen=True)
class Limits:
    """Seconds: for the child to start, for a row to compile, and from its first launch to the last result."""

    start: float = 180.0
    build: float = 300.0
    launch: float = 60.0


class IsolatedChecks:
    """A child process that checks rows one after the other; a context manager.

    A child that hangs or dies is ended and the row gets a failure that says so; the next row starts a new one.
    """

    def __init__(self, limits: Limits | None = None, command: Sequence[str] = CHILD):
        self._limits = limits or Limits()
        self._worker = Worker(command)

    def __enter__(self) -> IsolatedChecks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._worker.close()

    def check(self, row: Row, seeds: Sequence[int], target: str) -> RowCheck:
        """As `checks.check_row`, in the child.  Never raises for what the child does."""
        known, worker = RowCheck(), self._worker
        doing, limit = "start", self._limits.start
        try:
            if not worker.running:
                worker.start()
                worker.answer(limit)
            doing, limit = "compile", self._limits.build
            worker.request({"row": asdict(row), "seeds": list(seeds), "target": target})
            message = worker.answer(limit)
            if message["event"] == "built":
                known = RowCheck(**message["check"])
                doing, limit = "run after its first launch", self._limits.launch
                message = worker.answer(limit)
        except TimeoutError:
            known.failure = f"did not {doing} within {limit:g} s" + (": it hangs" if known.fused else "")
        except (ChildProcessError, OSError) as error:
            known.failure = f"the process that should {doing} ended: {error}"
        else:
            known = RowCheck(**message["check"])
            if not known.failure:
                return known
        # a faulting kernel leaves its process without a usable GPU, so never go on with the same one
        worker.end()
        return known
