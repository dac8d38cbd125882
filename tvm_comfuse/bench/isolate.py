"""Checks of rows in a child process with time limits."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tvm_comfuse.bench.checks import RowCheck
from tvm_comfuse.bench.suites import Row

CHILD = (sys.executable, "-m", "tvm_comfuse.bench.child")
#: how much of the child's standard error is kept in a failure
TAIL = 600


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
        self._command = tuple(command)
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115

    def __enter__(self) -> IsolatedChecks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        self._errors.close()

    def check(self, row: Row, seeds: Sequence[int], target: str) -> RowCheck:
        """As `checks.check_row`, in the child.  Never raises for what the child does."""
        known = RowCheck()
        doing, limit = "start", self._limits.start
        try:
            if self._process is None:
                self._start()
                self._answer(limit)
            doing, limit = "compile", self._limits.build
            self._request({"row": asdict(row), "seeds": list(seeds), "target": target})
            message = self._answer(limit)
            if message["event"] == "built":
                known = RowCheck(**message["check"])
                doing, limit = "run after its first launch", self._limits.launch
                message = self._answer(limit)
        except TimeoutError:
            known.failure = f"did not {doing} within {limit:g} s" + (": it hangs" if known.fused else "")
        except (ChildProcessError, OSError) as error:
            known.failure = f"the process that should {doing} ended: {error}"
        else:
            known = RowCheck(**message["check"])
            if not known.failure:
                return known
        # a faulting kernel leaves its process without a usable GPU, so never go on with the same one
        self._end()
        return known

    def _start(self) -> None:
        # run from a checkout, the package may be importable here only because of the working directory
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH")) if part)
        self._answers = queue.Queue()
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        threading.Thread(target=_read, args=(self._process, self._answers), daemon=True).start()

    def _request(self, message: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def _answer(self, limit: float) -> dict[str, Any]:
        """The next message; TimeoutError after `limit` seconds, ChildProcessError if the child has ended."""
        try:
            message = self._answers.get(timeout=limit)
        except queue.Empty:
            raise TimeoutError from None
        if message is None:
            assert self._process is not None
            raise ChildProcessError(f"status {_wait(self._process)}; {self._tail()}")
        return message

    def _tail(self) -> str:
        self._errors.flush()
        self._errors.seek(0)
        return self._errors.read()[-TAIL:].strip()

    def _end(self) -> None:
        if self._process is None:
            return
        process, self._process = self._process, None
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # it died with an unread request
            process.stdin.close()
        # an idle child ends by itself when its input ends
        _wait(process, 1.0)
        process.kill()
        _wait(process)


def _wait(process: subprocess.Popen[str], limit: float = 30.0) -> int | None:
    """The exit status, None if it does not come in time: a driver can hold a killed process for a while."""
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None


def _read(process: subprocess.Popen[str], answers: queue.Queue[dict[str, Any] | None]) -> None:
    """Put each line of the child into the queue, and None at its end."""
    assert process.stdout is not None
    for line in process.stdout:
        try:
            answers.put(json.loads(line))
        except ValueError:
            break  # not the child's protocol any more: treat it as ended
    answers.put(None)
