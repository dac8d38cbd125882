"""``comfuse profile ROW_OR_MODEL``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tvm_comfuse.cli.common import MODEL_HELP, PlansFile, Pretuned, TuningRecords, console, read_plans, start
from tvm_comfuse.output import check_output

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from tvm_comfuse.profile import Profile

#: kinds of a role that are shown, those with the largest share
_SHOWN = 6


def profile(
    what: Annotated[
        str | None, typer.Argument(metavar="[ROW_OR_MODEL]", help=f"A row of the suites, or a model: {MODEL_HELP}")
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write the profile here.")] = None,
    picture: Annotated[Path | None, typer.Option("--picture", help="Draw the timeline here, .svg or .png.")] = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="Read a profile that --json wrote, instead of making one.")
    ] = None,
    ncu: Annotated[bool, typer.Option("--ncu", help="Ask Nsight Compute, too.")] = False,
    kernel: Annotated[str | None, typer.Option("--kernel", help="Which kernel of a model that has several.")] = None,
    rows: Annotated[int | None, typer.Option("--rows", min=1, help="M, where the model leaves it open.")] = None,
    target: Annotated[str, typer.Option("--target", help="h200, h100 or cuda.")] = "cuda",
    plans: PlansFile = None,
    tuning_records: TuningRecords = None,
    pretuned: Pretuned = True,
) -> None:
    """Show where a kernel's time goes: clock stamps of an instrumented build, on a Hopper GPU."""
    start()
    from tvm_comfuse.profile import Profile, ProfileError

    for path in (json, picture):
        if path is not None:
            check_output(path)
    if picture is not None:
        from tvm_comfuse.profile.picture import check_suffix

        check_suffix(picture)
    if (what is None) == (source is None):
        found = "neither" if what is None else "both"
        raise ProfileError("a row or model, or --from FILE", found, "comfuse profile bert_large_attn --json out.json")
    if source is not None:
        made = Profile.read(source)
    else:
        assert what is not None
        options = {"kernel": kernel, "rows": rows, "tuning_records": tuning_records, "use_pretuned": pretuned}
        made = _measured(what, target, read_plans(plans), ncu, options)
    if json is not None:
        made.write(json)
    if picture is not None:
        from tvm_comfuse.profile.picture import draw

        draw(made, picture)
    show(console(), made)


def _measured(what: str, target: str, plans: dict[str, Any] | None, ncu: bool, options: dict[str, Any]) -> Profile:
    """options: the keywords of find_subject."""
    from tvm_comfuse.profile.measure import measure, require_gpu
    from tvm_comfuse.profile.ncu import ask, find_ncu
    from tvm_comfuse.profile.subject import find_subject
    from tvm_comfuse.target import parse_target

    require_gpu()
    if ncu:
        find_ncu()
    parsed = parse_target(target)
    subject = find_subject(what, parsed, plans, **options)
    made = measure(subject, parsed)
    return replace(made, ncu=ask(subject, parsed)) if ncu else made


def show(out: Console, made: Profile) -> None:
    """The summary as tables."""
    cost = "" if made.cost is None else f": {made.us:.1f} us a call; stamps add {made.cost:.0f} cycles"
    if made.spilled:
        out.print(f"with stamps the kernel spills {made.spilled} bytes a thread: its times differ from those without")
    out.print(f"{made.name} ({' x '.join(map(str, made.shape))}) on {made.device}{cost}")
    out.print(_roles(made))
    if made.ncu is not None:
        out.print(f"Nsight Compute: {made.ncu['failure']}" if "failure" in made.ncu else _metrics(made.ncu["metrics"]))


def _roles(made: Profile) -> Table:
    from rich.table import Table

    from tvm_comfuse.profile.summary import share_of

    table = Table(title=f"of {made.summary.cycles:.0f} cycles of a CTA, percent")
    for heading in ("role", "busy", "waiting", "outside", "most of it"):
        table.add_column(heading, justify="left" if heading in ("role", "most of it") else "right")
    for name, role in made.summary.roles.items():
        shares = sorted(share_of(role.kinds).items(), key=lambda item: -item[1])[:_SHOWN]
        kinds = ", ".join(f"{kind} {100 * share:.1f}" for kind, share in shares)
        table.add_row(name, *(f"{100 * part:.1f}" for part in (role.busy, role.waiting, role.outside)), kinds)
    return table


def _metrics(metrics: list[dict[str, object]]) -> Table:
    from rich.table import Table

    table = Table(title="Nsight Compute, one launch without stamps")
    for heading in ("figure", "value", "metric"):
        table.add_column(heading)
    for line in metrics:
        value = "not measured" if line["value"] is None else f"{line['value']:,} {line['unit']}"
        table.add_row(str(line["label"]), value, str(line["metric"] or ""))
    return table
