"""Checks of rows in a child process with time limits."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any

from tvm_comfuse.bench.checks import RowCheck
from tvm_comfuse.bench.ours import PACKAGE_RECORDS, Records
from tvm_comfuse.bench.suites import Row
from tvm_comfuse.worker import Limits, Worker, first_launch

__all__ = ["IsolatedChecks", "Limits"]
CHILD = (sys.executable, "-m", "tvm_comfuse.bench.child")


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

    def check(self, row: Row, seeds: Sequence[int], target: str, records: Records = PACKAGE_RECORDS) -> RowCheck:
        """As `checks.check_row`, in the child.  Never raises for what the child does."""
        known = RowCheck()

        def built(message: dict[str, Any]) -> None:
            nonlocal known
            known = RowCheck(**message["check"])

        request = {"row": asdict(row), "seeds": list(seeds), "target": target, "records": asdict(records)}
        message, failure = first_launch(self._worker, self._limits, request, "run after its first launch", built)
        if message is None:
            known.failure = failure
        else:
            built(message)
        if not known.failure:
            return known
        # a faulting kernel leaves its process without a usable GPU, so never go on with the same one
        self._worker.end()
        return known
