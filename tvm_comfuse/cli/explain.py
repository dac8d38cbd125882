"""``comfuse explain MODEL``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm_comfuse.cli.common import JsonFlag, Model, TargetOption, console, print_json, start

if TYPE_CHECKING:
    from rich.table import Table

    from tvm_comfuse.explanation import Explanation, MatmulExplanation
    from tvm_comfuse.schedules.plan import Plan


def explain(model: Model, target: TargetOption = "h200", json: JsonFlag = False) -> None:
    """Say for each matmul whether it is fused, with which plan, and why not."""
    start()
    from tvm_comfuse.explanation import explain as explain_model

    explanation = explain_model(model, target)
    if json:
        print_json(explanation.to_dict())
    elif not explanation.matmuls:
        console().print("no matmul in the model")
    else:
        console().print(table(explanation))


def table(explanation: Explanation) -> Table:
    """One row a matmul."""
    from rich.table import Table

    result = Table(title=f"matmuls, for {explanation.target}", show_lines=True)
    for heading in ("matmul", "M x N x K", "fused", "operators", "plan", "reason"):
        result.add_column(heading, overflow="fold")
    for matmul in explanation.matmuls:
        result.add_row(
            matmul.name,
            " x ".join(map(str, matmul.shape)),
            "yes" if matmul.fused else "no",
            ", ".join(name.removeprefix("relax.") for name in matmul.ops),
            short_plan(matmul.plan) if matmul.plan else "-",
            _short_reason(matmul),
        )
    return result


def _short_reason(matmul: MatmulExplanation) -> str:
    """The reason, for a fused matmul only where its cluster ends and the rule behind it; JSON has the whole text."""
    if not matmul.fused:
        return f"{matmul.reason.code}: {matmul.reason}"
    ends = [f"{str(stop.numbers.get('operator', '')).removeprefix('relax.')}: {stop.clause}" for stop in matmul.stops]
    return "\n".join(f"ends at {end}" for end in dict.fromkeys(ends)) or "-"


def short_plan(plan: Plan) -> str:
    """The choices that tell plans apart at a glance."""
    groups = f" {plan.groups_m}x{plan.groups_n}" if plan.layout == "cooperative" else ""
    cluster = f", cluster {plan.cluster_m}x{plan.cluster_n}" if plan.cluster_m * plan.cluster_n > 1 else ""
    return (
        f"{plan.tile_m}x{plan.tile_n}x{plan.tile_k}, depth {plan.pipeline_depth}, {plan.layout}{groups}, "
        f"exchange {plan.exchange}{cluster}, {plan.ctas} CTAs"
    )
