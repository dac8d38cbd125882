"""A process that checks rows for another one:  python -m tvm_comfuse.bench.child

A kernel that hangs or faults takes its process along, so the first launch of each kernel happens here.  One JSON object
a line on standard input, {"row": {...}, "seeds": [...], "target": "h200", "records": {...}}, and lines
{"event", "check": {...}} back: "ready" once, then for each request "built" before the first launch and "done" at its end.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

from tvm_comfuse.worker import Answers, serve


def main() -> int:
    """Serve until standard input ends; the exit status."""
    for request, answers in serve():
        _check(request, answers)
    return 0


def _check(request: dict[str, Any], answers: Answers) -> None:
    from tvm_comfuse.bench.checks import RowCheck, check_row
    from tvm_comfuse.bench.ours import Records
    from tvm_comfuse.bench.suites import Row

    def built(check: RowCheck) -> None:
        answers.send({"event": "built", "check": asdict(check)})

    records = Records(**request["records"])
    check = check_row(Row(**request["row"]), request["seeds"], request["target"], records, built)
    answers.send({"event": "done", "check": asdict(check)})


if __name__ == "__main__":
    sys.exit(main())
