"""Find the clusters of a module, schedule each for a target, and keep account of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm.target import Target
from tvm.tirx import PrimFunc

from tvm_comfuse.cpu_schedule import cpu_schedule
from tvm_comfuse.errors import PlanError
from tvm_comfuse.explanation import Explanation, MatmulExplanation
from tvm_comfuse.refusal import Refusal
from tvm_comfuse.relay_patterns.cluster import MatmulReport
from tvm_comfuse.relay_patterns.rewrite import fuse_clusters
from tvm_comfuse.schedules.apply import plan_of, schedule
from tvm_comfuse.schedules.device import H200, Device, device_of
from tvm_comfuse.schedules.plan import Plan
from tvm_comfuse.target import is_cuda, name_of

#: by matmul name, as ``explain`` gives it: a plan, its dictionary or its JSON text
Plans = Mapping[str, "Plan | dict[str, Any] | str"]


def fuse(mod: tvm.IRModule, target: Target, plans: Plans | None = None) -> tuple[tvm.IRModule, Explanation]:
    """The module with each cluster replaced by a call of one scheduled function, and what was decided.

    On a CPU target the clusters are those of an H200, scheduled for LLVM, so that their numbers can be checked there.
    plans gives the plan of some matmuls; the others get the one the cost model prefers.
    Raises PlanError for a plan that is malformed, not legal, or of a matmul that has no cluster.
    """
    parsed = _parse(plans or {})
    decider = _Decider(target, parsed)
    fused, reports = fuse_clusters(mod, decider.accept, decider.on_offer)
    matmuls = [report for discovery in reports.values() for report in discovery.matmuls]
    _check_names(parsed, [report.name for report in matmuls])
    explained = tuple(_explained(matmul, decider.accepted.get(id(matmul))) for matmul in matmuls)
    return fused, Explanation(name_of(target), explained, planned_for="" if is_cuda(target) else H200.name)


@dataclass
class _Decider:
    """Accepts or refuses cluster functions.  accepted: plans by the identity of the matmul's report."""

    target: Target
    plans: dict[str, Plan]
    accepted: dict[int, Plan] = field(default_factory=dict)
    offered: MatmulReport | None = None

    def on_offer(self, report: MatmulReport) -> None:
        """The matmul whose cluster comes next."""
        self.offered = report

    def accept(self, func: PrimFunc) -> PrimFunc | Refusal:
        """The function scheduled for the target."""
        assert self.offered is not None
        result = self._schedule(func, self.offered.name)
        if isinstance(result, Refusal):
            return result
        self.accepted[id(self.offered)] = plan_of(result)
        return result if is_cuda(self.target) else cpu_schedule(func)

    def _schedule(self, func: PrimFunc, name: str) -> PrimFunc | Refusal:
        device = _device(self.target)
        if device is None:
            return Refusal(
                "device",
                "kernels are made for Hopper GPUs (sm_90a) only",
                {"target": name_of(self.target)},
                "use the target h200 or h100",
            )
        result = schedule(func, device, self.plans.get(name))
        if isinstance(result, Refusal) and name in self.plans:
            needed = f"a plan for {name} that is legal on {device.name}: {result.clause}"
            raise PlanError(needed, result.amounts or result.code, result.remedy or "take another plan")
        return result


def _device(target: Target) -> Device | None:
    return device_of(target) if is_cuda(target) else H200


def _parse(plans: Plans) -> dict[str, Plan]:
    hint = "take the plans of `comfuse explain --json`"
    if not isinstance(plans, Mapping):
        raise PlanError("plans by the names of their matmuls", type(plans).__name__, hint)
    parsed = {}
    for name, plan in plans.items():
        if isinstance(plan, str):
            plan = Plan.from_json(plan)
        elif isinstance(plan, Mapping):
            plan = Plan.from_dict(dict(plan))
        elif not isinstance(plan, Plan):
            raise PlanError(f"a plan, its dictionary or its JSON for {name}", f"{plan!r}"[:80], hint)
        parsed[name] = plan
    return parsed


def _check_names(plans: dict[str, Plan], names: list[str]) -> None:
    unknown = sorted(set(plans) - set(names))
    if unknown:
        raise PlanError(
            f"plans for matmuls of the model ({', '.join(names) or 'it has none'})",
            f"plans for {', '.join(unknown)}",
            "take the names from `comfuse explain`",
        )


def _explained(report: MatmulReport, plan: Plan | None) -> MatmulExplanation:
    return MatmulExplanation(
        name=report.name,
        shape=tuple(report.shape),
        fused=plan is not None,
        ops=tuple(report.ops),
        plan=plan,
        reason=_ends(report.refusals) if plan is not None else report.refusals[0],
        stops=tuple(report.refusals) if plan is not None else (),
    )


def _ends(stops: list[Refusal]) -> Refusal:
    """The reason of a fused cluster: where it ends and why."""
    if not stops:
        return Refusal("fused", "one kernel; it ends where its results are used no more or returned")
    return Refusal("fused", "one kernel; it ends where " + "; and where ".join(str(stop) for stop in stops))
