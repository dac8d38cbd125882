"""``comfuse bench``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tvm_comfuse.cli.common import FormOption, Pretuned, TuningRecords, console, start
from tvm_comfuse.output import check_output


def bench(
    suite: Annotated[str | None, typer.Option("--suite", help="Name of a suite; all of them if left out.")] = None,
    suite_file: Annotated[Path | None, typer.Option("--suite-file", help="A suite file of your own.")] = None,
    row: Annotated[list[str] | None, typer.Option("--row", help="Only this row; may be given again.")] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write the report here, after every row.")] = None,
    target: Annotated[str, typer.Option("--target", help="h200, h100 or cuda; llvm with --check-only.")] = "cuda",
    seeds: Annotated[int, typer.Option("--seeds", min=0, help="Seeds each row is checked on.")] = 3,
    inductor: Annotated[
        str, typer.Option("--inductor", help="Settings to try: none, default, quick or full.")
    ] = "quick",
    check_only: Annotated[bool, typer.Option("--check-only", help="Check the numbers and time nothing.")] = False,
    tuning_records: TuningRecords = None,
    pretuned: Pretuned = True,
    form: FormOption = "auto",
) -> None:
    """Check and time our kernels next to their split form, a bare product, eager PyTorch and TorchInductor, in one process."""
    start()
    if json is not None:
        check_output(json)
    from tvm_comfuse.bench import run_suite
    from tvm_comfuse.bench.report import RowResult

    out = console()

    def show(result: RowResult) -> None:
        times = ", ".join(
            f"{name} {value:.1f} us"
            for name, value in (
                ("ours", result.ours_us),
                ("split", result.split_us),
                ("mm", result.mm_us),
                ("eager", result.eager_us),
                ("inductor", result.inductor_us),
            )
            if value is not None
        )
        error = f"error {result.error:.2e} (eager {result.eager_error:.2e})" if result.error is not None else ""
        state = result.failure or (str(result.refusal) if result.refusal else "")
        out.print(f"{result.suite} {result.name}: {'; '.join(part for part in (times, error, state) if part)}")

    run_suite(
        suite,
        suite_file,
        row or None,
        target=target,
        seeds=seeds,
        inductor=inductor,
        json_path=json,
        timed=not check_only,
        tuning_records=tuning_records,
        use_pretuned=pretuned,
        form=form,
        progress=show,
    )
