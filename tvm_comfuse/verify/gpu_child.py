"""A process that launches kernels for another one:  python -m tvm_comfuse.verify.gpu_child

Requests {"func": JSON of a scheduled function, "rows", "seed", "target"}; answers "built" with the CUDA source before the
launch, and "done" with {"failure", "errors"} after it.
"""

from __future__ import annotations

import sys
from typing import Any

from tvm_comfuse.worker import Answers, serve


def main() -> int:
    """Serve until standard input ends; the exit status."""
    for request, answers in serve():
        try:
            _run(request, answers)
        except Exception as error:  # the parent reports it whatever it is, and ends this process
            answers.send({"event": "done", "failure": f"{type(error).__name__}: {error}"})
    return 0


def _run(request: dict[str, Any], answers: Answers) -> None:
    import tvm

    from tvm_comfuse.bench.ours import compile_executable
    from tvm_comfuse.cuda import sources
    from tvm_comfuse.cuda.callback import own_cuda_compiler
    from tvm_comfuse.target import HOPPER_ARCH, is_cuda, parse_target
    from tvm_comfuse.verify.launch import launch

    func, target = tvm.ir.load_json(request["func"]), parse_target(request["target"])
    executable = compile_executable(func, target)
    source = "\n".join(sources(executable)) if is_cuda(target) else ""
    answers.send({"event": "built", "source": source})
    # the device code may be compiled at the first look at it
    with target, own_cuda_compiler(str(target.attrs.get("arch", HOPPER_ARCH))):
        kernel = executable["main"]
    result = launch(func, kernel, request["rows"], request["seed"], target)
    answers.send({"event": "done", "failure": result.failure, "errors": result.errors})


if __name__ == "__main__":
    sys.exit(main())
