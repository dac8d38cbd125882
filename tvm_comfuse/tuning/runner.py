"""Measures candidates in processes that may hang or die: one on this machine, or one for each server of a tracker."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

import tvm
from tvm.target import Target

from tvm_comfuse.tuning.child import ask, stop
from tvm_comfuse.tuning.measurer import Measured
from tvm_comfuse.tuning.task import Task
from tvm_comfuse.worker import Limits, Worker

CHILD = (sys.executable, "-m", "tvm_comfuse.tuning.measure")
#: a GPU kernel takes milliseconds: one that is not through by then hangs
DEFAULT_LIMITS = Limits(launch=30.0)
#: what leaves a process without a usable device
_FATAL = ("fault", "hang", "died")
#: seconds that a remote answer may take longer than the work, for the way
_ON_THE_WAY = 60.0
#: seconds in which a tracker should have a free server, and how often it is asked while other servers may be used instead
_CONNECT_S, _ATTEMPTS = 30.0, 3


class Device:
    """One measuring process and what it knows; used by one thread at a time."""

    def __init__(self, target: Target, limits: Limits, command: Sequence[str], remote: bool):
        self._target, self._limits, self._remote = tvm.ir.save_json(target), limits, remote
        self.worker = Worker(command)
        self._described: set[str] = set()
        self.products: dict[str, float] = {}
        self.name, self.server = "", ""

    def describe(self, task: Task) -> str:
        """Has the process know a task; what went wrong, or ""."""
        if task.key in self._described:
            return ""
        request: dict[str, Any] = {"task": task.key, "target": self._target, "rows": task.rows}
        request["func"] = tvm.ir.save_json(task.func)
        request["chain"] = None if task.unfused is None else task.unfused.chain.to_dict()
        message, failure = self._ask(request, "prepare a task", self._limits.build)
        if message is None:
            return failure
        if "failure" in message:
            self._restart()
            return str(message["failure"])
        self._described.add(task.key)
        self.name = message["device"]
        if message["product_us"] is not None:
            self.products[task.key] = message["product_us"]
        return ""

    def connect(self) -> str:
        """Has a server for what follows; what went wrong, or "".  On this machine there is nothing to do."""
        if not self._remote or (self.server and self.worker.running):
            return ""
        message, failure = ask(self.worker, {"connect": True}, "find a free server", _CONNECT_S, self._limits.start)
        self.server = str(message["server"]) if message is not None else ""
        return failure

    def measure(self, task: Task, library: str, reference: str, check: bool, chained: bool) -> Measured:
        """Measures a library, see `Measurer.measure`."""
        # of all tasks so far the device may be full: a new process has room
        failure = self.describe(task) and self.describe(task)
        if failure:
            return Measured(reason="died", failure=failure)
        request = {
            "task": task.key,
            "library": library,
            "reference": reference,
            "check": check,
            "chained": chained,
        }
        message, failure = self._ask(request, "end after its launch", self._limits.launch)
        if message is None:
            return Measured(reason="hang" if "hangs" in failure else "died", failure=failure)
        values = message["measured"]
        measured = Measured(**{**values, "us": tuple(values["us"]), "server": self.server})
        if measured.reason in _FATAL:
            # a faulting kernel leaves its process without a usable GPU, so never go on with the same one
            self._restart()
        return measured

    def _restart(self) -> None:
        self._described.clear()
        if self._remote:
            self._ask({"end": True}, "end", self._limits.start)
        else:
            self.worker.end()

    def _ask(self, request: dict[str, Any], doing: str, limit: float) -> tuple[dict[str, Any] | None, str]:
        start = self._limits.start
        if self._remote:
            if failure := self.connect():
                self._described.clear()
                return None, failure
            request = {**request, "doing": doing, "limit": limit, "start": start}
            limit += start + _ON_THE_WAY
        message, failure = ask(self.worker, request, doing, limit, start)
        failure = failure or str((message or {}).get("failed", ""))
        if failure:
            self._described.clear()
        return None if failure else message, failure


class Runner:
    """A context manager with measuring processes, each started again whenever a kernel spoils it.  Threads may share it.

    commands  one a process, this machine's alone if left out
    remote    whether they stand in for processes elsewhere
    """

    def __init__(
        self,
        target: Target,
        limits: Limits | None = None,
        commands: Sequence[Sequence[str]] = (CHILD,),
        remote: bool = False,
    ):
        self._devices = [Device(target, limits or DEFAULT_LIMITS, command, remote) for command in commands]
        self._free: queue.SimpleQueue[Device] = queue.SimpleQueue()
        for device in self._devices:
            self._free.put(device)
        self._pool = ThreadPoolExecutor(len(self._devices), thread_name_prefix="measure")
        self._futures: list[Future[Any]] = []
        self._lock = threading.Lock()

    def __enter__(self) -> Runner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stop(self._pool, self._futures, [device.worker for device in self._devices])

    @property
    def products(self) -> dict[str, float]:
        """Microseconds of the bare product by the key of its task, as far as known."""
        return {key: us for device in self._devices for key, us in device.products.items()}

    @property
    def device_name(self) -> str:
        """As the driver calls the device, "" until a task is prepared."""
        return next((device.name for device in self._devices if device.name), "")

    def prepare(self, task: Task) -> None:
        """Has the processes make a task's inputs and exact results while its first candidates are built."""
        for _ in self._devices:
            self._submit(lambda device: device.describe(task))

    def submit(
        self, task: Task, library: str, reference: str = "", check: bool = True, chained: bool = False
    ) -> Future[Measured]:
        """Measures a library, see `Measurer.measure`; measurements begin in the order of the calls."""
        return self._submit(lambda device: device.measure(task, library, reference, check, chained))

    def _submit(self, work: Any) -> Future[Any]:
        future = self._pool.submit(self._with_device, work)
        with self._lock:
            self._futures = [*(other for other in self._futures if not other.done()), future]
        return future

    def _with_device(self, work: Any) -> Any:
        for attempt in range(_ATTEMPTS):
            device = self._free.get()
            try:
                # where a server is gone for good, the work goes to another one
                if not device.connect() or attempt == _ATTEMPTS - 1:
                    return work(device)
            finally:
                self._free.put(device)
        raise AssertionError("the last attempt returns")
