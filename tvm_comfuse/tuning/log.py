"""The log of a search: one JSON object a line, so that what was not kept as a record is known too."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from tvm_comfuse.errors import PlanError
from tvm_comfuse.schedules.plan import Plan

NAME = "tuning.jsonl"
#: reasons that say more of the machine than of the plan
PASSING = ("died", "load")


class Log:
    """Appends events to a file; without a folder it keeps nothing."""

    def __init__(self, folder: Path | None):
        self._path = folder / NAME if folder is not None else None

    def write(self, event: str, **values: Any) -> None:
        """One line, on disk when this returns."""
        if self._path is None:
            return
        line = json.dumps({"time": round(time.time(), 3), "event": event, **values})
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def events(self) -> Iterator[dict[str, Any]]:
        """What is in the file; a line that is cut off is left out."""
        if self._path is None or not self._path.is_file():
            return
        for line in self._path.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                continue

    def failed_plans(self, task: str, target: str) -> list[Plan]:
        """Plans of a task (by its key) that failed in an earlier search: they are not tried again."""
        found = []
        for event in self.events():
            if event.get("event") != "failed" or event.get("reason") in PASSING:
                continue
            if (event.get("task"), event.get("target")) == (task, target):
                with suppress(PlanError):  # of a version with other fields
                    found.append(Plan.from_dict(event["plan"]))
        return found
