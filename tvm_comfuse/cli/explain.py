"""``comfuse explain MODEL``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm_comfuse.cli.common import (
    FormOption,
    JsonFlag,
    Model,
    PlansFile,
    Pretuned,
    RowsOption,
    TargetOption,
    TuningRecords,
    chosen,
    console,
    print_json,
    start,
    tell_of_silent_records,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from tvm_comfuse.explanation import Explanation, MatmulExplanation


def explain(
    model: Model,
    target: TargetOption = "h200",
    plans: PlansFile = None,
    tuning_records: TuningRecords = None,
    pretuned: Pretuned = True,
    form: FormOption = "auto",
    rows: RowsOption = None,
    json: JsonFlag = False,
) -> None:
    """Say for each matmul whether it is fused, with which plan, and why not."""
    start()
    from tvm_comfuse.explanation import explain as explain_model

    explanation = explain_model(
        model,
        target,
        **chosen(plans, tuning_records, pretuned, form, rows),
    )
    tell_of_silent_records(tuning_records)
    if json:
        print_json(explanation.to_dict())
    else:
        show(console(), explanation)


def show(out: Console, explanation: Explanation) -> None:
    """A table of the matmuls, below it where plans come from and each kernel ends, or why there is none, and a summary."""
    if explanation.matmuls:
        out.print(table(explanation))
    for matmul in explanation.matmuls:
        if matmul.plan_source:
            out.print(f"{matmul.name} plan is {matmul.plan_source}")
        if matmul.times:
            out.print(f"{matmul.name} {matmul.times}")
        if matmul.account is not None:
            for line in matmul.account.lines:
                out.print(f"{matmul.name} {line}")
        for end in matmul.ends:
            out.print(f"{matmul.name} {end}")
    if explanation.note:
        out.print(explanation.note)
    out.print(explanation.summary)


def table(explanation: Explanation) -> Table:
    """One row a matmul."""
    from rich.table import Table

    result = Table(title=f"matmuls, for {explanation.target}")
    for heading in ("matmul", "M x N x K", "fused", "operators", "plan"):
        result.add_column(heading, overflow="fold")
    for matmul in explanation.matmuls:
        result.add_row(
            matmul.name,
            " x ".join(map(str, matmul.shape)),
            {"fused": "yes", "split": "split"}.get(matmul.form, "no"),
            matmul.operators,
            _plan(matmul),
        )
    return result


def _plan(matmul: MatmulExplanation) -> str:
    """The plan, or those of a split form's kernels."""
    if matmul.plan is not None:
        return matmul.plan.short()
    if matmul.form == "split" and matmul.forms is not None:
        return f"{matmul.forms.gemm.short()}; then {matmul.forms.rows.short()}"
    return "-"
