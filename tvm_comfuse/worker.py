"""A child process for work that may hang or die: one JSON object a line each way, every answer within a time limit."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

#: how much of the child's standard error is kept in a failure
TAIL = 600


class Worker:
    """The parent's side; a context manager.  The child starts with `start` and can be ended and started again."""

    def __init__(self, command: Sequence[str]):
        self._command = tuple(command)
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def running(self) -> bool:
        """Whether a child was started and not ended."""
        return self._process is not None

    def start(self) -> None:
        """Starts the child.  Raises OSError if the command cannot be run."""
        # run from a checkout, the package may be importable here only because of the working directory
        root = str(Path(__file__).resolve().parents[1])
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

    def request(self, message: dict[str, Any]) -> None:
        """Sends a message.  Raises OSError if the child has ended."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def answer(self, limit: float) -> dict[str, Any]:
        """The next message; TimeoutError after `limit` seconds, ChildProcessError if the child has ended or was ended."""
        try:
            message = self._answers.get(timeout=limit)
        except queue.Empty:
            raise TimeoutError from None
        if message is None:
            process = self._process
            # another thread may have ended it meanwhile
            status = f"status {_wait(process)}; {self._tail()}" if process is not None else "ended by its parent"
            raise ChildProcessError(status)
        return message

    def end(self) -> None:
        """Ends the child, if there is one: first by the end of its input, then by force."""
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

    def close(self) -> None:
        """Ends the child and lets go of what it wrote."""
        self.end()
        self._errors.close()

    def _tail(self) -> str:
        self._errors.flush()
        self._errors.seek(0)
        return self._errors.read()[-TAIL:].strip()


@dataclass(frozen=True)
class Limits:
    """Seconds: for the child to start, to compile a kernel, and from its first launch to the last result."""

    start: float = 180.0
    build: float = 300.0
    launch: float = 60.0


def first_launch(
    worker: Worker, limits: Limits, request: dict[str, Any], launching: str, built: Callable[[dict[str, Any]], None]
) -> tuple[dict[str, Any] | None, str]:
    """Has a child compile and launch a kernel, starting the child if none runs.

    launching  what the child does after its message {"event": "built"}, for the report
    built      called with that message
    Gives the child's last message, or None and what went wrong: a step over its limit, or the end of the child.
    """
    doing, limit, launched = "start", limits.start, False
    try:
        if not worker.running:
            worker.start()
            worker.answer(limit)
        doing, limit = "compile", limits.build
        worker.request(request)
        message = worker.answer(limit)
        if message["event"] == "built":
            built(message)
            doing, limit, launched = launching, limits.launch, True
            message = worker.answer(limit)
    except TimeoutError:
        return None, f"did not {doing} within {limit:g} s" + (": it hangs" if launched else "")
    except (ChildProcessError, OSError) as error:
        return None, f"the process that should {doing} ended: {error}"
    return message, ""


def serve() -> Iterator[tuple[dict[str, Any], Answers]]:
    """The child's side: the requests until standard input ends, each with where to send answers.

    Whatever libraries print goes to standard error.  The first answer is {"event": "ready"}.
    """
    # a terminal sends Ctrl-C to all processes: the parent says what becomes of this one
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # libraries write to descriptor 1 whenever they like: keep the real one for the answers
    answers = Answers(os.fdopen(os.dup(1), "w", encoding="utf-8"))
    os.dup2(2, 1)
    answers.send({"event": "ready"})
    for line in sys.stdin:
        yield json.loads(line), answers


class Answers:
    """Where a child sends its messages."""

    def __init__(self, stream: IO[str]):
        self._stream = stream

    def send(self, message: dict[str, Any]) -> None:
        """One message."""
        self._stream.write(json.dumps(message) + "\n")
        self._stream.flush()


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
