"""A workload, the function that a record is of, and its trace, in MetaSchedule's terms."""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.schedule import Trace
from tvm.tirx import PrimFunc

from tvm_comfuse.schedules.apply import apply_plan, has_plan
from tvm_comfuse.schedules.plan import Plan
from tvm_comfuse.tuning.database.files import DatabaseError
from tvm_comfuse.tuning.database.record import workload_of


def workload_module(func: PrimFunc) -> tvm.IRModule:
    """The module under which MetaSchedule knows a function of a Relax module.  Raises DatabaseError if it is scheduled."""
    if has_plan(func):
        raise DatabaseError("a function before scheduling", "one with a plan", "use FuseClusters() without a schedule")
    return tvm.get_global_func("tvm.s_tir.meta_schedule.normalize_mod")(func.with_attr("global_symbol", "main"))


def trace_of(module: tvm.IRModule, schedule: Plan | Trace) -> Trace:
    """The trace that schedules the workload; a given one is replayed once, to be sure that it can be."""
    sch = s_tir.Schedule(module, debug_mask="all")
    if isinstance(schedule, Plan):
        apply_plan(sch, schedule)
        return sch.trace
    try:
        schedule.apply_to_schedule(sch, remove_postproc=False)
    except (RuntimeError, ValueError, TypeError) as error:
        raise DatabaseError("a trace of a schedule of the function", str(error), "trace the unscheduled one") from error
    return schedule


def arguments(func: PrimFunc, rows: int) -> list[Any]:
    """MetaSchedule's description of the parameters, a symbolic M taken as `rows`."""
    described = []
    for param in func.params:
        shape = [int(extent) if isinstance(extent, tvm.tirx.IntImm) else rows for extent in param.shape]
        described.append(ms.arg_info.TensorInfo(param.dtype, shape))
    return described


def same_workload(left: str, right: str) -> bool:
    """Whether two workload lines hold equal modules, whatever their variables are called."""
    return left == right or is_workload(left, workload_of(right).mod)


def is_workload(line: str, module: tvm.IRModule) -> bool:
    """Whether a workload line holds a module that is equal to another, whatever their variables are called."""
    return bool(tvm_ffi.structural_equal(workload_of(line).mod, module))
