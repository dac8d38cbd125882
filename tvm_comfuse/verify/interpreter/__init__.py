"""An interpreter for lowered kernels: numbers, and every rule that the kernel's protocol must keep.

`interpret(kernel, [x, w, bias], seed=3, slow="wg1")` runs the whole grid once and gives outputs and findings.  A kernel is
the TIRx function that `tir_passes.lower` makes.  Each warp, or warp group that runs wgmma, becomes a Python generator over
NumPy arrays of its lanes; a seeded scheduler picks who goes on, and when asynchronous copies happen.  What must be ordered
is checked with vector clocks (clocks.py), so a missing wait shows in every order, not only in the unlucky one.

Not modelled: the scopes of fences and of acquire and release, caches, the order of global memory beyond who writes an
element, bank conflicts, lanes of a warp that run apart (they go in step), the accuracy of approximate instructions.
"""

from __future__ import annotations

from tvm_comfuse.verify.interpreter.run import Program, Result, interpret, run_together
from tvm_comfuse.verify.interpreter.tree import UnsupportedError

__all__ = ["Program", "Result", "UnsupportedError", "interpret", "run_together"]
