"""Plans that a user gives, in the forms in which our own commands write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tvm_comfuse.errors import PlanError
from tvm_comfuse.forms import SPLIT
from tvm_comfuse.relay_patterns.cluster import MatmulReport
from tvm_comfuse.schedules.plan import Plan

#: what `explain --json` and `tune --json` hold their plans in
MATMULS, TASKS = "matmuls", "tasks"
HINT = "take the plans of `comfuse explain --json`"
#: what stands in the place of a plan for a matmul that shall not be fused
OFF = "off"
#: [M, N, K] of a matmul, symbolic extents as text
Shape = tuple["int | str", ...]


@dataclass(frozen=True)
class GivenPlans:
    """Plans by the names of their matmuls.

    plans   of the fused form
    splits  names whose split form is asked for
    off     names that shall not be fused
    shapes  [M, N, K] of the matmuls that the plans were made for, where that is known
    """

    plans: dict[str, Plan]
    splits: frozenset[str] = frozenset()
    off: frozenset[str] = frozenset()
    shapes: dict[str, Shape] = field(default_factory=dict)

    @staticmethod
    def of(values: Any) -> GivenPlans:
        """Plans of ``{name: plan, its dictionary, its JSON, or one of the words split and off}``, or of what ``explain --json``
        or ``tune --json`` wrote.  Raises PlanError.
        """
        if not isinstance(values, Mapping):
            raise PlanError("plans by the names of their matmuls", type(values).__name__, HINT)
        shapes: dict[str, Shape] = {}
        if isinstance(values.get(MATMULS), Sequence) and not isinstance(values[MATMULS], str):
            values, shapes = _explained(values[MATMULS])
        elif isinstance(values.get(TASKS), Sequence) and not isinstance(values[TASKS], str):
            values, shapes = _tuned(values[TASKS])
        words = {name: plan for name, plan in values.items() if plan in (SPLIT, OFF)}
        splits, off = (frozenset(name for name, word in words.items() if word == wanted) for wanted in (SPLIT, OFF))
        plans = {name: _plan(name, plan) for name, plan in values.items() if name not in words}
        return GivenPlans(plans, splits, off, shapes)

    def check_names(self, names: Sequence[str]) -> None:
        """Raises PlanError for plans of other matmuls than these."""
        unknown = sorted({*self.plans, *self.splits, *self.off} - set(names))
        if unknown:
            raise PlanError(
                f"plans for matmuls of the model ({', '.join(names) or 'it has none'})",
                f"plans for {', '.join(unknown)}",
                "take the names from `comfuse explain`",
            )

    def check_shape(self, matmul: MatmulReport) -> None:
        """Raises PlanError for a plan that was made for another shape of this matmul; a symbolic M fits every M."""
        given, there = self.shapes.get(matmul.name), tuple(matmul.shape)
        if given is not None and not _fits(given, there):
            raise PlanError(
                f"plans for this model, whose {matmul.name} is {_text(there)}",
                f"one for {_text(given)}, so the plans are of another model or shape",
                "write them anew with `comfuse explain --json`, or give them without shapes: {name: plan}",
            )


def _explained(matmuls: Sequence[Any]) -> tuple[dict[str, Any], dict[str, Shape]]:
    plans: dict[str, Any] = {}
    shapes: dict[str, Shape] = {}
    try:
        for matmul in matmuls:
            name = matmul["name"]
            if name in plans:
                raise PlanError("each matmul once", f"{name} twice", "leave one of the entries out")
            plans[name] = _of_matmul(name, matmul)
            shapes |= _shape(name, matmul)
    except (AttributeError, KeyError, TypeError) as error:
        found = f"{type(error).__name__}: {error}"
        raise PlanError("matmuls with a name and a plan", found, "write them with `comfuse explain --json`") from error
    return plans, shapes


def _of_matmul(name: str, matmul: Mapping[str, Any]) -> Any:
    """The plan of an entry of `explain`, or the word that stands for none."""
    if (matmul.get("forms") or {}).get("chosen") == SPLIT:
        return SPLIT
    plan = matmul.get("plan")
    fused = matmul.get("fused", plan is not None)
    if fused not in (True, False):
        raise PlanError(f"fused of {name} as true or false", repr(fused), "correct the value")
    if fused and plan is None:
        raise PlanError(
            f"a plan for {name}, which is to be fused", "none", "set fused to false, or leave the entry out"
        )
    return plan if fused else OFF


def _tuned(tasks: Sequence[Any]) -> tuple[dict[str, Any], dict[str, Shape]]:
    plans: dict[str, Any] = {}
    shapes: dict[str, Shape] = {}
    try:
        for task in tasks:
            for name in task["matmuls"] if task["plan"] else ():
                plans[name] = SPLIT if task.get("form") == SPLIT else task["plan"]
                shapes |= _shape(name, task)
    except (AttributeError, KeyError, TypeError) as error:
        found = f"{type(error).__name__}: {error}"
        raise PlanError("tasks with matmuls and a plan", found, "write them with `comfuse tune --json`") from error
    if not plans:
        raise PlanError("plans that a search found", "tasks without any", "tune longer, or compile without plans")
    return plans, shapes


def _shape(name: str, values: Mapping[str, Any]) -> dict[str, Shape]:
    shape = values.get("shape")
    return {name: tuple(shape)} if isinstance(shape, (list, tuple)) else {}


def _fits(given: Shape, there: Shape) -> bool:
    """Whether N and K are equal, and M where neither is symbolic."""
    symbolic = any(not isinstance(shape[0], int) for shape in (given, there) if shape)
    return given[1:] == there[1:] if symbolic else given == there


def _text(shape: Shape) -> str:
    return " x ".join(map(str, shape))


def _plan(name: str, plan: Any) -> Plan:
    if isinstance(plan, str) and not plan.lstrip().startswith("{"):
        raise PlanError(f"a plan, its JSON or one of the words {SPLIT} and {OFF} for {name}", repr(plan[:80]), HINT)
    if not isinstance(plan, (str, Mapping, Plan)):
        raise PlanError(f"a plan, its dictionary or its JSON for {name}", f"{plan!r}"[:80], HINT)
    try:
        if isinstance(plan, str):
            return Plan.from_json(plan)
        return plan if isinstance(plan, Plan) else Plan.from_dict(dict(plan))
    except PlanError as error:
        raise PlanError(f"for {name} {error.needed}", error.found, error.hint) from error
