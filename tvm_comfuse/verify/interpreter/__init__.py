"""An interpreter for lowered kernels: numbers, and every rule that the kernel's protocol must keep.

result = interpret(kernel, [x, w, bias], seed=3, slow="wg0")
result.outputs["y"], result.findings
"""

from __future__ import annotations

from tvm_comfuse.verify.interpreter.run import Program, Result, interpret
from tvm_comfuse.verify.interpreter.tree import UnsupportedError

__all__ = ["Program", "Result", "UnsupportedError", "interpret"]
