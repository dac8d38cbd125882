"""Scheduled cluster -> TIRx kernel, as a function and as a pass."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import tirx

from tvm_comfuse.schedules.apply import plan_of
from tvm_comfuse.schedules.spec import analyze
from tvm_comfuse.tir_passes.kernel import Kernel

KIND = "comfuse.kind"
#: attributes of the scheduled function that its kernel keeps
KEPT = ("target", "global_symbol", "tirx.noalias", KIND)


def is_cluster(func: Any) -> bool:
    """Whether a function is a cluster, scheduled for a kernel, that has not been lowered yet."""
    if not isinstance(func, tirx.PrimFunc) or func.attrs is None:
        return False
    return KIND in func.attrs and bool(func.attrs.get("s_tir"))


def lower(func: tirx.PrimFunc, name: str | None = None) -> tirx.PrimFunc:
    """The TIRx kernel of a scheduled cluster.

    name  of the kernel; default: the function's global symbol.  Kernels of one module need different names, because each
          may have static memory of that name.
    Raises LoweringError if the function is not canonical, PlanError if it carries no plan.
    """
    symbol = name or str((func.attrs or {}).get("global_symbol", "main"))
    kernel = Kernel(func, analyze(func), plan_of(func), symbol).emit()
    kept = {key: func.attrs[key] for key in KEPT if func.attrs is not None and key in func.attrs}
    return kernel.with_attrs({**kept, "global_symbol": symbol})


@tvm.transform.module_pass(opt_level=0, name="comfuse.LowerClusters")
class LowerClusters:
    """Replaces every scheduled cluster of a module by its kernel."""

    def transform_module(self, mod: tvm.IRModule, _context: Any) -> tvm.IRModule:
        """A new module; functions that are not clusters are kept as they are."""
        functions = {
            gvar: lower(func, gvar.name_hint) if is_cluster(func) else func for gvar, func in mod.functions_items()
        }
        return tvm.IRModule(functions, attrs=mod.attrs)
