"""The program ``comfuse``."""

from __future__ import annotations

import sys
import warnings
from typing import TextIO

import typer

from tvm_comfuse import __version__
from tvm_comfuse.cli import bench, compile, db, doctor, explain, profile, run, tune, verify
from tvm_comfuse.errors import ComfuseError

#: exit code of wrong input, as of wrong options
WRONG_INPUT = 2

app = typer.Typer(
    name="comfuse",
    help="Fuse matrix products with the row reductions behind them into single Hopper kernels.",
    no_args_is_help=True,
    add_completion=False,
    # plain text: a message is one line, also for a program that reads it
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for _command in (
    doctor.doctor,
    explain.explain,
    compile.compile_,
    tune.tune,
    run.run,
    verify.verify,
    bench.bench,
    profile.profile,
):
    app.command(name=_command.__name__.rstrip("_"))(_command)
app.add_typer(db.app)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"comfuse {__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", is_eager=True, callback=_print_version, help="Print the version."),
) -> None:
    """Options in front of the command."""


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """One line, without the place in the source, which says nothing to whoever types commands."""
    sys.stderr.write(f"comfuse: warning: {' '.join(str(message).split())}\n")


def main() -> None:
    """Run the command line.  Exit code 2 and one line on standard error for wrong input."""
    warnings.showwarning = _show_warning
    try:
        app()
    except ComfuseError as error:
        line = " ".join(str(error).split())
        sys.stderr.write(f"comfuse: {line}\n")
        sys.exit(WRONG_INPUT)
