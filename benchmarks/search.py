"""How good the tuner's search is, measured on suite rows.

    python benchmarks/search.py --exhaustive post_norm/gemma2_2b_o --time-budget 4m      every legal plan of a row
    python benchmarks/search.py --compare post_norm --trials 64 --seeds 1               the search against random search
    python benchmarks/search.py                                                         the table of what is known

Everything goes into one file (--json), in which no plan is measured twice: searches take what a sweep or an earlier search
has measured, so on a row with a whole sweep any number of seeds can be tried without a GPU.  A run that was stopped
(--time-budget, Ctrl-C) keeps what it has and goes on when it is started again.

Of a sweep all plans are timed, the fastest 5 % again in turns and compared with float64.  Random search begins with the
default plan too, as every time is corrected by that of the default plan, measured in the same minute.
"""

from __future__ import annotations

import argparse
import math
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tvm_comfuse
from tvm_comfuse.bench import suites
from tvm_comfuse.bench.ops import OPS
from tvm_comfuse.bench.report import ReportError
from tvm_comfuse.bench.suites import Row
from tvm_comfuse.cli.tune import seconds
from tvm_comfuse.errors import ComfuseError
from tvm_comfuse.frontend import from_relax
from tvm_comfuse.schedules.device import H200, device_of
from tvm_comfuse.schedules.plan import Plan
from tvm_comfuse.tuning.builder import Builder
from tvm_comfuse.tuning.contest import CHOICES, MARKS, contest
from tvm_comfuse.tuning.interrupt import noting_interrupts
from tvm_comfuse.tuning.plan_times import PlanTimes, RowTimes
from tvm_comfuse.tuning.runner import Runner
from tvm_comfuse.tuning.space import Space
from tvm_comfuse.tuning.sweep import Sweep, begin_with
from tvm_comfuse.tuning.task import Task, tasks_of

RESULTS = Path(__file__).with_name("results") / "h200" / "search.json"
#: what must not differ between the runs that fill one file
SAME = ("device", "kernel")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=RESULTS, help="where times are kept")
    parser.add_argument("--exhaustive", nargs="+", default=[], metavar="ROW", help="measure every legal plan of rows")
    parser.add_argument("--compare", nargs="+", default=[], metavar="ROW", help="rows, or names of suites")
    parser.add_argument("--trials", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=1, help="searches of a kind for each row")
    parser.add_argument("--time-budget", type=seconds, default=math.inf, help="of all together: 90s, 10m")
    parser.add_argument("--side-by-side", type=int, default=1, help="rows that are searched at the same time")
    parser.add_argument("--parallel", type=int, help="processes that build")
    parser.add_argument("--target", default="h200")
    parser.add_argument("--suite-file", type=Path)
    options = parser.parse_args(arguments)
    try:
        bench = Bench(options)
        with bench.running():
            for row in bench.rows(options.exhaustive):
                bench.sweep(row)
            bench.compare(bench.rows(options.compare))
    except (ComfuseError, OSError) as error:
        print(f"search: {error}", file=sys.stderr)
        return 1
    print(table(bench.file))
    return 0


class Bench:
    """One run of the script.  Raises ComfuseError for names and files that are no good."""

    def __init__(self, options: argparse.Namespace):
        self._options, self._end = options, time.monotonic() + options.time_budget
        self._target = tvm_comfuse.parse_target(options.target)
        self._device = device_of(self._target) or H200
        self._suites = suites.load(options.suite_file)
        self._lock, self._interrupted = threading.Lock(), threading.Event()
        self.file = PlanTimes.read(options.json) if options.json.is_file() else PlanTimes.new()

    def rows(self, names: Sequence[str]) -> list[Row]:
        """The rows of names, each of which may be a suite's.  Raises ComfuseError if they cannot be measured here."""
        found = []
        for name in names:
            suite = name if name in self._suites else None
            found += suites.select(self._suites, suite, None if suite else [name])
        if not all(row.label in self.file.rows and self.file.rows[row.label].whole for row in found):
            _same(self.file, PlanTimes.new(), self._options.json)
        return list(dict.fromkeys(found))

    @contextmanager
    def running(self) -> Iterator[None]:
        """With the processes that build and measure, in which Ctrl-C is noted."""
        with (
            noting_interrupts(self._interrupted),
            Builder(self._target, self._options.parallel) as self._builder,
            Runner(self._target) as self._runner,
        ):
            yield

    def sweep(self, row: Row) -> None:
        """Every legal plan of a row."""
        task, times, space = self._prepare(row)
        sweep = Sweep(task, times, self._builder, self._runner, self._keep, self._interrupted)
        sweep.run(space.legal, None if math.isinf(self._left) else self._left)

    def compare(self, rows: Sequence[Row]) -> None:
        """Both searches with every seed on rows, some of them at the same time."""
        with ThreadPoolExecutor(self._options.side_by_side) as pool:
            for future in [pool.submit(self._compare, row, *self._prepare(row)) for row in rows]:
                future.result()

    def _compare(self, row: Row, task: Task, times: RowTimes, _: Space) -> None:
        for seed in range(self._options.seeds):
            for kind in CHOICES:
                if _has(times, kind, seed, self._options.trials) or self._left == 0 or self._interrupted.is_set():
                    continue
                budget = None if math.isinf(self._left) else self._left
                common = (task, self._target, self._device, times, self._builder, self._runner)
                entry = contest(kind, *common, self._options.trials, seed, budget, self._interrupted)
                print(f"{row.label} {kind} seed {seed}: {entry['best']} us, {entry['seconds']} s", file=sys.stderr)
                self._keep()

    @property
    def _left(self) -> float:
        return max(0.0, self._end - time.monotonic())

    def _prepare(self, row: Row) -> tuple[Task, RowTimes, Space]:
        """The row's only cluster, what is known of it, and its plans."""
        module = from_relax(OPS[row.op].relax_module(row.M, row.N, row.K, row.dtype))
        tasks, refusals = tasks_of(module, self._device)
        if len(tasks) != 1:
            raise ReportError("a row that is one cluster", f"{refusals or len(tasks)} in {row.label}", "leave it out")
        space = Space.of(tasks[0].spec, self._device)
        assert isinstance(space, Space)  # or there were no task
        with self._lock:
            times = self.file.rows.setdefault(row.label, RowTimes(row, len(space.legal), space.default))
        times.legal = len(space.legal)
        if not begin_with(space.default, tasks[0], times, self._builder, self._runner):
            needed = f"times beside the default plan {space.default.short()}"
            raise ReportError(needed, times.default.short(), "begin a new file")
        return tasks[0], times, space

    def _keep(self) -> None:
        with self._lock:
            self.file.write(self._options.json)


def _same(old: PlanTimes, new: PlanTimes, path: Path) -> None:
    """Raises ReportError if a file was measured elsewhere or with another kernel."""
    for name in SAME:
        before, now = (file.header.get(name) or file.header["versions"][name] for file in (old, new))
        if before != now:
            raise ReportError(f"times of the {name} {now} in {path}", before, "give another file with --json")


def _has(times: RowTimes, kind: str, seed: int, trials: int) -> bool:
    return any((s["kind"], s["seed"], s["trials"]) == (kind, seed, trials) for s in times.searches)


def table(file: PlanTimes) -> str:
    """One line a row and search: the best times after 8, 16, ... trials, and the share of the best plan's speed."""
    marks = "".join(f"{mark:>8}" for mark in MARKS)
    lines = [f"{'row':26} {'search':12} {'default':>8}{marks} {'of best':>8} {'seconds':>8} {'built':>6}"]
    for label, times in file.rows.items():
        if times.sweep:
            lines.append(_sweep_line(label, times))
        for entry in times.searches:
            best = "".join(f"{_number(entry['best'].get(str(mark))):>8}" for mark in MARKS)
            name = f"{entry['kind']} {entry['seed']}"
            share = _number(share_of_best(times, entry), 3)
            lines.append(
                f"{label:26} {name:12} {_number(entry['default_us']):>8}{best} {share:>8} {entry['seconds']:8} "
                f"{entry['built']:6}"
            )
    won, rows = verdict(file)
    lines += [f"ranked beats random after all trials on {won} of {rows} rows (mean of the seeds)"] if rows else []
    return "\n".join(lines)


def _sweep_line(label: str, times: RowTimes) -> str:
    sweep = times.sweep or {}
    whole = "" if sweep["complete"] else f" of {times.legal}"
    return (
        f"{label:26} {'all':12} {_number(sweep['default_us']):>8} {_number(sweep['best_us'])} us is the best of "
        f"{sweep['plans']}{whole} plans, {sweep['failed']} failed, {sweep['seconds']} s"
    )


def share_of_best(times: RowTimes, entry: dict[str, Any]) -> float | None:
    """The best plan's time over that of a search's plan; None without a whole sweep."""
    if not times.sweep or not times.sweep["complete"] or times.best is None or entry["best_plan"] is None:
        return None
    found, best = times.us(Plan.from_dict(entry["best_plan"])), times.us(times.best)
    return best / found if best and found else None


def verdict(file: PlanTimes) -> tuple[int, int]:
    """Rows on which the ranked search's time is below random search's, and rows that have both; means over seeds."""
    won = rows = 0
    for times in file.rows.values():
        found: dict[str, list[float]] = {kind: [] for kind in CHOICES}
        for entry in times.searches:
            if entry["best_us"] is not None:
                found[entry["kind"]].append(entry["best_us"])
        if all(found.values()):
            ranked, random = (sum(us) / len(us) for us in found.values())
            won, rows = won + (ranked < random), rows + 1
    return won, rows


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


if __name__ == "__main__":
    sys.exit(main())
