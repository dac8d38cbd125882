"""Builds candidates in parallel, each in one of several processes that live as long as the search."""

from __future__ import annotations

import itertools
import os
import queue
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import tvm
from tvm.target import Target

from tvm_comfuse.tuning.build import Built
from tvm_comfuse.tuning.child import ask, stop
from tvm_comfuse.worker import Limits, Worker

CHILD = (sys.executable, "-m", "tvm_comfuse.tuning.build")
#: one core is left to the process that measures: it launches kernels and must not wait.  More than two batches are never
#: on their way for one task
MOST_BUILDERS = min(16, max(1, (os.cpu_count() or 2) - 1))


class Builder:
    """A context manager; the libraries lie in a folder that is removed at the end.  Threads may share it.

    parallel  processes; MOST_BUILDERS if left out
    """

    def __init__(
        self,
        target: Target,
        parallel: int | None = None,
        limits: Limits | None = None,
        command: Sequence[str] = CHILD,
    ):
        self.parallel = max(1, parallel or MOST_BUILDERS)
        self._target, self._limits = tvm.ir.save_json(target), limits or Limits()
        self._folder = tempfile.TemporaryDirectory(prefix="comfuse-tune-")
        self._numbers = itertools.count()
        self._workers = [Worker(command) for _ in range(self.parallel)]
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._pool = ThreadPoolExecutor(self.parallel, thread_name_prefix="build")
        self._futures: list[Future[Built]] = []
        self._lock = threading.Lock()

    def __enter__(self) -> Builder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stop(self._pool, self._futures, self._workers)
        self._folder.cleanup()

    def submit(self, what: Any) -> Future[Built]:
        """Starts to build a function or a module, see `build.build`; builds start in the order of the calls."""
        library = Path(self._folder.name) / f"candidate{next(self._numbers)}.so"
        request = {"what": tvm.ir.save_json(what), "target": self._target, "library": str(library)}
        future = self._pool.submit(self._build, request)
        with self._lock:
            self._futures = [*(other for other in self._futures if not other.done()), future]
        return future

    def discard(self, library: str) -> None:
        """Removes a library that is needed no more."""
        Path(library).unlink(missing_ok=True)

    def _build(self, request: dict[str, Any]) -> Built:
        worker = self._idle.get()
        try:
            message, failure = ask(worker, request, "compile", self._limits.build, self._limits.start)
        finally:
            self._idle.put(worker)
        if message is None:
            return Built(reason="hang" if "hangs" in failure else "died", failure=failure)
        return Built(**message["built"])
