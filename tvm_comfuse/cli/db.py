"""``comfuse db list|merge|prune|export|verify DIR``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tvm_comfuse.cli.common import JsonFlag, TargetOption, console, print_json, start

if TYPE_CHECKING:
    from rich.table import Table

    from tvm_comfuse.tuning.database import Database, Record

#: exit code if a record does not hold
BROKEN = 1
#: characters of a record's key that are shown
KEY_LENGTH = 12

app = typer.Typer(
    name="db",
    help="Look after tuning databases: folders of measured plans.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
Folder = Annotated[Path, typer.Argument(help="The folder of a tuning database.")]
Keep = Annotated[int, typer.Option("--keep", min=1, help="Records to keep of each workload, the fastest ones.")]


@app.command("list")
def list_(folder: Folder, json: JsonFlag = False) -> None:
    """Show every record: what was measured where, and why it is not believed if it is not."""
    database = _open(folder, read_only=True)
    records = database.records()
    if json:
        print_json({"records": [described(record) for record in records]})
        return
    out = console()
    if records:
        out.print(table(records))
    for record in records:
        if record.doubt:
            out.print(f"{record.entry.key[:KEY_LENGTH]} is not believed: {record.doubt}")
    usable = sum(record.is_current for record in records)
    out.print(f"{len(records)} record{'s' if len(records) != 1 else ''}, {usable} of them answer with these versions")


@app.command()
def merge(
    folder: Folder,
    sources: Annotated[list[Path], typer.Argument(help="Databases to copy the records of.")],
    json: JsonFlag = False,
) -> None:
    """Copy the records of other databases into one, which is made if there is none.  Sources stay as they are."""
    start()
    from tvm_comfuse.tuning.database import Database

    opened = [_open(source, read_only=True) for source in sources]
    database = Database.open(folder)
    counts = [database.merge(source) for source in opened]
    added, refused = (sum(count) for count in zip(*counts, strict=True))
    if json:
        print_json({"added": added, "refused": refused})
        return
    rest = f"; {refused} left out that are not believed" if refused else ""
    console().print(f"{added} new record{'s' if added != 1 else ''}{rest}")


@app.command()
def prune(
    folder: Folder,
    keep: Annotated[
        int | None, typer.Option("--keep", min=1, help="Drop also all but so many records of a workload, the fastest.")
    ] = None,
    stale: Annotated[bool, typer.Option("--stale", help="Remove the records of other versions altogether.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and change nothing.")] = False,
    json: JsonFlag = False,
) -> None:
    """Drop records that are not believed and lines that are no records."""
    database = _open(folder, read_only=dry_run)
    lines, gone = database.bad_lines(), database.removals(keep, stale=stale)
    dropped = len(gone) if dry_run else database.prune(keep, stale=stale)
    left = len(database.records()) - (len(gone) if dry_run else 0)
    if json:
        removed = [{"key": each.record.entry.key, "why": each.why} for each in gone]
        print_json({"dry_run": dry_run, "dropped": dropped, "left": left, "lines": lines, "records": removed})
        return
    out = console()
    for each in gone if dry_run else []:
        out.print(f"{each.record.entry.key[:KEY_LENGTH]} {_label(each.record)}: {each.why}")
    broken = f"; {lines} broken line{'s' if lines != 1 else ''}" if lines else ""
    out.print(f"{dropped} {'would be ' if dry_run else ''}dropped, {left} left{broken}")


@app.command()
def export(
    folder: Folder,
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write, without a database in it.")],
    target: TargetOption = "h200",
    keep: Keep = 1,
    json: JsonFlag = False,
) -> None:
    """Write a stock MetaSchedule database for one target, which relax.transform.MetaScheduleApplyDatabase reads."""
    database = _open(folder, read_only=True)
    from tvm_comfuse.target import name_of, parse_target

    parsed = parse_target(target)
    count = database.export(parsed, output, keep)
    if json:
        print_json({"exported": count, "folder": str(output)})
        return
    console().print(f"{output}: {count} record{'s' if count != 1 else ''} for {name_of(parsed)}")


@app.command()
def verify(folder: Folder, json: JsonFlag = False) -> None:
    """Replay, lower, check and query every record.  Exit code 1 if one does not hold."""
    database = _open(folder, read_only=True)
    from tvm_comfuse.tuning.database import verify as verify_database

    out = console()

    def show(record: Record, text: str) -> None:
        if not json:
            out.print(f"{record.entry.key[:KEY_LENGTH]} {_label(record)}: {text or 'holds'}")

    problems = verify_database(database, show)
    count = len(database.records())
    if json:
        found = [{"key": each.record.entry.key, "question": each.question, "text": each.text} for each in problems]
        print_json({"records": count, "passed": not problems, "problems": found})
    else:
        out.print(f"{count - len(problems)} of {count} records hold")
    if problems:
        raise typer.Exit(BROKEN)


def described(record: Record) -> dict[str, Any]:
    """A record as plain JSON values."""
    evidence = record.evidence.to_dict() if record.evidence else {}
    return {
        "key": record.entry.key,
        "folder": record.binding.folder,
        "us": record.seconds * 1e6 if record.seconds < float("inf") else None,
        **evidence,
        "plan": record.plan.to_dict() if record.plan else None,
        "believed": not record.doubt,
        "doubt": record.doubt,
        "current": record.is_current,
    }


def table(records: list[Record]) -> Table:
    """One row a record."""
    from rich.table import Table

    result = Table()
    for heading in ("record", "device", "M x N x K", "us", "error", "plan", "measured", "versions"):
        result.add_column(heading, overflow="fold")
    for record in records:
        evidence = record.evidence
        result.add_row(
            f"{record.entry.key[:KEY_LENGTH]} {evidence.label if evidence else ''}".strip(),
            record.binding.device,
            _shape(record),
            f"{record.seconds * 1e6:.1f}",
            f"{evidence.accuracy.error:.2e}" if evidence else "-",
            record.plan.short() if record.plan else "-",
            evidence.time if evidence else "-",
            "these" if record.is_current else "" if record.binding.is_current else "others",
        )
    return result


def _shape(record: Record) -> str:
    evidence = record.evidence
    if evidence is None:
        return "-"
    bucket = f" (M {evidence.rows})" if evidence.shape.m is None else ""
    return f"{evidence.shape}{bucket}"


def _label(record: Record) -> str:
    name = record.evidence.label if record.evidence else ""
    return f"{name or record.binding.device} {_shape(record)}"


def _open(folder: Path, read_only: bool = False) -> Database:
    start()
    from tvm_comfuse.tuning.database import Database

    return Database.open(folder, create=False, read_only=read_only)
