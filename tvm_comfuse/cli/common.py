"""What the commands share: output, and the options that several have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tvm_comfuse._versions import check_versions

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
