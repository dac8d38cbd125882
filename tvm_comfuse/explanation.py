"""What would be fused, with which plan, and why the rest would not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tvm_comfuse.refusal import Refusal

if TYPE_CHECKING:
    from tvm.target import Target

    from tvm_comfuse.forms import FormChoice
    from tvm_comfuse.fusion import Records
    from tvm_comfuse.schedules.cost import Account
    from tvm_comfuse.schedules.plan import Plan


@dataclass(frozen=True)
class MatmulExplanation:
    """One matmul of the model.

    name    of its Relax variable, with ``#2``, ``#3``, ... where several have one name
    shape   [M, N, K], symbolic extents as text
    fused   whether it and the operators behind it become one kernel
    ops     Relax operators of the kernel in program order, the matmul first
    plan    of the kernel, None without one
    reason  why it is not fused; for a fused one code "fused" and where and why the cluster ends
    stops   for a fused one, why each operator that uses one of its values is not in it
    plan_source  where the plan comes from if not from the cost model, or if a database was asked in vain; else ""
    forms   which of two forms a cluster with a row reduction got, and the times of both; None if only one was looked at
    account  what the cost model says of the plan; None without one
    """

    name: str
    shape: tuple[int | str, ...]
    fused: bool
    ops: tuple[str, ...]
    plan: Plan | None
    reason: Refusal
    stops: tuple[Refusal, ...] = ()
    plan_source: str = ""
    forms: FormChoice | None = None
    account: Account | None = None

    def to_dict(self) -> dict[str, Any]:
        """A dictionary of plain JSON values with exactly the keys of the command line's interface.

        The keys ``plan_source``, ``forms`` and ``estimate`` are there only if there is something to say.
        """
        source: dict[str, Any] = {"plan_source": self.plan_source} if self.plan_source else {}
        if self.forms is not None:
            source["forms"] = self.forms.to_dict()
        if self.account is not None:
            source["estimate"] = self.account.to_dict()
        return {
            "name": self.name,
            "shape": list(self.shape),
            "fused": self.fused,
            "ops": list(self.ops),
            "plan": self.plan.to_dict() if self.plan else None,
            "reason": {"code": self.reason.code, "text": str(self.reason)},
            **source,
        }

    @property
    def operators(self) -> str:
        """Names of `ops` for a person."""
        return ", ".join(_plain(name) for name in self.ops)

    @property
    def times(self) -> str:
        """Times of both forms of a fused cluster; "" where only one was looked at, or where the reason has them."""
        return self.forms.times if self.forms is not None and self.fused else ""

    @property
    def form(self) -> str:
        """``fused``, ``split`` or ``not fused``."""
        split = self.forms is not None and not self.fused and self.forms.chosen == "split"
        return "fused" if self.fused else "split" if split else "not fused"

    @property
    def ends(self) -> list[str]:
        """Where the cluster ends and by which rule, one line a rule; of a split one first why; the reason alone without one."""
        if not self.fused and self.form != "split":
            return [f"not fused, {self.reason.code}: {self.reason}"]
        operators: dict[str, list[str]] = {}
        for stop in self.stops:
            # a refusal of the whole cluster names no operator: what was left out is all of its row reductions
            name = _plain(str(stop.numbers["operator"])) if "operator" in stop.numbers else "its row reductions"
            operators.setdefault(stop.clause, []).append(name)
        ends = [f"ends at {', '.join(dict.fromkeys(names))}: {clause}" for clause, names in operators.items()]
        return ends if self.fused else [f"split: {self.reason}", *ends]


@dataclass(frozen=True)
class Explanation:
    """Every matmul of a model, in program order.

    planned_for  the GPU whose clusters and plans these are, where the target is not that GPU but runs its clusters; else ""
    """

    target: str
    matmuls: tuple[MatmulExplanation, ...] = field(default=())
    planned_for: str = ""

    def to_dict(self) -> dict[str, Any]:
        """``{"matmuls": [...]}``, plain JSON values."""
        return {"matmuls": [matmul.to_dict() for matmul in self.matmuls]}

    def __str__(self) -> str:
        lines = []
        for matmul in self.matmuls:
            lines.append(f"{matmul.name} {' x '.join(map(str, matmul.shape))}: {matmul.form}")
            if matmul.form != "not fused":
                lines.append(f"  operators: {matmul.operators}")
            if matmul.plan is not None:
                lines.append(f"  plan: {matmul.plan.short()}")
            if matmul.plan_source:
                lines.append(f"  plan is {matmul.plan_source}")
            if matmul.times:
                lines.append(f"  {matmul.times}")
            if matmul.account is not None:
                lines += [f"  {line}" for line in matmul.account.lines]
            lines += [f"  {end}" for end in matmul.ends]
        return "\n".join([*lines, *([self.note] if self.note else []), self.summary])

    @property
    def summary(self) -> str:
        """How many matmuls there are, fused and not."""
        if not self.matmuls:
            return "no matmul in the model"
        forms, count = [matmul.form for matmul in self.matmuls], len(self.matmuls)
        counts = {"fused": forms.count("fused"), "split": forms.count("split"), "not": forms.count("not fused")}
        parts = [f"{number} {name}" for name, number in counts.items() if number or name == "fused"]
        return f"{count} matmul{'s' if count > 1 else ''}: {', '.join(parts)}"

    @property
    def note(self) -> str:
        """What must be known about the plans, or ""."""
        if not self.planned_for or not any(matmul.plan for matmul in self.matmuls):
            return ""
        return (
            f"clusters and plans are those of the {self.planned_for}; {self.target} runs the clusters without the plans"
        )


def _plain(name: str) -> str:
    return name.removeprefix("relax.")


def explain(
    model: Any,
    target: str | dict[str, Any] | Target = "h200",
    *,
    example_args: tuple[Any, ...] | None = None,
    plans: Mapping[str, Any] | None = None,
    tuning_records: Records | None = None,
    use_pretuned: bool = True,
    form: str = "auto",
    rows: int | None = None,
) -> Explanation:
    """Say for each matmul of a model whether it is fused, how, and why not.  Compiles nothing.

    The arguments are those of ``tvm_comfuse.compile``, and so are the errors.
    """
    from tvm_comfuse.build import to_module
    from tvm_comfuse.fusion import fuse
    from tvm_comfuse.target import parse_target

    parsed = parse_target(target)
    mod = to_module(model, example_args)
    return fuse(mod, parsed, plans, tuning_records=tuning_records, use_pretuned=use_pretuned, form=form, rows=rows)[1]
