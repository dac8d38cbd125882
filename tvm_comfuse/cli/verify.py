"""``comfuse verify MODEL``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

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

if TYPE_CHECKING:
    from rich.console import Console

    from tvm_comfuse.verify.api import KernelVerification

#: exit code if a kernel breaks a rule
BROKEN = 1


def verify(
    model: Model,
    target: TargetOption = "h200",
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Random interleavings of each kernel.")] = 3,
    plans: PlansFile = None,
    tuning_records: TuningRecords = None,
    pretuned: Pretuned = True,
    form: FormOption = "auto",
    rows: RowsOption = None,
    json: JsonFlag = False,
) -> None:
    """Check every kernel of a model without a GPU: rules of the protocol, interleavings, error against float64."""
    start()
    from tvm_comfuse.verify.api import verify as verify_model

    report = verify_model(
        model,
        target,
        **chosen(plans, tuning_records, pretuned, form, rows),
        seeds=range(seeds),
    )
    tell_of_silent_records(tuning_records)
    if json:
        print_json(report.to_dict())
    else:
        out = console()
        if not report.kernels:
            out.print("no kernel to verify: nothing of the model is fused (see `comfuse explain`)")
        for kernel in report.kernels:
            show(out, kernel)
    if not report.passed:
        raise typer.Exit(BROKEN)


def show(out: Console, kernel: KernelVerification) -> None:
    """What was checked of one kernel, and what was found."""
    shape = " x ".join(map(str, kernel.shape))
    out.print(f"{kernel.name} ({shape}): {'passed' if kernel.passed else 'FAILED'}")
    out.print(f"  static checks      {', '.join(kernel.checks)}")
    reduced = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in kernel.reduced.items())
    out.print(f"  interpreted twin   same plan and code; reduced: {reduced or 'nothing'}")
    out.print(f"  interleavings      {kernel.interleavings}")
    for name, error in kernel.errors.items():
        out.print(f"  error of {name}: {error:.3g} against float64, allowed {kernel.allowed[name]:.3g}")
    if kernel.unsupported:
        out.print(f"  not interpreted    {kernel.unsupported}")
    for finding in kernel.findings:
        out.print(f"  {finding}" + (f" ({kernel.found_in})" if kernel.found_in else ""))
