"""From a plan to a scheduled function, and back."""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, tirx

from tvm_comfuse.errors import LoweringError, PlanError
from tvm_comfuse.refusal import Refusal

from .analysis import analyze
from .choose import default_plan
from .device import Device
from .legality import legality
from .plan import Plan
from .primitives import fuse_stages, place_stages, set_exchange, tile_gemm
from .spec import ClusterSpec

#: annotation of the root block: the plan as JSON
PLAN = "comfuse.plan"
ROOT = "root"


def apply_plan(sch: s_tir.Schedule, plan: Plan) -> None:
    """Schedules the canonical function of ``sch`` by a plan and writes the plan on the root block.

    The schedule must hold one function, named ``main``, not scheduled yet; raises LoweringError if it is not
    canonical.  Whether the plan is legal is the caller's business.
    """
    spec = analyze(_only_function(sch.mod))
    loops = tile_gemm(sch, plan)
    names = block_order(spec)
    fuse_stages(sch, loops.row_tile, names, plan.cta_rows)
    place_stages(sch, ["gemm", *names])
    set_exchange(sch, [reduction.block for reduction in spec.reductions], plan)
    sch.annotate(sch.get_sblock(ROOT), PLAN, plan.to_json())


def block_order(spec: ClusterSpec) -> list[str]:
    """Names of all blocks but gemm in an order in which each comes after what it reads."""
    names: list[str] = []
    for stage in spec.stages:
        names += [stage.carried] if stage.carried else []
        names += [output.block for output in stage.outputs]
        names += [reduction.block for reduction in stage.reductions]
    return names


def has_plan(func: tirx.PrimFunc) -> bool:
    """Whether a function was scheduled by a plan."""
    return _plan_text(func) is not None


def has_schedule(func: tirx.PrimFunc) -> bool:
    """Whether a canonical function was scheduled, for a GPU or a CPU: as it is made, all its loops are serial."""
    kinds: list[Any] = []
    tvm_ffi.structural_walk(func.body, [(tirx.For, lambda loop: kinds.append(loop.kind))])
    return any(kind != tirx.ForKind.SERIAL for kind in kinds)


def plan_of(func: tirx.PrimFunc) -> Plan:
    """The plan a function was scheduled by.  Raises PlanError if it has none or a malformed one."""
    text = _plan_text(func)
    if text is None:
        raise PlanError(
            f"a function with a {PLAN} annotation on its root block",
            "none",
            "schedule the function with tvm_comfuse.schedules.apply.schedule first",
        )
    return Plan.from_json(text)


def _plan_text(func: tirx.PrimFunc) -> str | None:
    root = func.body.block if isinstance(func.body, s_tir.SBlockRealize) else None
    text = root.annotations.get(PLAN) if root is not None and root.annotations else None
    return None if text is None else str(text)


def schedule(func: tirx.PrimFunc, device: Device, plan: Plan | None = None) -> tirx.PrimFunc | Refusal:
    """The function scheduled by ``plan``, or by default_plan if None; a Refusal if no such plan is legal.

    The argument stays as it is.  Function attributes are kept.  Raises LoweringError if the function is not canonical.
    """
    spec = analyze(func)
    chosen = default_plan(spec, device) if plan is None else plan
    if isinstance(chosen, Refusal):
        return chosen
    refusals = legality(chosen, spec, device)
    if refusals:
        return refusals[0]
    name = func.attrs.get("global_symbol") if func.attrs else None
    # `named` must live as long as the schedule: TVM changes a function in place that nobody else holds, and with it
    # the body it shares with `func`
    named = func.with_attr("global_symbol", "main")
    sch = s_tir.Schedule(tvm.IRModule({"main": named}), debug_mask="all")
    apply_plan(sch, chosen)
    scheduled = sch.mod["main"]
    return scheduled.without_attr("global_symbol") if name is None else scheduled.with_attr("global_symbol", name)


def _only_function(mod: tvm.IRModule) -> Any:
    functions = [func for _, func in mod.functions_items()]
    if len(functions) != 1:
        raise LoweringError("a module with one function", f"{len(functions)}", "schedule each cluster by itself")
    return functions[0]
