"""The two forms of a cluster, one kernel or two, and which of them is taken.

A cluster is fused only where that takes no longer than its split form: our own product with an elementwise epilogue, and a
kernel that reads its result once (relay_patterns/split_form.py).  Times are compared with their like: measured ones if a record
has both, else estimates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm.tirx import PrimFunc

from tvm_comfuse.cpu_schedule import cpu_schedule
from tvm_comfuse.errors import PlanError
from tvm_comfuse.refusal import Refusal
from tvm_comfuse.relay_patterns.cluster import Cluster
from tvm_comfuse.relay_patterns.split_form import SplitForm, split_form
from tvm_comfuse.schedules.analysis import analyze
from tvm_comfuse.schedules.apply import plan_of, schedule
from tvm_comfuse.schedules.choose import default_plan
from tvm_comfuse.schedules.cost import estimate, rows_of
from tvm_comfuse.schedules.device import Device
from tvm_comfuse.schedules.plan import Plan
from tvm_comfuse.schedules.rows import RowsPlan, analyze_rows, rows_estimate, rows_plan_of, schedule_rows
from tvm_comfuse.schedules.spec import ClusterSpec

AUTO, FUSED, SPLIT = "auto", "fused", "split"
FORMS = (AUTO, FUSED, SPLIT)
ESTIMATES, MEASURED = "estimates", "measured"


@dataclass(frozen=True)
class Split:
    """The split form of a cluster.

    plain  its functions as they are made
    form   the same, scheduled
    gemm  plan of the first
    rows  plan of the second
    us    estimate of both together, in microseconds
    """

    plain: SplitForm
    form: SplitForm
    gemm: Plan
    rows: RowsPlan
    us: float

    def on_cpu(self) -> SplitForm:
        """The functions scheduled for LLVM."""
        return self.plain.with_functions(cpu_schedule(self.plain.gemm.func), cpu_schedule(self.plain.rows.func))


@dataclass(frozen=True)
class FormChoice:
    """Which form a cluster got, and the times that decided.

    chosen             ``fused`` or ``split``
    fused_us, split_us microseconds; None for a form that has no plan
    basis              ``estimates`` or ``measured``
    gemm, rows         plans of the split form's kernels
    why                for people
    """

    chosen: str
    fused_us: float | None
    split_us: float
    basis: str
    gemm: Plan
    rows: RowsPlan
    why: str = ""

    @property
    def times(self) -> str:
        """Both times, for people."""
        fused = "none" if self.fused_us is None else f"{self.fused_us:.1f} us"
        return f"fused {fused}, split {self.split_us:.1f} us ({self.basis})"

    def to_dict(self) -> dict[str, Any]:
        """A dictionary of plain JSON values."""
        return {
            "chosen": self.chosen,
            "fused_us": self.fused_us,
            "split_us": self.split_us,
            "basis": self.basis,
            "split": {"gemm": self.gemm.to_dict(), "rows": self.rows.to_dict()},
        }

    @property
    def refusal(self) -> Refusal:
        """Why a split cluster is not fused."""
        return Refusal("split", f"two kernels, as {self.why}: {self.times}")


def check_form(form: str) -> None:
    """Raises PlanError for a form that is none."""
    if form not in FORMS:
        raise PlanError(f"form out of {', '.join(FORMS)}", repr(form), "use one of them")


def make_split(
    cluster: Cluster, device: Device, plan_for: Callable[[PrimFunc], Plan | Refusal | None]
) -> Split | Refusal:
    """The split form of a cluster with a row reduction, with plans for a device.

    plan_for  gives the plan of a product without reductions; None leaves it to the cost model
    """
    form = split_form(cluster)
    rows = schedule_rows(form.rows.func, device)
    if isinstance(rows, Refusal):
        return rows
    plan = plan_for(form.gemm.func)
    gemm = plan if isinstance(plan, Refusal) else schedule(form.gemm.func, device, plan)
    if isinstance(gemm, Refusal):
        return gemm
    spec, chosen = analyze(gemm), plan_of(gemm)
    us = estimate(chosen, spec, device).total + rows_estimate(analyze_rows(rows), device, rows_of(spec))
    return Split(form, form.with_functions(gemm, rows), chosen, rows_plan_of(rows), us)


def choose(
    wanted: str,
    fused: tuple[ClusterSpec, Plan] | Refusal,
    split: Split,
    device: Device,
    measured: tuple[float, float] | None = None,
    tuned: str = "",
) -> FormChoice:
    """The form that is wanted, or the faster one; the fused one where it is no slower.

    measured  microseconds of both forms on this device, if they are known
    tuned     where the fused plan was measured, in words; "" if it was not
    """
    if isinstance(fused, Refusal):
        return FormChoice(
            SPLIT, None, split.us, ESTIMATES, split.gemm, split.rows, f"no plan makes one of it ({fused})"
        )
    spec, plan = fused
    fused_us, split_us = measured or (_fused_estimate(spec, plan, device, bool(tuned)), split.us)
    basis = MEASURED if measured else ESTIMATES
    if wanted == AUTO:
        chosen, why = (FUSED, "") if fused_us <= split_us else (SPLIT, "they take less time")
        if why and tuned:
            why += f" (form fused takes the plan of a record, {tuned})"
    else:
        chosen, why = wanted, "this form is asked for"
    return FormChoice(chosen, fused_us, split_us, basis, split.gemm, split.rows, why)


def _fused_estimate(spec: ClusterSpec, plan: Plan, device: Device, tuned: bool) -> float:
    """Microseconds of the fused form.

    A tuned plan counts as the plan without tuning does, if its own estimate is worse: measurements have said that it is faster.
    """
    own = estimate(plan, spec, device).total
    untuned = default_plan(spec, device) if tuned else plan
    return own if isinstance(untuned, Refusal) else min(own, estimate(untuned, spec, device).total)
