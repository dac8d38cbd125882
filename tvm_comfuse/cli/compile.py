"""``comfuse compile MODEL -o OUT``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

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
from tvm_comfuse.errors import BuildError
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
    plans: PlansFile = None,
    tuning_records: TuningRecords = None,
    pretuned: Pretuned = True,
    form: FormOption = "auto",
    rows: RowsOption = None,
    json: JsonFlag = False,
) -> None:
    """Compile a model to a shared library and report each kernel's registers, spills and shared memory."""
    start()
    check_output(output, LIBRARY_SUFFIX)
    from tvm_comfuse.build import compile as compile_model

    compiled = compile_model(
        model,
        target,
        **chosen(plans, tuning_records, pretuned, form, rows),
        dump=dump,
    )
    explanation = compiled.explanation
    tell_of_silent_records(tuning_records)
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
    out = console()
    out.print(f"{library}: {explanation.summary}")
    if any(matmul.form == "not fused" for matmul in explanation.matmuls):
        out.print("`comfuse explain` with the same options says why not")
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
