"""``comfuse compile MODEL -o OUT``."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tvm_comfuse.cli.common import JsonFlag, Model, Pretuned, TargetOption, TuningRecords, console, print_json, start
from tvm_comfuse.errors import BuildError, PlanError
from tvm_comfuse.output import LIBRARY_SUFFIX, check_output

if TYPE_CHECKING:
    from rich.table import Table

    from tvm_comfuse.cuda import CubinReport


def compile_(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", help="The shared library to write, NAME.so.")],
    target: TargetOption = "h200",
    dump: Annotated[
        Path | None, typer.Option("--dump", help="A folder for the IR after each phase, CUDA and PTX statistics.")
    ] = None,
    plans: Annotated[
        Path | None, typer.Option("--plans", help="JSON: {matmul name: plan}, as `explain --json` prints them.")
    ] = None,
    tuning_records: TuningRecords = None,
    pretuned: Pretuned = True,
    json: JsonFlag = False,
) -> None:
    """Compile a model to a shared library and report each kernel's registers, spills and shared memory."""
    start()
    check_output(output, LIBRARY_SUFFIX)
    from tvm_comfuse.build import compile as compile_model

    compiled = compile_model(
        model,
        target,
        plans=_read_plans(plans) if plans else None,
        tuning_records=tuning_records,
        use_pretuned=pretuned,
        dump=dump,
    )
    explanation = compiled.explanation
    assert explanation is not None  # only a loaded library has none
    reports, problem = _kernel_reports(compiled)
    library = compiled.export_library(output)
    if json:
        print_json(
            {
                "library": str(library),
                "target": str(compiled.target),
                **explanation.to_dict(),
                "cubins": [report.to_dict() for report in reports],
                "problem": problem,
            }
        )
        return
    fused = sum(matmul.fused for matmul in explanation.matmuls)
    out = console()
    out.print(f"{library}: {fused} of {len(explanation.matmuls)} matmuls fused")
    if reports:
        out.print(kernel_table(reports))
    if problem:
        out.print(f"kernels not inspected: {problem}")


def kernel_table(reports: list[CubinReport]) -> Table:
    """One row a kernel."""
    from rich.table import Table

    compilers = ", ".join(sorted({f"{report.compiler}, {report.arch}" for report in reports}))
    table = Table(title=f"kernels ({compilers})")
    table.add_column("kernel", overflow="fold")
    for heading in ("registers", "spill stores", "spill loads", "static smem", "dynamic smem"):
        table.add_column(heading, justify="right")
    for kernel in (kernel for report in reports for kernel in report.kernels):
        shared = (kernel.shared_bytes, kernel.dynamic_shared_bytes)
        table.add_row(kernel.name, *map(str, (kernel.registers, kernel.spill_stores, kernel.spill_loads, *shared)))
    return table


def _kernel_reports(compiled: Any) -> tuple[list[CubinReport], str | None]:
    """Reports, and why there are none where no CUDA compiler is: the library compiles its source when it is loaded."""
    try:
        return compiled.kernel_report(), None
    except BuildError as error:
        if not error.found.startswith("no "):
            raise
        return [], str(error)


def _read_plans(path: Path) -> dict[str, Any]:
    """``{name: plan}``, or the whole output of ``explain --json``.  Raises PlanError."""
    try:
        values = json_format.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise PlanError("a JSON file of plans", f"{path}: {error}", "write it from `comfuse explain --json`") from error
    if isinstance(values, dict) and isinstance(values.get("matmuls"), list):
        try:
            return {matmul["name"]: matmul["plan"] for matmul in values["matmuls"] if matmul.get("plan")}
        except (AttributeError, KeyError, TypeError) as error:
            hint = "write it from `comfuse explain --json`"
            raise PlanError("matmuls with a name and a plan", f"{path}: {error}", hint) from error
    if not isinstance(values, dict):
        raise PlanError("a JSON object of plans", type(values).__name__, "write it from `comfuse explain --json`")
    return values
