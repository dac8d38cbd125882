"""The process that launches candidates:  python -m tvm_comfuse.tuning.measure

{"task": a key, "func", "target", "rows", "chain": its split form or None} describes a task; the answer is {"product_us",
"device"}, the time of the bare product and the name of the device, or {"failure"}.  After it {"task", "library", "reference",
"check", "chained": whether the library has the kernels of the chain, and not a "main"} is answered by {"measured": {...}}.
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
        what = (request[name] for name in ("library", "reference", "check", "chained"))
        return {"measured": asdict(measurers[key].measure(*what))}
    import tvm

    from tvm_comfuse.tuning.chain import Chain
    from tvm_comfuse.tuning.measurer import Measurer

    try:
        func, target = (tvm.ir.load_json(request[name]) for name in ("func", "target"))
        chain = None if request["chain"] is None else Chain.from_dict(request["chain"])
        measurers[key] = Measurer(func, request["rows"], target, chain=chain)
        return {"product_us": measurers[key].product_us(), "device": measurers[key].device_name}
    except Exception as error:  # out of memory, no such device: the parent says so
        return {"failure": f"{type(error).__name__}: {str(error).strip()[-600:]}"}


if __name__ == "__main__":
    sys.exit(main())
