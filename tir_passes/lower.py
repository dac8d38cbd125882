"""Scheduled cluster -> TIRx kernel, as a function and as a pass."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import tirx
from tvm.target import Target

from tvm_comfuse.schedules.analysis import analyze
from tvm_comfuse.schedules.apply import has_plan, plan_of
from tvm_comfuse.schedules.device import device_of
from tvm_comfuse.schedules.rows import analyze_rows, has_rows_plan, is_rows, rows_plan_of
from tvm_comfuse.tir_passes.kernel import Kernel
from tvm_comfuse.tir_passes.rows import RowsKernel

KIND = "comfuse.kind"
#: attributes of the scheduled function that its kernel keeps
KEPT = ("target", "global_symbol", "tirx.noalias", KIND)


def is_cluster(func: Any) -> bool:
    """Whether a function is a cluster, or the rows of a split one, that has a plan for a kernel and has not been lowered yet.

    A cluster scheduled for a CPU has no plan and stays what it is.
    """
    if not isinstance(func, tirx.PrimFunc) or func.attrs is None:
        return False
    target = func.attrs.get("target")
    on_gpu = target is None or target.kind.name == "cuda"
    return KIND in func.attrs and bool(func.attrs.get("s_tir")) and on_gpu and (has_plan(func) or has_rows_plan(func))


def lower(func: tirx.PrimFunc, name: str | None = None) -> tirx.PrimFunc:
    """The TIRx kernel of a scheduled cluster or rows function.

    name  of the kernel; default: the function's global symbol.  Kernels of one module need different names, because each
          may have static memory of that name.
    Raises LoweringError if the function is not canonical, PlanError if it carries no plan.
    """
    symbol = name or str((func.attrs or {}).get("global_symbol", "main"))
    if is_rows(func):
        kernel = RowsKernel(func, analyze_rows(func), rows_plan_of(func), symbol).emit()
    else:
        kernel = Kernel(func, analyze(func), plan_of(func), symbol).emit()
    return with_kept_attributes(kernel, func, symbol)


def with_kept_attributes(kernel: tirx.PrimFunc, func: tirx.PrimFunc, symbol: str) -> tirx.PrimFunc:
    """A kernel with its name and what it keeps of the attributes of the function it was made of."""
    kept = {key: func.attrs[key] for key in KEPT if func.attrs is not None and key in func.attrs}
    return kernel.with_attrs({**kept, "global_symbol": symbol})


def verify_or_raise(kernel: tirx.PrimFunc) -> None:
    """Runs the static checks on a kernel, for the device of its target or, if it has none, of the current one.

    Without a target there is no device to check against, and nothing is checked.  Raises VerifyError.
    """
    from tvm_comfuse.verify.static import verify_or_raise as run  # the checks know kernels only, not this package

    target = kernel.attrs.get("target") or Target.current(allow_none=True)
    device = device_of(target) if target is not None else None
    if device is not None:
        run(kernel, device)


def LowerClusters() -> Any:  # noqa: N802  passes are named like this in TVM
    """Module pass: every scheduled cluster becomes its kernel, which must keep the rules of verify.static (VerifyError);
    other functions stay as they are."""

    @tvm.transform.module_pass(opt_level=0, name="comfuse.LowerClusters")
    def lower_clusters(mod: tvm.IRModule, _context: Any) -> tvm.IRModule:
        functions = {}
        for gvar, func in mod.functions_items():
            if is_cluster(func):
                func = lower(func, gvar.name_hint)
                verify_or_raise(func)
            functions[gvar] = func
        return tvm.IRModule(functions, attrs=mod.attrs)

    return lower_clusters
