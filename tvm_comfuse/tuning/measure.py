"""The process that launches candidates:  python -m tvm_comfuse.tuning.measure

{"task": a key, "func", "target", "rows"} describes a task; the answer is {"product_us", "device"}, the time of the bare
product and the name of the device, or {"failure"}.  After it {"task", "library", "reference", "check"} is answered by
{"measured": {...}}.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

from tvm_comfuse.worker import serve


def main() -> int:
    """Serve until standard input ends; the exit status."""
    measurers: dict[str, Any] = {}
    for request, answers in serve():
        answers.send(answer(request, measurers))
    return 0


def answer(request: dict[str, Any], measurers: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request; measurers of tasks by key are kept in `measurers`."""
    key = request["task"]
    if "func" not in request:
        measured = measurers[key].measure(request["library"], request["reference"], request["check"])
        return {"measured": asdict(measured)}
    import tvm

    from tvm_comfuse.tuning.measurer import Measurer

    try:
        func, target = (tvm.ir.load_json(request[name]) for name in ("func", "target"))
        measurers[key] = Measurer(func, request["rows"], target)
        return {"product_us": measurers[key].product_us(), "device": measurers[key].device_name}
    except Exception as error:  # out of memory, no such device: the parent says so
        return {"failure": f"{type(error).__name__}: {str(error).strip()[-600:]}"}


if __name__ == "__main__":
    sys.exit(main())
