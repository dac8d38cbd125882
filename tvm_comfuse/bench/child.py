"""A process that checks rows for another one:  python -m tvm_comfuse.bench.child

A kernel that hangs or faults takes its process along, so the first launch of each kernel happens here.  One JSON object
a line on standard input, {"row": {...}, "seeds": [...], "target": "h200"}, and lines {"event", "check": {...}} back:
"ready" once, then for each request "built" before the first launch and "done" at its end.  Whatever compilers print
goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import IO, Any


def main() -> int:
    """Serve until standard input ends; the exit status."""
    # libraries write to descriptor 1 whenever they like: keep the real one for the answers
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    from tvm_comfuse.bench.checks import RowCheck, check_row
    from tvm_comfuse.bench.suites import Row

    _send(answers, {"event": "ready"})
    for line in sys.stdin:
        request = json.loads(line)

        def built(check: RowCheck) -> None:
            _send(answers, {"event": "built", "check": asdict(check)})

        check = check_row(Row(**request["row"]), request["seeds"], request["target"], built)
        _send(answers, {"event": "done", "check": asdict(check)})
    return 0


def _send(answers: IO[str], message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    sys.exit(main())
