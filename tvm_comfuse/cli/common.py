"""What the commands share: output, and the options that several have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tvm_comfuse._versions import check_versions
from tvm_comfuse.errors import PlanError

MODEL_HELP = "A .pt2 file, a Relax module saved as .json, file.py:function or package.module:function."
TARGET_HELP = "h200, h100, cuda, 'cuda -arch=sm_90a', llvm ..."

Model = Annotated[str, typer.Argument(help=MODEL_HELP)]
TargetOption = Annotated[str, typer.Option("--target", help=TARGET_HELP)]
TuningRecords = Annotated[
    Path | None, typer.Option("--tuning-records", help="A tuning database (see `comfuse db`) to take plans from.")
]
Pretuned = Annotated[
    bool, typer.Option("--pretuned/--no-pretuned", help="Use the measured plans that come with the package.")
]
FormOption = Annotated[
    str, typer.Option("--form", help="auto, fused or split: one kernel a cluster, two, or what takes less time.")
]
RowsOption = Annotated[
    int | None,
    typer.Option(
        "--rows", min=1, help="Rows for which tuning records of a symbolic M are chosen; the most if left out."
    ),
]
PlansFile = Annotated[
    Path | None,
    typer.Option(
        "--plans",
        help="JSON: the output of `explain --json` or `tune --json`, or {matmul name: plan of the fused form, split or off}.",
    ),
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


def console() -> Console:
    """For tables; as wide as the terminal, or 120 columns where there is none."""
    made = Console(highlight=False, markup=False)
    return made if made.is_terminal else Console(highlight=False, markup=False, width=120)


def print_json(values: Any) -> None:
    """Plain JSON on standard output."""
    typer.echo(json.dumps(values, indent=1))


def start() -> None:
    """What every command but doctor does first.  Raises VersionError."""
    check_versions()


def chosen(
    plans: Path | None, tuning_records: Path | None, pretuned: bool, form: str, rows: int | None
) -> dict[str, Any]:
    """Keywords of the functions behind the commands, of the options that decide about forms and plans.

    Raises PlanError as read_plans does.
    """
    return {
        "plans": read_plans(plans),
        "tuning_records": tuning_records,
        "use_pretuned": pretuned,
        "form": form,
        "rows": rows,
    }


def tell_of_silent_records(folder: Path | None) -> None:
    """A line on standard error if a database has records and none of them can answer."""
    if folder is None:
        return
    from tvm_comfuse.tuning.database import Database

    records = Database.open(folder, create=False, read_only=True).records()
    if records and not any(record.is_current for record in records):
        count = f"{len(records)} record{'s' if len(records) > 1 else ''}"
        typer.echo(
            f"comfuse: warning: none of {count} in {folder} answers; `comfuse db list {folder}` says why", err=True
        )


def read_plans(path: Path | None) -> dict[str, Any] | None:
    """What a file of plans holds; None without a file.  Raises PlanError for one that holds no object, or an empty one."""
    if path is None:
        return None
    hint = "write it from `comfuse explain --json`"
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise PlanError("a JSON file of plans", f"{path}: {error}", hint) from error
    if not isinstance(values, dict):
        raise PlanError("a JSON object of plans", f"{path}: {type(values).__name__}", hint)
    if not values:
        raise PlanError("plans to compile with", f"{path}: an empty object", f"{hint}, or leave --plans out")
    return values
