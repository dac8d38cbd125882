"""The log of a search: one JSON object a line, so that what was not kept as a record is known too."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from tvm_comfuse.errors import OutputError, PlanError
from tvm_comfuse.schedules.plan import Plan
from tvm_comfuse.tuning.database.files import TornLineWarning

NAME = "tuning.jsonl"
#: reasons that say more of the machine than of the plan
PASSING = ("died", "load")


class Log:
    """Appends events to a file; without a folder it keeps nothing.

    Every method raises OutputError for a file that cannot be read or written.
    """

    def __init__(self, folder: Path | None):
        self._path = folder / NAME if folder is not None else None
        self._warned = False

    def write(self, event: str, **values: Any) -> None:
        """One line, on disk when this returns."""
        self._append(json.dumps({"time": round(time.time(), 3), "event": event, **values}) + "\n")

    def create(self) -> None:
        """Makes an empty file if there is none, so that one that cannot be written is noticed before the search."""
        self._append("")

    def events(self) -> Iterator[dict[str, Any]]:
        """What is in the file; damaged lines are left out with one TornLineWarning."""
        if self._path is None or not self._path.exists():
            return
        try:
            text = self._path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise _unusable(self._path, error) from error
        found = [_event(line) for line in text.split("\n") if line.strip()]
        self._warn(found.count(None))
        yield from (event for event in found if event is not None)

    def failed_plans(self, task: str, target: str) -> list[Plan]:
        """Plans of a task (by its key) that failed in an earlier search: they are not tried again."""
        found = []
        for event in self.events():
            if event.get("event") != "failed" or event.get("reason") in PASSING:
                continue
            plan = event.get("plan")
            if (event.get("task"), event.get("target")) == (task, target) and isinstance(plan, dict):
                with suppress(PlanError):  # of a version with other fields
                    found.append(Plan.from_dict(plan))
        return found

    def _append(self, text: str) -> None:
        if self._path is None:
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise _unusable(self._path, error) from error

    def _warn(self, damaged: int) -> None:
        """Once, however often the file is read."""
        if damaged and not self._warned:
            self._warned = True
            which, verb = (f"{damaged} lines", "are") if damaged > 1 else ("1 line", "is")
            text = f"{which} of {self._path} cannot be read and {verb} left out: what failed there may be tried again"
            text += "; delete the file to hear no more of it"
            warnings.warn(text, TornLineWarning, stacklevel=4)


def _event(line: str) -> dict[str, Any] | None:
    """The event of a line; None for one that is cut off or damaged."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None


def _unusable(path: Path, error: OSError) -> OutputError:
    return OutputError(f"a log to read and write at {path}", str(error), "check its permissions, or another folder")
