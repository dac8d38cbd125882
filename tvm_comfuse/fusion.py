"""Find the clusters of a module, schedule each for a target, and keep account of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tvm
from tvm.target import Target
from tvm.tirx import PrimFunc

from tvm_comfuse.cpu_schedule import cpu_schedule
from tvm_comfuse.errors import PlanError
from tvm_comfuse.explanation import Explanation, MatmulExplanation
from tvm_comfuse.forms import AUTO, FUSED, SPLIT, FormChoice, Split, check_form, choose, make_split
from tvm_comfuse.given_plans import GivenPlans
from tvm_comfuse.refusal import Refusal
from tvm_comfuse.relay_patterns.cluster import MatmulReport
from tvm_comfuse.relay_patterns.rewrite import Form, fuse_clusters
from tvm_comfuse.schedules.analysis import analyze
from tvm_comfuse.schedules.apply import has_schedule, plan_of, schedule
from tvm_comfuse.schedules.choose import default_plan
from tvm_comfuse.schedules.cost import Account, account
from tvm_comfuse.schedules.device import H200, Device, device_of
from tvm_comfuse.schedules.legality import legality
from tvm_comfuse.schedules.plan import Plan
from tvm_comfuse.schedules.rows import is_rows
from tvm_comfuse.target import is_cuda, name_of, parse_target
from tvm_comfuse.tuning.database import Database, PlanSource, Record, best_plan, pretuned

#: by matmul name, as ``explain`` gives it: a plan, its dictionary or its JSON text; or the word ``split``, for two kernels with
#: the plans that are best known, or ``off``, for no fusion; or the whole of what ``explain --json`` or ``tune --json`` wrote
Plans = Mapping[str, Any]
#: a tuning database or its folder
Records = Database | str | Path


def fuse(
    mod: tvm.IRModule,
    target: Target,
    plans: Plans | None = None,
    *,
    tuning_records: Records | None = None,
    use_pretuned: bool = True,
    form: str = AUTO,
    rows: int | None = None,
) -> tuple[tvm.IRModule, Explanation]:
    """The module with each cluster replaced by a call of one scheduled function, or by two where that is faster, and what was
    decided.

    On a CPU target the clusters are those of an H200, scheduled for LLVM, so that their numbers can be checked there.

    plans           the plan of some matmuls; the others get the best one that is known
    tuning_records  a tuning database of measured plans, or its folder
    use_pretuned    whether the records that come with the package are asked, after those of tuning_records
    form            ``auto``: two functions for a cluster with a row reduction where these are faster, or where one has no plan;
                    ``split``: always two; ``fused``: one where it has a plan, as for all matmuls that `plans` has
    rows            where M is symbolic, the number of rows for which records are chosen; those of the most rows if None

    Where no record answers, the plan is the one the cost model prefers.
    Raises PlanError for a form that is none, for rows that the model cannot have, and for a plan that is malformed, not legal,
    of another shape, or of a matmul that has no cluster, DatabaseError for tuning_records that cannot be read.
    """
    check_form(form)
    _check_rows(rows)
    given = GivenPlans.of(plans or {})
    databases = _databases(tuning_records, use_pretuned)
    tell_default = tuning_records is not None
    decider = _Decider(target, given, databases, tell_default, form=form, rows=rows)
    fused, reports = fuse_clusters(mod, decider.accept, decider.on_offer)
    matmuls = [report for discovery in reports.values() for report in discovery.matmuls]
    given.check_names([matmul.name for matmul in matmuls])
    for matmul in matmuls:
        given.check_shape(matmul)
    _check_static_rows(rows, matmuls)
    explained = tuple(decider.explained(matmul) for matmul in matmuls)
    return fused, Explanation(name_of(target), explained, planned_for="" if is_cuda(target) else H200.name)


@dataclass
class _Decider:
    """Accepts or refuses cluster functions.

    accepted, sources  plans, and where they come from, by the identity of the matmul's report
    accounts           of the accepted plans, likewise
    choices, records   the form of each cluster that has two, and the tuning record of its fused form, likewise
    tell_default       whether it is worth a word that no record answered
    form               wanted of all clusters that have no plan and whose split form is not asked for by name
    rows               that records of clusters with a symbolic M are chosen for
    """

    target: Target
    given: GivenPlans
    databases: Sequence[Database] = ()
    tell_default: bool = False
    accepted: dict[int, Plan] = field(default_factory=dict)
    sources: dict[int, str] = field(default_factory=dict)
    accounts: dict[int, Account] = field(default_factory=dict)
    choices: dict[int, FormChoice] = field(default_factory=dict)
    records: dict[int, Record] = field(default_factory=dict)
    form: str = AUTO
    rows: int | None = None
    offered: MatmulReport | None = None

    def on_offer(self, report: MatmulReport) -> None:
        """The matmul whose cluster comes next.  Raises PlanError for a plan of another shape, before it is found illegal."""
        self.given.check_shape(report)
        self.offered = report

    def accept(self, func: PrimFunc) -> Form | Refusal:
        """The function scheduled for the target, or its split form."""
        assert self.offered is not None
        if self.offered.name in self.given.off:
            return Refusal("off", "the given plans leave it to TVM", {}, "set fused to true, with a plan")
        fused = self._schedule(func, self.offered.name)
        split = self._split(fused)
        if isinstance(split, Split):
            return split.form if is_cuda(self.target) else split.on_cpu()
        if isinstance(fused, Refusal):
            return fused
        plan = self.accepted[id(self.offered)] = plan_of(fused)
        device = _device(self.target)
        if device is not None:
            self.accounts[id(self.offered)] = account(plan, analyze(fused), device)
        return fused if is_cuda(self.target) else cpu_schedule(func)

    def _split(self, fused: PrimFunc | Refusal) -> Split | None:
        """The split form of the offered cluster, if it is the one to take."""
        report, device = self.offered, _device(self.target)
        assert report is not None
        assert report.cluster is not None
        if report.cluster.kind != "gemm_reduce":
            if report.name in self.given.splits:
                found = "a cluster without row reductions, which is one kernel in either form"
                raise PlanError(f"a split form of {report.name}", found, f"leave {report.name} out, or give it a plan")
            return None
        if device is None:
            return None
        wanted = SPLIT if report.name in self.given.splits else FUSED if report.name in self.given.plans else self.form
        split = make_split(report.cluster, device, lambda func: self._known(func)[0])
        if isinstance(split, Refusal):
            if wanted == SPLIT:
                raise PlanError(f"a split form of {report.name}", str(split), "ask for form auto or fused")
            return None
        known = fused if isinstance(fused, Refusal) else (analyze(fused), plan_of(fused))
        record = self.records.get(id(report))
        both_us, tuned = (record.both_us, str(record)) if record else (None, "")
        choice = self.choices[id(report)] = choose(wanted, known, split, device, both_us, tuned)
        return split if choice.chosen == SPLIT else None

    def explained(self, report: MatmulReport) -> MatmulExplanation:
        """What was decided about a matmul."""
        plan, choice = self.accepted.get(id(report)), self.choices.get(id(report))
        split = choice is not None and choice.chosen == SPLIT
        if plan is not None:
            reason = _ends(report.refusals)
        else:
            reason = choice.refusal if choice is not None and split else report.refusals[0]
        return MatmulExplanation(
            name=report.name,
            shape=tuple(report.shape),
            fused=plan is not None,
            ops=tuple(report.ops),
            plan=plan,
            reason=reason,
            stops=tuple(report.refusals) if plan is not None or split else (),
            plan_source=self.sources.get(id(report), "") if plan is not None else "",
            forms=choice,
            account=self.accounts.get(id(report)),
        )

    def _schedule(self, func: PrimFunc, name: str) -> PrimFunc | Refusal:
        device = _device(self.target)
        if device is None:
            return _no_device(self.target)
        plan = self._plan(func, name)
        if isinstance(plan, Refusal):
            return plan
        result = schedule(func, device, plan)
        if isinstance(result, Refusal) and name in self.given.plans:
            raise _illegal(name, self.given.plans[name], func, device)
        return result

    def _plan(self, func: PrimFunc, name: str) -> Plan | Refusal | None:
        """The given plan, else the best that is known; None leaves it to the cost model."""
        if name in self.given.plans:
            return self.given.plans[name]
        plan, source = self._known(func)
        if source is not None and source.kind == "tuned" and source.record is not None:
            self.records[id(self.offered)] = source.record
        if source is not None and (source.kind != "default" or self.tell_default):
            self.sources[id(self.offered)] = source.text
        return plan

    def _known(self, func: PrimFunc) -> tuple[Plan | Refusal | None, PlanSource | None]:
        """The best plan that is known of a function, and where it comes from; None without a database to ask."""
        if not self.databases:
            return None, None
        # a CPU runs the clusters of an H200, so it shows the plans of one, unless it was tuned itself
        target = self.target
        if not is_cuda(target):
            own = next((r for d in self.databases if (r := d.query(func, target, self.rows)) is not None), None)
            if own is not None and own.plan is not None:
                return own.plan, PlanSource("tuned", str(own), own)
            target = parse_target(H200.name)
        return best_plan(func, target, self.databases, self.rows)


def _databases(tuning_records: Records | None, use_pretuned: bool) -> list[Database]:
    """Databases in the order in which they are asked.  Raises DatabaseError."""
    given = [tuning_records] if tuning_records is not None else []
    # whoever compiles only reads: in a folder of others, and while somebody tunes into it
    opened = [
        each if isinstance(each, Database) else Database.open(each, create=False, read_only=True) for each in given
    ]
    own = pretuned() if use_pretuned else None
    return [*opened, own] if own is not None else opened


def schedule_clusters(mod: tvm.IRModule, target: Target, tuning_records: Records | None = None) -> tvm.IRModule:
    """The module with every canonical function that has no schedule yet scheduled for the target.

    Such functions are left where FuseClusters() is followed by a tuning database that has no record for them.  Raises
    PlanError for one that has no plan on the target.
    """
    databases = _databases(tuning_records, use_pretuned=True)
    result = mod.clone()
    for gvar, func in mod.functions_items():
        if not isinstance(func, PrimFunc) or "comfuse.kind" not in (func.attrs or {}):
            continue
        if has_schedule(func) or is_rows(func):  # rows functions are made with their plans
            continue
        if not is_cuda(target):
            result[gvar] = cpu_schedule(func)
            continue
        plan, _ = best_plan(func, target, databases)
        device = device_of(target)
        made = plan if isinstance(plan, Refusal) or device is None else schedule(func, device, plan)
        if not isinstance(made, PrimFunc):
            found = str(made) if isinstance(made, Refusal) else name_of(target)
            raise PlanError(f"a plan for {gvar.name_hint}", found, "find clusters with this target in scope")
        result[gvar] = made
    return result


def has_plan_for(func: PrimFunc, target: Target) -> PrimFunc | Refusal:
    """The function itself, unscheduled, if a kernel can be made of it for the target; else why not."""
    device = _device(target)
    if device is None:
        return _no_device(target)
    plan = default_plan(analyze(func), device)
    return plan if isinstance(plan, Refusal) else func


def _illegal(name: str, plan: Plan, func: PrimFunc, device: Device) -> PlanError:
    """Every reason why a given plan is not legal."""
    reasons = legality(plan, analyze(func), device)
    clauses, remedies = (dict.fromkeys(words) for words in zip(*((r.clause, r.remedy) for r in reasons), strict=True))
    needed = f"a plan for {name} that is legal on {device.name}: {'; '.join(clauses)}"
    found = "; ".join(reason.amounts or reason.code for reason in reasons)
    return PlanError(needed, found, "; ".join(filter(None, remedies)) or "take another plan")


def _no_device(target: Target) -> Refusal:
    return Refusal(
        "device",
        "kernels are made for Hopper GPUs (sm_90a) only",
        {"target": name_of(target)},
        "use the target h200 or h100",
    )


def _device(target: Target) -> Device | None:
    return device_of(target) if is_cuda(target) else H200


def _check_rows(rows: Any) -> None:
    if rows is not None and (type(rows) is not int or rows < 1):
        raise PlanError("rows of at least 1", repr(rows), "give the M that the model is mostly called with")


def _check_static_rows(rows: int | None, matmuls: Sequence[MatmulReport]) -> None:
    """Raises PlanError for a model that has another number of rows.

    Where some matmul has a symbolic M, rows are meant for those and the others keep their own.
    """
    sizes = {matmul.name: matmul.shape[0] for matmul in matmuls}
    if rows is None or any(not isinstance(m, int) for m in sizes.values()):
        return
    others = ", ".join(f"{m} in {name}" for name, m in sizes.items() if m != rows)
    if others:
        needed = f"a model with a symbolic M, to choose plans for {rows} rows"
        raise PlanError(needed, f"static M: {others}", "leave rows out, or export the model with a symbolic M")


def _ends(stops: list[Refusal]) -> Refusal:
    """The reason of a fused cluster: where it ends and why."""
    if not stops:
        return Refusal("fused", "one kernel; it ends where its results are used no more or returned")
    return Refusal("fused", "one kernel; it ends where " + "; and where ".join(str(stop) for stop in stops))
