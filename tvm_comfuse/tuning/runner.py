"""Measures candidates one after the other, in a process that may hang or die."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

import tvm
from tvm.target import Target

from tvm_comfuse.tuning.child import ask, stop
from tvm_comfuse.tuning.session import Measured
from tvm_comfuse.tuning.task import Task
from tvm_comfuse.worker import Limits, Worker

CHILD = (sys.executable, "-m", "tvm_comfuse.tuning.measure")
#: a GPU kernel takes milliseconds: one that is not through by then hangs
DEFAULT_LIMITS = Limits(launch=30.0)
#: what leaves a process without a usable device
_FATAL = ("fault", "hang", "died")


class Runner:
    """A context manager with one measuring process, started again whenever a kernel spoils it.

    products     microseconds of the bare product by the key of its task, as far as known
    device_name  as the driver calls the device, "" until a task is prepared
    """

    def __init__(self, target: Target, limits: Limits | None = None, command: Sequence[str] = CHILD):
        self._target, self._limits = tvm.ir.save_json(target), limits or DEFAULT_LIMITS
        self._worker = Worker(command)
        self._described: set[str] = set()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="measure")
        self._futures: list[Future[Any]] = []
        self.products: dict[str, float] = {}
        self.device_name = ""

    def __enter__(self) -> Runner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stop(self._pool, self._futures, [self._worker])

    def prepare(self, task: Task) -> None:
        """Has the process make a task's inputs and exact results while its first candidates are built."""
        self._futures.append(self._pool.submit(self._describe, task))

    def submit(self, task: Task, library: str, reference: str = "") -> Future[Measured]:
        """Measures a library, see `Session.measure`; measurements happen in the order of the calls."""
        self._futures = [future for future in self._futures if not future.done()]
        future = self._pool.submit(self._measure, task, library, reference)
        self._futures.append(future)
        return future

    def _measure(self, task: Task, library: str, reference: str) -> Measured:
        # of all tasks so far the device may be full: a new process has room
        failure = self._describe(task) and self._describe(task)
        if failure:
            return Measured(reason="died", failure=failure)
        request = {"task": task.key, "library": library, "reference": reference}
        message, failure = self._ask(request, "end after its launch", self._limits.launch)
        if message is None:
            return Measured(reason="hang" if "hangs" in failure else "died", failure=failure)
        values = message["measured"]
        measured = Measured(**{**values, "us": tuple(values["us"])})
        if measured.reason in _FATAL:
            # a faulting kernel leaves its process without a usable GPU, so never go on with the same one
            self._restart()
        return measured

    def _restart(self) -> None:
        self._described.clear()
        self._worker.end()

    def _describe(self, task: Task) -> str:
        """Has the process know a task; what went wrong, or ""."""
        if task.key in self._described:
            return ""
        request: dict[str, Any] = {"task": task.key, "target": self._target, "rows": task.rows}
        request["func"] = tvm.ir.save_json(task.func)
        message, failure = self._ask(request, "prepare a task", self._limits.build)
        if message is None:
            return failure
        if "failure" in message:
            self._restart()
            return str(message["failure"])
        self._described.add(task.key)
        self.device_name = message["device"]
        if message["product_us"] is not None:
            self.products[task.key] = message["product_us"]
        return ""

    def _ask(self, request: dict[str, Any], doing: str, limit: float) -> tuple[dict[str, Any] | None, str]:
        message, failure = ask(self._worker, request, doing, limit, self._limits.start)
        if message is None:
            self._described.clear()
        return message, failure
