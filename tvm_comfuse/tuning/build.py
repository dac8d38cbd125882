"""Builds one candidate; also the process that does so for another one:  python -m tvm_comfuse.tuning.build

Requests {"what", "target": TVM's JSON, "library": a path}, answers {"built": {...}}.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tvm_comfuse.worker import serve

#: how much of a compiler's message is kept
_TAIL = 600


@dataclass(frozen=True)
class Built:
    """A build.

    library    the shared library, with the module's functions
    reason     in a word why there is none: verify, lower, compile, hang or died; "" if there is one
    failure    the same in words
    registers  of a thread, spills in bytes, for a GPU; None if no CUDA compiler was asked
    seconds    the build took
    """

    library: str = ""
    reason: str = ""
    failure: str = ""
    registers: int | None = None
    spills: int | None = None
    seconds: float = 0.0


def build(what: Any, target: Any, library: str | Path) -> Built:
    """Lowers, checks (verify.static) and compiles to a library.  Never raises for what compilers do.

    what  a function, which becomes "main", or a module of functions: scheduled for a GPU, canonical for a CPU
    """
    import tvm

    from tvm_comfuse.bench.ours import compile_module, named_main
    from tvm_comfuse.cpu_schedule import cpu_schedule
    from tvm_comfuse.target import is_cuda

    start = time.monotonic()
    try:
        module = what if isinstance(what, tvm.IRModule) else named_main(what)
        if not is_cuda(target):
            module = tvm.IRModule({name: cpu_schedule(func) for name, func in module.functions_items()})
        executable = compile_module(module, target)
        registers, spills = _compiler_report(executable, target) if is_cuda(target) else (None, None)
        executable.export_library(str(library))
    except Exception as error:  # whatever it is, it is this candidate's result and not the end of the search
        text = str(error).strip()[-_TAIL:]
        return Built(reason=_reason(error), failure=text, seconds=time.monotonic() - start)
    return Built(str(library), registers=registers, spills=spills, seconds=time.monotonic() - start)


def _compiler_report(executable: Any, target: Any) -> tuple[int, int]:
    """Registers and spilled bytes; the binary is in the cache afterwards, where the library is loaded."""
    from tvm_comfuse.cuda import compile_cubin, sources
    from tvm_comfuse.target import HOPPER_ARCH

    reports = [compile_cubin(text, str(target.attrs.get("arch", HOPPER_ARCH))) for text in sources(executable)]
    return max(report.registers for report in reports), sum(report.spill_stores for report in reports)


def _reason(error: Exception) -> str:
    from tvm_comfuse.errors import LoweringError, PlanError, VerifyError

    if isinstance(error, VerifyError):
        return "verify"
    return "lower" if isinstance(error, (LoweringError, PlanError)) else "compile"


def main() -> int:
    """Serve until standard input ends; the exit status."""
    import tvm

    for request, answers in serve():
        what, target = (tvm.ir.load_json(request[key]) for key in ("what", "target"))
        answers.send({"built": asdict(build(what, target, request["library"]))})
    return 0


if __name__ == "__main__":
    sys.exit(main())
