"""``comfuse tune MODEL``."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tvm_comfuse.cli.common import JsonFlag, Model, TargetOption, console, print_json, start
from tvm_comfuse.tuning.arguments import seconds
from tvm_comfuse.tuning.interrupt import ending_at_interrupts

if TYPE_CHECKING:
    from rich.table import Table

    from tvm_comfuse.tuning.search import Search

#: exit code after an interrupt, as shells give it
INTERRUPTED = 130
_REFRESH_HZ = 2
#: the form of two kernels, see forms.py, which imports TVM
SPLIT = "split"


def address(text: str) -> tuple[str, int]:
    """Host and port of HOST:PORT."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit():
        raise typer.BadParameter(f"{text!r} is no HOST:PORT")
    return host, int(port)


def tune(
    model: Model,
    target: TargetOption = "cuda",
    tuning_records: Annotated[
        Path | None, typer.Option("--tuning-records", help="A folder for records; a search goes on where it ended.")
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option("--trials", min=1, help="Candidates in all, also those that fail; 64 a task if left out."),
    ] = None,
    time_budget: Annotated[
        str | None, typer.Option("--time-budget", help="When to stop: 90s, 10m, 1.5h.", metavar="DURATION")
    ] = None,
    early_stopping: Annotated[
        int | None, typer.Option("--early-stopping", min=1, help="A task ends after so many candidates in vain.")
    ] = None,
    parallel: Annotated[int | None, typer.Option("--parallel", min=1, help="Processes that build.")] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", min=1, help="Seconds from a kernel's first launch to its result.")
    ] = 30.0,
    rows: Annotated[
        int | None, typer.Option("--rows", min=1, help="M of the measurements if it is symbolic; 8192 if left out.")
    ] = None,
    tracker: Annotated[
        str | None,
        typer.Option("--tracker", "--rpc-tracker", help="HOST:PORT of a TVM RPC tracker: measure on its servers."),
    ] = None,
    key: Annotated[str, typer.Option("--key", "--rpc-key", help="Key of the tracker's servers.")] = "",
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Servers to measure on at a time; 1 if left out.")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Measure plans for the kernels of a model on this machine's GPU and keep the fastest whose numbers are right."""
    budget = seconds(time_budget) if time_budget is not None else None
    with ending_at_interrupts(INTERRUPTED):
        start()
        from tvm_comfuse.tuning.api import tune as tune_model
        from tvm_comfuse.worker import Limits

    display = _Display(quiet=json)
    with display.live:
        result = tune_model(
            model,
            target,
            trials=trials,
            time_budget=budget,
            records=tuning_records,
            early_stopping=early_stopping,
            rows=rows,
            parallel=parallel,
            limits=Limits(launch=timeout),
            tracker=address(tracker) if tracker is not None else None,
            key=key,
            workers=workers,
            on_change=display.show,
        )
        display.ended = True
    if json:
        print_json(result.to_dict())
    else:
        for refusal in result.refusals:
            display.out.print(f"not tuned: {refusal}")
        if not result.note:
            display.end()
        for task in result.tasks:
            if task.form == SPLIT:
                display.out.print(f"{', '.join(task.matmuls)}: two kernels take less time and are what compile takes")
        display.out.print(_last_line(model, target, result), soft_wrap=True)
    if result.stopped == "interrupt":
        raise typer.Exit(INTERRUPTED)


class _Display:
    """A table that is drawn again and again on a terminal, once at the end elsewhere, where each new best is a line."""

    def __init__(self, quiet: bool):
        self.out = console()
        self._quiet, self._live = quiet, None
        self._search: Search | None = None
        self._said: dict[str, float] = {}
        #: whether there is nothing to wait for
        self.ended = False
        if self.out.is_terminal and not quiet:
            from rich.live import Live

            self._live = Live(console=self.out, refresh_per_second=_REFRESH_HZ, get_renderable=self._table)

    @property
    def live(self) -> Any:
        """A context manager around the search."""
        return self._live or nullcontext()

    def show(self, search: Search) -> None:
        """After an event."""
        self._search = search
        if self._quiet or self._live is not None:
            return
        for progress in search.progress:
            if progress.best is not None and self._said.get(progress.task.key) != progress.best.us:
                self._said[progress.task.key] = progress.best.us
                line = f"{progress.task.name}: {progress.best.us:.1f} us with {progress.best.plan.short()}"
                self.out.print(f"{search.trials}/{search.settings.trials} {line}")

    def end(self) -> None:
        """The last table where none is left standing."""
        if self._live is None:
            self.out.print(self._table())

    def _table(self) -> Any:
        if self._search is None:
            return "" if self.ended else "looking for clusters"
        return table(self._search)


def table(search: Search) -> Table:
    """One row a task: trials, best and other times in microseconds, failures by reason.

    Unfused is the split form; a word there says why it has no time.
    """
    from rich.table import Table

    left = search.seconds_left
    clock = f", {left:.0f} s left" if left is not None and not search.stopped else ""
    stopped = f", ended: {search.stopped}" if search.stopped else ""
    result = Table(title=f"{search.trials} of {search.settings.trials} trials{clock}{stopped}")
    for heading in ("task", "M x N x K"):
        result.add_column(heading, overflow="fold")
    for heading in ("trials", "best us", "default us", "speed-up", "unfused us", "cuBLAS us"):
        result.add_column(heading, justify="right")
    result.add_column("failed", overflow="fold")
    for progress in search.progress:
        best, default = progress.best.us if progress.best else None, progress.default_us
        result.add_row(
            progress.task.name,
            " x ".join(map(str, progress.task.shape)),
            str(progress.trials),
            _number(best),
            _number(default),
            _number(default / best, 2) if best and default else "-",
            progress.split.failure or _number(progress.split.us),
            _number(search.runner.products.get(progress.task.key)),
            ", ".join(f"{count} {reason}" for reason, count in progress.failures.items()) or "-",
        )
    return result


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _last_line(model: str, target: str, result: Any) -> str:
    if result.note:
        return f"{result.note}; see `comfuse explain {model}`"
    if not result.plans:
        sooner = "; give it a longer --time-budget" if result.stopped == "time" else ""
        return f"no plan was found, ended: {result.stopped}; the default ones stay{sooner}"
    if result.records is None:
        return "nothing was kept; give --tuning-records FOLDER to keep and use the plans"
    return f"to use them: comfuse compile {model} -o model.so --target {target} --tuning-records {result.records}"
